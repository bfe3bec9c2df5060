"""How far a model's outputs are from another's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class OutputError:
    """The error of one output over all samples.

    Attributes:
        name: of the output.
        sqnr: signal-to-noise ratio in dB, ``10 log10(sum reference^2 / sum error^2)``; infinite if equal. For outputs
        that
            are not float it is None.
        cosine: cosine similarity of all values; None for outputs that are not float.
        max_error: greatest absolute difference; None for outputs that are not float.
        agreement: share of equal values, for outputs that are not float.
    """

    name: str
    sqnr: float | None
    cosine: float | None
    max_error: float | None
    agreement: float | None


def measure(reference: Any, other: Any, samples: Iterable[Mapping[str, NDArray[Any]]]) -> list[OutputError]:
    """Run two sessions on the same samples and compare what they compute, output by output in the reference's order."""
    names = [value.name for value in reference.get_outputs()]
    totals = {name: _Total() for name in names}
    for sample in samples:
        feeds = [
            {value.name: sample[value.name] for value in session.get_inputs() if value.name in sample}
            for session in (reference, other)
        ]
        expected, found = reference.run(names, feeds[0]), other.run(names, feeds[1])
        for name, a, b in zip(names, expected, found, strict=True):
            totals[name].add(a, b)
    return [total.result(name) for name, total in totals.items()]


class _Total:
    def __init__(self) -> None:
        self.signal = self.noise = self.product = self.energy = 0.0
        self.largest, self.equal, self.count, self.floating = 0.0, 0, 0, True

    def add(self, reference: Any, other: Any) -> None:
        if not isinstance(reference, np.ndarray) or reference.dtype.kind != "f":
            self.floating = False
            self.count += 1 if not isinstance(reference, np.ndarray) else reference.size
            self.equal += (
                int(np.sum(reference == other)) if isinstance(reference, np.ndarray) else int(reference == other)
            )
            return
        both = np.isfinite(reference) & np.isfinite(other)
        a, b = reference.astype(np.float64), other.astype(np.float64)
        unlike = ~both & ~((a == b) | (np.isnan(a) & np.isnan(b)))  # finite on one side alone
        a, b = np.where(both, a, 0.0), np.where(both, b, 0.0)
        self.signal += float(np.sum(a * a))
        self.energy += float(np.sum(b * b))
        self.product += float(np.sum(a * b))
        self.noise += float("inf") if unlike.any() else float(np.sum(np.square(a - b)))
        self.largest = max(self.largest, float(np.abs(a - b).max(initial=0.0)))

    def result(self, name: str) -> OutputError:
        if not self.floating:
            return OutputError(name, None, None, None, self.equal / self.count if self.count else 1.0)
        norm = np.sqrt(self.signal * self.energy)
        cosine = float(self.product / norm) if norm else float(self.signal == self.energy)
        return OutputError(name, decibels(self.signal, self.noise), cosine, self.largest, None)


def decibels(signal: float, noise: float) -> float:
    """Signal-to-noise ratio in dB.

    >>> decibels(100.0, 1.0)
    20.0
    """
    if noise == 0:
        return float("inf")
    if signal == 0 or not np.isfinite(noise):
        return float("-inf")
    return float(10 * np.log10(signal / noise))
