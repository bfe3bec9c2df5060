"""Weights and activations inside the bodies of If, Loop and Scan."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper
from onnx.reference import ReferenceEvaluator

from calibrators.session import open_session
from quark_onnx import QConfig, quantize
from quark_onnx.graph import Graph

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
    }"""


def nested() -> ModelProto:
    model = onnx.parser.parse_model(TEXT)
    random = np.random.default_rng(0)
    for name, shape in {"w": (32, 16), "v": (32, 16), "q": (32, 32), "start": (32,)}.items():
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
    return sum(int(np.prod(t.dims)) for t in tensors if t.data_type == 1 and "_scale" not in t.name)


@pytest.mark.parametrize("condition", [True, False])
@pytest.mark.parametrize(
    ("preset", "least"),
    [("A8W8", 30), ("XINT8", 22), ("INT4", 13), ("DYNAMIC", 30), ("BF16", 40), ("BFP16", 28), ("MXFP8E4M3", 18)],
)
def test_bodies_are_quantized(preset: str, least: float, condition: bool) -> None:
    model = nested()
    result = quantize(model, [feeds(condition)], preset)
    assert result.report.worst_sqnr > least
    bodies = [note for note in result.report.notes if "tensors inside" in note]
    assert len(bodies) == 4, "two branches, a loop and a scan"
    for optimize in (True, False):
        found = open_session(result.model, optimize=optimize).run(None, feeds(condition))
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


def test_a_node_that_is_excluded_is_left_alone_inside() -> None:
    names = [node.name for node in Graph.of(nested()).nodes if node.op_type in ("If", "Loop", "Scan")]
    result = quantize(nested(), [feeds(True)], QConfig(exclude=tuple(names)))
    assert not any("tensors inside" in note for note in result.report.notes)
    everything = quantize(nested(), [feeds(True)], QConfig(exclude="*"))
    assert everything.report.notes == ["nothing was quantized: the result is the float model"] or (
        everything.model.graph.node == Graph.of(nested()).to_model().graph.node
    )
    assert everything.model.SerializeToString() == Graph.of(nested()).to_model().SerializeToString()
