"""Data passed between the steps of a run: samples, the prepared graph and its plan."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from calibrators.onnx_runtime.runner import Receive
from quark_onnx.common.wording import counted
from quark_onnx.config import QConfig
from quark_onnx.graph import Graph
from quark_onnx.measuring.calibrate import HoldOut
from quark_onnx.measuring.calibration import Calibration, Keyed
from quark_onnx.optimizers import Samples
from quark_onnx.plan import Plan
from quark_onnx.planning.subgraph_plans import SubgraphPlan
from quark_onnx.running.run import Sample


@dataclass(frozen=True)
class RunData:
    """The data of a run.

    Attributes:
        sample: the first sample, or a synthetic one; None if the model runs on none.
        held: holds out the samples that the result is measured on; None without data.
        again: samples that may be read repeatedly; empty if no step needs them.
        receive: keeps outputs of the float model that later steps need, called with the position
            of a calibration sample and the outputs on it; None if none does.
        random: the samples are random numbers, without information on real data.
        input_means: channel means of the inputs of layers over the first samples, by tensor and
            whether its channels are axis 1; empty if unknown.
        calibration: earlier statistics that the run uses; None for none.
    """

    sample: Sample | None = None
    held: HoldOut | None = None
    again: Samples = ()
    random: bool = False
    receive: Receive | None = None
    input_means: dict[tuple[str, bool], NDArray[np.float64]] = field(
        default_factory=dict
    )
    calibration: Calibration | None = None

    @property
    def judges(self) -> list[Sample]:
        """Return the samples for measuring the result."""
        if self.held is not None and self.held.samples:
            return self.held_out or self.held.samples
        return [self.sample] if self.sample else []

    @property
    def held_out(self) -> list[Sample]:
        """Return the samples that no range was measured on, now or in an earlier calibration."""
        if self.held is None:
            return []
        calibration = self.calibration
        if calibration is None:
            return self.held.samples
        return [
            sample for sample in self.held.samples if not calibration.has_seen(sample)
        ]

    @property
    def notes(self) -> list[str]:
        """Return the note that earlier ranges have seen samples of this run."""
        total = len(self.held.samples) if self.held else 0
        seen = total - len(self.held_out)
        if not seen or self.calibration is None:
            return []
        source = f"the ranges {self.calibration.source}".strip()
        if seen == total:
            return [
                f"{source} were measured on all of these samples: nothing is held out,"
                " and new data may have larger errors"
            ]
        return [
            f"{source} were measured on {seen} of {counted(total, 'held-out sample')}:"
            " the errors are those of the others"
        ]

    @property
    def first(self) -> list[Sample]:
        """Return the first calibration samples; empty if no step needs them in memory."""
        return self.held.first if self.held else []

    @property
    def deciding(self) -> list[Sample]:
        """Return a few of the held-out samples, for decisions between settings."""
        return self.held.deciding if self.held else []

    @property
    def measured(self) -> list[Sample]:
        """Return the samples that both models are compared on: held-out ones if there are any."""
        if self.held is not None and not self.held.samples and self.held.calibrated:
            return self.held.calibrated
        return self.judges

    @property
    def further(self) -> list[Sample]:
        """Return calibration samples besides those that both models are compared on."""
        if self.held is None or not self.held.samples:
            return []
        return self.held.calibrated

    @property
    def count(self) -> int:
        """Return the number of calibration samples."""
        return self.held.count if self.held else 0


@dataclass(frozen=True)
class Planned:
    """The prepared graph, the plans of graph and bodies, and notes for the report.

    The configuration has an override for each node that an optimizer has raised. Notes on
    rewrites of the float graph are separate, because they do not apply if the float model is
    the result. ``keyed`` holds earlier statistics with the keys of the graph's tensors, and
    ``begun`` those of the first samples alone.
    """

    config: QConfig
    graph: Graph
    plan: Plan
    insides: list[SubgraphPlan]
    notes: list[str]
    rewrites: list[str]
    keyed: Keyed | None = None
    begun: Keyed | None = None

    def with_plans(self, plan: Plan, insides: list[SubgraphPlan]) -> Planned:
        """Return a copy with other plans."""
        return replace(self, plan=plan, insides=insides)
