"""What the steps of a run hand on: its calibration data, and the prepared graph with its plan."""

from __future__ import annotations

from dataclasses import dataclass

from quark_onnx.config import QConfig
from quark_onnx.graph import Graph
from quark_onnx.optimizers import Samples
from quark_onnx.plan import Plan
from quark_onnx.steps.calibrate import HoldOut
from quark_onnx.steps.calibration import Keyed
from quark_onnx.steps.run import Sample
from quark_onnx.steps.subgraph_plans import SubgraphPlan


@dataclass(frozen=True)
class RunData:
    """The data of a run.

    Attributes:
        sample: the first one, or one made up; None if the model runs on none.
        held: diverts the samples that the result is measured on; None without data.
        again: the samples that may be read as often as needed; empty if nothing needs them.
        random: the samples are random numbers, from which nothing can be learned of real data.
    """

    sample: Sample | None = None
    held: HoldOut | None = None
    again: Samples = ()
    random: bool = False

    @property
    def judges(self) -> list[Sample]:
        """What the result is measured on."""
        return self.held_out or ([self.sample] if self.sample else [])

    @property
    def held_out(self) -> list[Sample]:
        return self.held.samples if self.held else []

    def verdict_samples(self, most: int) -> tuple[list[Sample], int]:
        """Samples for the verdict beyond those that the result is measured on.

        Args:
            most: how many at most.

        Returns:
            The samples, held-out ones first, and how many of them were held out.
        """
        if self.held is None or most <= 0:
            return [], 0
        late = self.held.late[:most]
        known = self.judges
        rest = [
            sample
            for sample in self.held.calibrated
            if not any(sample is each for each in known)
        ]
        rest = rest[: most - len(late)]
        return [*late, *rest], len(late)

    @property
    def count(self) -> int:
        """How many samples it was calibrated on."""
        return self.held.count if self.held else 0


@dataclass(frozen=True)
class Planned:
    """The prepared graph, what becomes of its tensors and of those in bodies, and notes for the
    report.

    The configuration has an override for each node that an optimizer has raised. The notes on
    rewrites of the float graph stand by themselves: they do not hold where the float model is the
    result. ``keyed`` is what was measured before, with the keys of the graph's tensors.
    """

    config: QConfig
    graph: Graph
    plan: Plan
    insides: list[SubgraphPlan]
    notes: list[str]
    rewrites: list[str]
    keyed: Keyed | None = None
