"""Record: the measurements of a candidate, and the front of several."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import hypot
from typing import TypeVar

from quark_onnx.report.verdict.verdict import SLOWER

#: A ratio of sizes up to which they count as equal.
_SIZE_TOLERANCE = 1.01


@dataclass(frozen=True)
class Record:
    """Measurements of a configuration.

    Attributes:
        score: the score, higher is better, such as an SQNR or a negative divergence; None if the
            candidate failed.
        seconds: runtime of quantization and evaluation.
        bytes: size of the quantized model; None if the candidate failed.
        error: reason of the failure; empty without a failure.
        judged: number of samples in the evaluation; 0 with a metric of the user's.
        pruned: True if the evaluation ended early because the score was below the median.
        runtime: latency relative to the float model; None if not measured.
        scatter: share of ``runtime`` by which repeated timings of the same model differ; 0 if
            unknown.
    """

    score: float | None
    seconds: float
    bytes: int | None
    error: str = ""
    judged: int = 0
    pruned: bool = False
    runtime: float | None = None
    scatter: float = 0.0


M = TypeVar("M", bound=Record)


def pareto_front(candidates: Iterable[M]) -> list[M]:
    """Return the Pareto front of score, size and runtime, in the given order.

    A candidate is on the front if no other one is better without being larger or slower.
    Differences of 1 % of the size or 5 % of the runtime count as none, nor do those of the runtime
    that repeated timings of the same models show. Failed and pruned candidates are not on the
    front.
    """
    measured = [
        each for each in candidates if each.score is not None and not each.pruned
    ]
    return [
        each
        for each in measured
        if not any(_surpasses(other, each) for other in measured)
    ]


def _surpasses(other: Record, candidate: Record) -> bool:
    """Return whether another candidate is better in something, and in nothing worse."""
    scores = other.score or 0.0, candidate.score or 0.0
    sizes = other.bytes or 0, candidate.bytes or 0
    times = other.runtime or 0.0, candidate.runtime or 0.0
    # A runtime that was not measured is neither better nor worse than another.
    if (other.runtime is None) != (candidate.runtime is None):
        return False
    if scores[0] < scores[1] or sizes[0] > _SIZE_TOLERANCE * sizes[1]:
        return False
    slower = max(SLOWER, 1.0 + hypot(other.scatter, candidate.scatter))
    if times[0] > slower * times[1]:
        return False
    smaller = _SIZE_TOLERANCE * sizes[0] < sizes[1]
    return scores[0] > scores[1] or smaller or slower * times[0] < times[1]
