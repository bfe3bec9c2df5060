"""EncodedConstants: codes that trials share do not outlast them."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from quark_onnx import assemble, job, quantize
from quark_onnx.graph import Graph
from quark_onnx.plan import Plan
from quark_onnx.scales.compute_qparams import ResolvedPlan
from quark_onnx.writing.finish import Finished
from tests.models import conv_net, samples


@pytest.mark.parametrize("config", ["XINT8", "A8W8"])
def test_parameters_and_codes_are_freed_before_the_model_is_opened(
    config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has codes of its own, and a report and two sessions take memory next."""
    compute_qparams, finish = assemble.compute_qparams, job.finish
    references: list[weakref.ref[object]] = []
    alive: list[bool] = []

    def computed(graph: Graph, plan: Plan, ranges: object) -> ResolvedPlan:
        resolved = compute_qparams(graph, plan, ranges)
        references.append(weakref.ref(resolved.params.encoded))
        return resolved

    def finished(*arguments: Any, **keywords: Any) -> Finished:
        alive.append(references[-1]() is not None)
        return finish(*arguments, **keywords)

    monkeypatch.setattr(assemble, "compute_qparams", computed)
    monkeypatch.setattr(job, "finish", finished)
    model = conv_net()
    quantize(model, samples(model), config)
    assert alive == [False]
