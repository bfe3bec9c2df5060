"""Weights and activations inside the bodies of If, Loop and Scan."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper
from onnx.reference import ReferenceEvaluator

from calibrators.onnx_runtime.session import open_session
from quark_onnx import QConfig, quantize
from quark_onnx.graph import Graph
from quark_onnx.measuring.calibrate import calibrate
from quark_onnx.planning.make_plan import make_plan
from quark_onnx.planning.subgraph_plans import plan_bodies
from tests.models import conv_relu, in_a_branch, samples
from tests.settings import portable

TEXT = """<ir_version: 10, opset_import: ["" : 21]>
    g (float[4, 32] x, bool c, int64 n) => (float[4, 16] y, float[4, 32] z, float[4, 32] s) {
        y = If (c) <
            then_branch = t () => (float[4, 16] a) { a = MatMul (x, w) },
            else_branch = e () => (float[4, 16] b) { h = MatMul (x, v)  b = Relu (h) }>
        one = Constant <value = bool {1}> ()
        z = Loop (n, one, x) <body = l (int64 i, bool go, float[4, 32] t) => (bool on, float[4, 32] u) {
            on = Identity (go)
            p = MatMul (t, q)
            u = Tanh (p)
        }>
        zero = MatMul (x, q)
        last, s = Scan <num_scan_inputs = 1, body = f (float[32] m, float[32] row) => (float[32] next, float[32] o) {
            d = MatMul (row, q)
            next = Add (m, d)
            o = Identity (d)
        }> (start, zero)
    }"""  # noqa: E501


def nested() -> ModelProto:
    model = onnx.parser.parse_model(TEXT)
    random = np.random.default_rng(0)
    for name, shape in {
        "w": (32, 16),
        "v": (32, 16),
        "q": (32, 32),
        "start": (32,),
    }.items():
        array = (0.2 * random.normal(size=shape)).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def feeds(condition: bool) -> dict[str, Any]:
    x = np.random.default_rng(1).normal(size=(4, 32)).astype(np.float32)
    return {"x": x, "c": np.array(condition), "n": np.array(3)}


def floats(model: ModelProto) -> int:
    """Float values that are stored anywhere in a model, scales left out."""
    tensors, todo = list(model.graph.initializer), list(model.graph.node)
    while todo:
        for attribute in todo.pop().attribute:
            tensors += attribute.g.initializer
            todo += attribute.g.node
    return sum(
        int(np.prod(t.dims))
        for t in tensors
        if t.data_type == 1 and "_scale" not in t.name
    )


@pytest.mark.parametrize("condition", [True, False])
@pytest.mark.parametrize(
    ("preset", "least"),
    [
        ("A8W8", 30),
        ("XINT8", 22),
        ("INT4", 13),
        ("DYNAMIC", 30),
        ("BF16", 40),
        ("BFP16", 28),
        ("MXFP8E4M3", 18),
    ],
)
def test_bodies_are_quantized(preset: str, least: float, condition: bool) -> None:
    model = nested()
    result = quantize(
        model,
        [feeds(condition)],
        portable(QConfig.of(preset)) if preset == "DYNAMIC" else preset,
    )
    assert result.report.worst_sqnr > least
    bodies = [note for note in result.report.notes if " inside '" in note]
    assert len(bodies) == 4, "two branches, a loop and a scan"
    for optimize in (True, False):
        found = open_session(result.model, optimize=optimize).run(
            None, feeds(condition)
        )
        assert [value.shape for value in found] == [(4, 16), (4, 32), (4, 32)]


@pytest.mark.parametrize("preset", ["A8W8", "INT4"])
def test_weights_of_the_surroundings_are_stored_as_codes_alone(preset: str) -> None:
    result = quantize(nested(), [feeds(True)], preset)
    assert floats(result.model) == 32, "the start of the scan"


def test_against_the_reference_evaluator() -> None:
    result = quantize(nested(), [feeds(True)], "A8W8")
    expected = ReferenceEvaluator(result.model).run(None, feeds(True))
    found = open_session(result.model, optimize=False).run(None, feeds(True))
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(a, b, atol=0.02)


def test_a_branch_may_return_a_constant_without_a_declared_type() -> None:
    """The Constant node, which tells onnx the type, becomes an initializer, which does not."""
    model = in_a_branch(conv_relu())
    result = quantize(model, samples(model), "A8W8")
    onnx.checker.check_model(result.model, full_check=True)
    assert any(" inside '" in note for note in result.report.notes)


def test_a_node_that_is_excluded_is_left_alone_inside() -> None:
    names = [
        node.name
        for node in Graph.of(nested()).nodes
        if node.op_type in ("If", "Loop", "Scan")
    ]
    result = quantize(nested(), [feeds(True)], QConfig(exclude=tuple(names)))
    assert not any(" inside '" in note for note in result.report.notes)
    everything = quantize(nested(), [feeds(True)], QConfig(exclude="*"))
    assert everything.report.notes == [
        "nothing was quantized: the result is the float model"
    ]
    assert everything.model.SerializeToString() == nested().SerializeToString()


def watched(
    model: ModelProto, samples: list[dict[str, Any]], **options: Any
) -> dict[str, Any]:
    """Least and greatest value of the tensors in bodies, by name."""
    graph = Graph.of(model)
    config = QConfig.of("S8S8").with_(calibrator="minmax", safe=False)
    plan, body_plans = make_plan(graph, config), plan_bodies(graph, config)
    todo = calibrate(graph, plan, samples, body_plans, **options).body_plans
    found: dict[str, Any] = {}
    while todo:
        body_plan = todo.pop()
        todo += body_plan.body_plans
        found |= {
            use.tensor: (float(s.lo.min()), float(s.hi.max()))
            for use, s in body_plan.ranges.items()
        }
    return found


def test_ranges_in_bodies_are_those_of_every_step() -> None:
    model, feed = nested(), [feeds(True), feeds(False)]
    w = {
        tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer
    }
    x, carried, ends = feed[0]["x"], [feed[0]["x"]], []
    for _ in range(3):
        ends.append(carried[-1] @ w["q"])
        carried.append(np.tanh(ends[-1]))
    rows = [(x @ w["q"])[i] for i in range(4)]
    states = [w["start"]]
    for row in rows:
        states.append(states[-1] + row @ w["q"])
    expected = {
        "x": [x],
        "t": carried[:-1],
        "b": [np.maximum(x @ w["v"], 0)],
        "row": rows,
        "m": states[:-1],
    }
    found = watched(model, feed)
    for name, values in expected.items():
        bounds = (
            min(0, min(v.min() for v in values)),
            max(0, max(v.max() for v in values)),
        )
        if name in found:
            np.testing.assert_allclose(found[name], bounds, rtol=1e-5, err_msg=name)
    assert {"x", "t", "row"} <= found.keys()


def test_ranges_in_bodies_do_not_depend_on_the_executor() -> None:
    samples = [{**feeds(index % 3 > 0), "n": np.array(index)} for index in range(9)]
    serial = watched(nested(), samples)
    with ThreadPoolExecutor(2) as pool:
        assert watched(nested(), samples, executor=pool) == serial


def test_a_branch_that_is_never_taken_keeps_its_activations_float() -> None:
    result = quantize(nested(), [feeds(True)] * 4, "S8S8")
    branches = {
        a.name: a.g
        for node in result.model.graph.node
        if node.op_type == "If"
        for a in node.attribute
    }
    taken, other = (
        [node.op_type for node in branches[name].node].count("QuantizeLinear")
        for name in ("then_branch", "else_branch")
    )
    assert (taken, other) == (1, 0)


INNER = """<ir_version: 10, opset_import: ["" : 21]>
    g (float[8, 4] x, int64 n) => (float[4] y, float[3, 8] s) {
        zero = Constant <value = float[4] {0, 0, 0, 0}> ()
        nothing = Constant <value = bool {1}> ()
        y, s = Scan <num_scan_inputs = 1, scan_input_axes = [1], scan_input_directions = [1], body =
            f (float[4] m, float[3] column) => (float[4] next, float[3] o) {
                doubled = Add (m, m)
                next = Add (doubled, bias)
                o = Loop (n, , column) <body = l (int64 i, bool go, float[3] t) => (bool on, float[3] u) {
                    on = Identity (go)
                    line = Unsqueeze (t, axes)
                    p = MatMul (line, w)
                    h = Squeeze (p, axes)
                    u = Add (h, shift)
                }>
            }> (zero, wide)
        axes = Constant <value = int64[1] {0}> ()
        wide = Slice (x, from, to, axes)
        from = Constant <value = int64[1] {0}> ()
        to = Constant <value = int64[1] {3}> ()
        shift = Mul (wide_sum, ten)
        wide_sum = ReduceSum <keepdims = 0> (x)
        ten = Constant <value = float {10}> ()
    }"""  # noqa: E501


def test_bodies_in_bodies_read_values_of_every_scope() -> None:
    model = onnx.parser.parse_model(INNER.replace("float[3, 8] s", "float[a, b] s"))
    random = np.random.default_rng(3)
    weights = {
        "w": 0.3 * random.normal(size=(8, 8)).astype("f"),
        "bias": random.normal(size=4).astype("f"),
    }
    model.graph.initializer.extend(
        numpy_helper.from_array(value, name) for name, value in weights.items()
    )
    sample = {"x": random.normal(size=(8, 4)).astype("f"), "n": np.array(2)}
    # the slice leaves three rows of four; the scan goes over its columns from the last
    shift, seen = 10 * sample["x"].sum(), []
    for column in sample["x"][:3].T[::-1]:
        t = column
        for _ in range(2):
            seen.append(t)
            t = t @ weights["w"][:3, :3] + shift
    model.graph.initializer[0].CopyFrom(
        numpy_helper.from_array(weights["w"][:3, :3].copy(), "w")
    )
    found = watched(model, [sample])
    line = next(value for name, value in found.items() if name in ("line", "t"))
    np.testing.assert_allclose(
        line, (min(v.min() for v in seen), max(v.max() for v in seen)), rtol=1e-5
    )
    result = quantize(model, [sample], "S8S8")
    assert result.report.worst_sqnr > 25


@pytest.mark.parametrize(
    ("preset", "operator"), [("INT4", "MatMulNBits"), ("DYNAMIC", "MatMulInteger")]
)
def test_operators_on_codes_take_the_place_of_pairs_in_bodies(
    preset: str, operator: str
) -> None:
    result = quantize(nested(), None, portable(QConfig.of(preset)))
    kinds = {node.name: node.op_type for node in result.model.graph.node}
    inside = [
        node.op_type
        for outer in result.model.graph.node
        for a in outer.attribute
        for node in a.g.node
        if a.HasField("g")
    ]
    assert operator in kinds.values()
    assert inside.count(operator) == 4, "two branches, a loop and a scan"
    assert "MatMul" not in inside
    assert any(
        node.op_type == "Relu"
        for outer in result.model.graph.node
        for a in outer.attribute
        for node in a.g.node
    )


def test_what_is_carried_from_step_to_step_stays_float() -> None:
    """The range differs from step to step; one scale for all steps would degrade small values."""

    def read(model: ModelProto) -> dict[str, str]:
        bodies = [
            (node.op_type, a.g)
            for node in model.graph.node
            for a in node.attribute
            if a.HasField("g")
        ]
        return {
            kind: "".join(
                n.input[0] for n in body.node if n.op_type == "QuantizeLinear"
            )
            for kind, body in bodies
        }

    safe, unsafe = (
        quantize(nested(), [feeds(True)] * 3, QConfig.of("S8S8").with_(safe=safe))
        for safe in (True, False)
    )
    assert "t" not in read(safe.model)["Loop"]
    assert "t" in read(unsafe.model)["Loop"]
    assert "row" in read(safe.model)["Scan"], "a slice is not carried"
