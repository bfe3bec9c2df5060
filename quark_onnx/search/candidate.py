"""A candidate of a search."""

from __future__ import annotations

from dataclasses import dataclass

from quark_onnx.config import QConfig


@dataclass(frozen=True)
class Candidate:
    """A tried configuration with its result.

    Attributes:
        name: the preset, and changes to the preset.
        config: the configuration.
        score: the user's metric, or the SQNR of the worst output on held-out samples in dB; None if
            the candidate failed.
        seconds: runtime of quantization and evaluation.
        bytes: size of the quantized model; None if the candidate failed.
        error: reason of the failure; empty without a failure.
        judged: number of samples in the evaluation; 0 with a metric of the user's.
        pruned: True if the evaluation ended early because the score was below the median.
        runtime: latency relative to the float model on this machine; None if not measured, as for a
            target, or if the float model's latency is mostly overhead.
    """

    name: str
    config: QConfig
    score: float | None
    seconds: float
    bytes: int | None
    error: str = ""
    judged: int = 0
    pruned: bool = False
    runtime: float | None = None
