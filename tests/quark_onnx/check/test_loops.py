"""Loops that never end are refused before anything runs."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import ModelProto
from onnx.numpy_helper import from_array

from quark_onnx import quantize
from quark_onnx.check.loops import check_loops
from quark_onnx.common.errors import ModelError
from quark_onnx.files.io import load

BODY = """body = b (int64 i, bool before, float[2] v) => (bool after, float[2] w) {{
    w = Add (v, v)
    {after}
}}"""
KEPT = "after = Identity (before)"
TRUE = "after = Constant <value = bool {1}> ()"
FALSE = "after = Constant <value = bool {0}> ()"
COMPUTED = "after = Equal (i, i)"


def loop(inputs: str, after: str, *, always: bool = True) -> ModelProto:
    text = (
        '<ir_version: 8, opset_import: ["" : 17]> g (float[2] x) => (float[2] y) {'
        f" y = Loop <{BODY.format(after=after)}> ({inputs}) }}"
    )
    model = onnx.parser.parse_model(text)
    model.graph.node[0].name = "turns"
    model.graph.initializer.append(from_array(np.array(always), "always"))
    model.graph.initializer.append(from_array(np.array(3, np.int64), "times"))
    return model


@pytest.mark.parametrize(
    ("inputs", "after"),
    [
        (", , x", KEPT),
        (", , x", TRUE),
        (", always, x", KEPT),
        (", always, x", TRUE),
        (", always, x", "k = Identity (before) after = Identity (k)"),
    ],
)
def test_an_endless_loop_is_refused(inputs: str, after: str) -> None:
    with pytest.raises(ModelError, match="node 'turns' \\(Loop\\) never ends"):
        load(loop(inputs, after))


@pytest.mark.parametrize(
    ("inputs", "after", "always"),
    [
        ("times, , x", KEPT, True),
        ("times, always, x", TRUE, True),
        (", always, x", FALSE, True),
        (", , x", FALSE, True),  # onnxruntime ends it after the first iteration
        (", always, x", KEPT, False),
        (", always, x", COMPUTED, True),  # it may end: only a run tells
    ],
)
def test_a_loop_that_may_end_is_none_of_them(
    inputs: str, after: str, always: bool
) -> None:
    check_loops(loop(inputs, after, always=always))


def test_a_loop_in_a_branch_is_found() -> None:
    inner = loop(", always, x", KEPT)
    outer = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[2] x, bool c) => (float[2] z) {'
        " z = If <then_branch = t () => (float[2] p) { p = Neg (x) },"
        " else_branch = e () => (float[2] q) { q = Neg (x) }> (c) }"
    )
    branch = outer.graph.node[0].attribute[0].g
    del branch.node[:]
    branch.node.extend(inner.graph.node)
    branch.output[0].name = "y"
    outer.graph.initializer.extend(inner.graph.initializer)
    with pytest.raises(ModelError, match="never ends"):
        quantize(outer, None, "W8")


def test_a_cycle_of_copies_is_left_to_the_runtime() -> None:
    """No order of the nodes is a valid one: nothing is followed twice."""
    model = loop(", always, x", "k = Identity (before) after = Identity (k)")
    body = model.graph.node[0].attribute[0].g
    for node in body.node:
        if node.output[0] == "k":
            node.input[0] = "after"
    check_loops(model)


@pytest.mark.parametrize("missing", ["output", "input"])
def test_a_damaged_body_is_left_to_the_runtime(missing: str) -> None:
    model = loop(", always, x", KEPT)
    del getattr(model.graph.node[0].attribute[0].g, missing)[:]
    check_loops(model)
