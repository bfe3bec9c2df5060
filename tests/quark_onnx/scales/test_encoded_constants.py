"""EncodedConstants: codes that trials share do not outlast them."""

from __future__ import annotations

import weakref

import pytest

from quark_onnx import assemble, quantize
from quark_onnx.graph import Graph
from quark_onnx.plan import Plan
from quark_onnx.scales.compute_qparams import ResolvedPlan
from tests.models import conv_net, samples


@pytest.mark.parametrize("config", ["XINT8", "A8W8"])
def test_parameters_and_codes_are_freed_once_the_pairs_are_inserted(
    config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has codes of its own, and a report and two sessions take memory next."""
    compute_qparams, define_functions = (
        assemble.compute_qparams,
        assemble.define_functions,
    )
    references: list[weakref.ref[object]] = []
    alive: list[bool] = []

    def computed(graph: Graph, plan: Plan, ranges: object) -> ResolvedPlan:
        resolved = compute_qparams(graph, plan, ranges)
        references.append(weakref.ref(resolved.params.encoded))
        return resolved

    def defined(graph: Graph) -> None:
        alive.append(references[-1]() is not None)
        define_functions(graph)

    monkeypatch.setattr(assemble, "compute_qparams", computed)
    monkeypatch.setattr(assemble, "define_functions", defined)
    model = conv_net()
    quantize(model, samples(model), config)
    assert alive[-1] is False
