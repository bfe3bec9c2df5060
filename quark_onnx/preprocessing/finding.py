"""A finding: a sign of wrong preprocessing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quark_onnx.report.verdict import NextStep

Cause = Literal[
    "scaling",
    "color",
    "scaling and color",
    "layout",
    "tokens",
    "mask",
    "labels",
    "outputs",
]


@dataclass(frozen=True)
class Finding:
    """A sign of wrong preprocessing.

    Attributes:
        cause: the likely cause: ``scaling`` (scale, mean and standard deviation), ``color``
            (RGB or BGR), ``scaling and color``, ``layout`` (NCHW or NHWC), ``tokens``,
            ``mask``, ``labels`` (or any of the others), or ``outputs`` for an unknown cause.
        evidence: the figures of the finding.
        advice: the proposed change, with the option of the command line.
        options: options of the command line that make the change for image files, as in
            ``NextStep``; empty if options cannot make it.
    """

    cause: Cause
    evidence: str
    advice: str
    options: str = ""

    @property
    def next_step(self) -> NextStep:
        """Return the change as the next step of a verdict."""
        effect = (
            f"corrects the inputs ({self.cause}); the figures hold for inputs like these"
            " only"
        )
        return NextStep(self.options, effect, self.advice.removeprefix("use "))

    @property
    def doubt(self) -> str:
        """Return what the finding casts doubt on, as a sentence."""
        if self.cause == "labels":
            return "the labels or the preprocessing of the data look wrong"
        return "the preprocessing of the data looks wrong"

    @property
    def cause_and_evidence(self) -> str:
        """Return the finding in words, without the advice."""
        if self.cause == "labels":
            return f"labels or preprocessing look wrong: {self.evidence}"
        return f"preprocessing looks wrong ({self.cause}): {self.evidence}"

    def __str__(self) -> str:
        return f"{self.cause_and_evidence}; {self.advice}"
