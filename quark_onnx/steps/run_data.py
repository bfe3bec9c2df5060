"""The samples of a run: what it is calibrated on, and what its result is measured on."""

from __future__ import annotations

from dataclasses import dataclass

from quark_onnx.optimizers import Samples
from quark_onnx.steps.calibrate import HoldOut
from quark_onnx.steps.run import Sample


@dataclass(frozen=True)
class RunData:
    """The data of a run.

    Attributes:
        sample: the first one, or one made up; None if the model runs on none.
        held: diverts the samples that the result is measured on; None without data.
        again: the samples that may be read as often as needed; empty if nothing needs them.
    """

    sample: Sample | None = None
    held: HoldOut | None = None
    again: Samples = ()

    @property
    def judges(self) -> list[Sample]:
        """What the result is measured on."""
        return self.held_out or ([self.sample] if self.sample else [])

    @property
    def held_out(self) -> list[Sample]:
        return self.held.samples if self.held else []

    @property
    def count(self) -> int:
        """How many samples it was calibrated on."""
        return self.held.count if self.held else 0
