"""The steps of quantize_static with their values in between, for tests that look at one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnx import ModelProto

from quark_onnx import QConfig
from quark_onnx.graph import Graph
from quark_onnx.measuring.calibrate import Ranges, calibrate
from quark_onnx.plan import Plan
from quark_onnx.planning.make_plan import make_plan
from quark_onnx.scales.apply_target_constraints import Limits
from quark_onnx.scales.compute_qparams import (
    Params,
    compute_bias_qparams,
    compute_qparams,
)
from quark_onnx.writing.insert import insert
from tests.models import Feeds, samples
from tests.settings import TENSOR


@dataclass
class Stages:
    """What each step made of a model that was neither prepared nor guarded."""

    graph: Graph
    plan: Plan
    ranges: Ranges
    params: Params
    limits: Limits
    form: str = "qdq"

    @classmethod
    def of(
        cls, model: ModelProto, config: QConfig = TENSOR, data: Sequence[Feeds] = ()
    ) -> Stages:
        graph = Graph.of(model)
        plan = make_plan(graph, config)
        plan, ranges, _ = calibrate(graph, plan, data or samples(model))
        plan, params = compute_qparams(graph, plan, ranges)
        plan = compute_bias_qparams(graph, plan, params)
        return cls(
            graph,
            plan,
            ranges,
            params,
            Limits(graph, plan, params, config),
            config.form,
        )

    @property
    def model(self) -> ModelProto:
        """The result, before operators that compute on codes are written."""
        return insert(
            self.graph, self.plan, self.params, lower=self.form != "operators"
        ).to_model()
