"""Precedence of overrides is by rule, not by field: the last one that matches decides keep or
quantize, for all of a node or tensor. The report counts the nodes of the written file.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import pytest
from onnx import ModelProto

from quark_onnx import Override, QConfig, QuantizationSpec, TensorOverride, quantize
from quark_onnx.graph import Graph
from quark_onnx.graph.node import DEQUANTIZE, QUANTIZE
from quark_onnx.plan import select
from quark_onnx.planning.make_plan import make_plan
from quark_onnx.report import summarize
from tests.models import normal, parse, samples, weight
from tests.settings import TENSOR

WIDE = QuantizationSpec("uint16", symmetric=False)
NARROW = QuantizationSpec("uint8", symmetric=False)


def network() -> ModelProto:
    return parse(
        """g (float[1,3,8,8] x) => (float[1,4,8,8] y) {
            [dw] a = Conv <group = 3, pads = [1, 1, 1, 1]> (x, w1, b1)
            [mid] b = Sigmoid (a)
            [pw] c = Conv (b, w2, b2)
            [end] y = Sigmoid (c)
        }""",
        w1=weight(3, 1, 3, 3),
        b1=normal(3),
        w2=weight(4, 3, 1, 1),
        b2=normal(4),
    )


#: Overrides that match the node "pw", by how they name it and what they decide.
OVERRIDES = {
    "keep by name": {"nodes": "pw", "keep": True},
    "keep by type": {"op_types": "Conv", "keep": True},
    "keep between": {"between": ("b", "c"), "keep": True},
    "activation by name": {"nodes": "pw", "activation": WIDE},
    "activation by type": {"op_types": "Conv", "activation": WIDE},
    "weight by glob": {"nodes": "p*", "weight": NARROW},
    "both between": {"between": ("b", "c"), "activation": WIDE, "weight": NARROW},
}
ORDERS = [*permutations(OVERRIDES, 2), *permutations(OVERRIDES, 3)]


def configured(names: Sequence[str], base: QConfig = TENSOR) -> QConfig:
    return base.with_(overrides=tuple(Override(**OVERRIDES[name]) for name in names))


def last(names: Sequence[str], field: str) -> Any:
    """The format of the last override that gives one; None without one."""
    return next(
        (
            OVERRIDES[name][field]
            for name in reversed(names)
            if field in OVERRIDES[name]
        ),
        None,
    )


@pytest.mark.parametrize("base", ["A8W8", "W8", "DYNAMIC", "BFP16"])
def test_the_last_override_decides_in_every_order(base: str) -> None:
    graph = Graph.of(network())
    config = QConfig.of(base)
    plain = {node.name: spec for node, spec in select(graph, config).items()}["pw"]
    for names in ORDERS:
        chosen = select(graph, configured(names, config))
        spec = {node.name: spec for node, spec in chosen.items()}["pw"]
        if names[-1].startswith("keep"):
            assert (spec.keep, spec.activation, spec.weight) == ("excluded", None, None)
        else:
            assert not spec.keep, names
            assert spec.activation == (last(names, "activation") or plain.activation)
            assert spec.weight == (last(names, "weight") or plain.weight), names


def test_no_order_quantizes_half_of_a_node() -> None:
    graph = Graph.of(network())
    for names in ORDERS:
        plan = make_plan(graph, configured(names))
        (node,) = (node for node in graph.nodes if node.name == "pw")
        is_kept = names[-1].startswith("keep")
        assert plan.quantized("w2", node) is not is_kept, names
        assert plan.computes_on_codes(node) is not is_kept, names


@pytest.mark.parametrize("names", [(), *permutations(OVERRIDES, 1)])
def test_exclude_is_the_last_rule(names: Sequence[str]) -> None:
    graph = Graph.of(network())
    chosen = select(graph, configured(names).with_(exclude="pw"))
    assert {node.name: spec.keep for node, spec in chosen.items()}["pw"] == "excluded"


# Tensors


TENSORS = {
    "keep": {"keep": True},
    "format": {"dtype": "int16"},
    "range": {"low": -1.0, "high": 1.0},
    "scale": {"scale": 0.01, "zero_point": 0},
    "axis": {"axis": 0},
}


@pytest.mark.parametrize("names", list(permutations(TENSORS, 2)))
def test_the_last_override_of_a_tensor_decides(names: Sequence[str]) -> None:
    overrides = tuple(TensorOverride("w2", **TENSORS[name]) for name in names)
    plan = make_plan(Graph.of(network()), TENSOR.with_(tensors=overrides))
    assert plan.quantized("w2") is (names[-1] != "keep")


@pytest.mark.parametrize("switch", ["dedicated", "snapped"])
def test_a_switch_decides_nothing(switch: str) -> None:
    overrides = (
        TensorOverride("b", keep=True),
        TensorOverride("*", **{switch: True}),
    )
    assert not make_plan(
        Graph.of(network()), TENSOR.with_(tensors=overrides)
    ).quantized("b")


# Counts


def counted(model: ModelProto) -> int:
    """The nodes of a file with Q/DQ pairs; a Conv needs codes for its weight, too."""
    producers = {name: node for node in model.graph.node for name in node.output}
    readers = {name: node for node in model.graph.node for name in node.input}
    count = 0
    for node in model.graph.node:
        if node.op_type in QUANTIZE | DEQUANTIZE:
            continue
        reads = [
            name in producers and producers[name].op_type in DEQUANTIZE
            for name in node.input
        ]
        writes = node.output[0] in readers and (
            readers[node.output[0]].op_type in QUANTIZE
        )
        count += reads[1] if node.op_type == "Conv" else any(reads) or writes
    return count


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"overrides": ("keep by name", "activation by type")},
        {"overrides": ("activation by type", "keep by name")},
        {"overrides": ("weight by glob", "keep by type")},
        {"tensors": ({"tensors": "w2", "keep": True},)},
        {"tensors": ({"tensors": ("w1", "w2"), "keep": True},)},
        {"tensors": ({"tensors": ("b", "c"), "keep": True},)},
        {"exclude": "*"},
    ],
    ids=str,
)
def test_the_report_counts_what_is_in_the_file(settings: dict[str, Any]) -> None:
    model = network()
    config = TENSOR.with_(
        overrides=tuple(
            Override(**OVERRIDES[name]) for name in settings.get("overrides", ())
        ),
        tensors=tuple(TensorOverride(**each) for each in settings.get("tensors", ())),
        exclude=settings.get("exclude", ()),
    )
    result = quantize(model, samples(model), config)
    count = counted(result.model)
    assert result.report.quantized == count
    assert f"quantized {count} of 4 nodes" in str(result.report)


def test_activations_alone_count_where_no_weights_are_asked_for() -> None:
    plan = make_plan(Graph.of(network()), TENSOR.with_(weight=None))
    assert summarize(plan)[0]["Conv"] == (2, 2)


# Bodies that are not run


def test_a_body_without_measured_activations_obeys_the_same_rule() -> None:
    """Its activations stay float, and the last override decides on its weight."""
    graph = Graph.of(network())
    for names in ORDERS:
        chosen = select(graph, configured(names), measured=False)
        spec = {node.name: spec for node, spec in chosen.items()}["pw"]
        is_kept = names[-1].startswith("keep")
        assert spec.activation is None
        assert spec.weight == (
            None if is_kept else last(names, "weight") or TENSOR.weight
        )
