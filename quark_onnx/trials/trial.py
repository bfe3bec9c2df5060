"""Trial: a quantized model before it is written, and its errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from onnx import ModelProto

from quark_onnx.config import QConfig
from quark_onnx.graph import Graph
from quark_onnx.measuring.calibrate import Ranges
from quark_onnx.measuring.run_data import Planned
from quark_onnx.report.measure import least_sqnr, measure
from quark_onnx.running.run import Reference, Sample
from quark_onnx.trials.quantized_session import open_equivalent


@dataclass(frozen=True)
class Trial:
    """The model that a configuration gives, as the run would write it.

    Attributes:
        planned: the float graph and the plan that the model was made of.
        ranges: the ranges of the plan.
        graph: the quantized graph.
        reference: the float model, whose outputs are computed once a sample.
    """

    planned: Planned
    ranges: Ranges
    graph: Graph
    reference: Reference

    @property
    def config(self) -> QConfig:
        """Return the configuration of the model."""
        return self.planned.config

    @cached_property
    def model(self) -> ModelProto:
        """The quantized model."""
        return self.graph.to_model()

    @cached_property
    def session(self) -> Any:
        """A session with the results of the model, on the kernels that are fastest."""
        return open_equivalent(self.model)

    def sqnr(self, samples: Sequence[Sample]) -> float:
        """Return the least SQNR over the outputs in dB; infinity without a measurable error."""
        errors = measure(self.reference.remembering, self.session, samples)
        return least_sqnr(errors, np.inf)
