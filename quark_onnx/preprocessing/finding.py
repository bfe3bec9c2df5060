"""A finding: a sign of wrong preprocessing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Cause = Literal["scaling", "color", "layout", "tokens", "mask", "outputs"]


@dataclass(frozen=True)
class Finding:
    """A sign of wrong preprocessing.

    Attributes:
        cause: the likely cause: ``scaling`` (scale, mean and standard deviation), ``color``
            (RGB or BGR), ``layout`` (NCHW or NHWC), ``tokens``, ``mask``, or ``outputs`` for an
            unknown cause.
        evidence: the figures of the finding.
        advice: the proposed change, with the option of the command line.
    """

    cause: Cause
    evidence: str
    advice: str

    def __str__(self) -> str:
        return (
            f"preprocessing looks wrong ({self.cause}): {self.evidence}; {self.advice}"
        )
