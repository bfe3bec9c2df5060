"""A candidate of a search."""

from __future__ import annotations

from dataclasses import dataclass

from quark_onnx.config import QConfig
from quark_onnx.study.record import Record


@dataclass(frozen=True, kw_only=True)
class Candidate(Record):
    """A tried configuration with its record.

    The score is the user's metric, or the SQNR of the worst output on held-out samples in dB. The
    runtime is None for a target, and if the float model's latency is mostly overhead.

    Attributes:
        name: the preset, and changes to the preset.
        config: the configuration.
    """

    name: str
    config: QConfig
