"""The steps of quantize_static with their values in between, for tests that look at one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnx import ModelProto

from quark_onnx import QConfig
from quark_onnx.graph import Graph
from quark_onnx.plan import Plan
from quark_onnx.steps import (
    Limits,
    Params,
    Ranges,
    calibrate,
    compute_bias_qparams,
    compute_qparams,
    insert,
    make_plan,
)
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
