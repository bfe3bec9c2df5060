"""Every variadic input and output of a model has a name, or reading the model is an error.

ONNX lets an empty name stand for an omitted optional input or output only. onnxruntime 1.32 does
not check the variadic ones and crashes on some, so no model with an empty one may reach a session,
whatever reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper
from onnx.defs import OpSchema

from quark_onnx import analyze, compare, convert, npu, quantize
from quark_onnx.api import plan_for
from quark_onnx.check.variadic import check_variadic
from quark_onnx.common.errors import ModelError
from quark_onnx.files.io import load
from tests.models import normal, parse, run

VARIADIC = OpSchema.FormalParameterOption.Variadic
SCHEMAS = [
    (schema, what)
    for schema in onnx.defs.get_all_schemas_with_history()
    for what, formal in (("input", schema.inputs), ("output", schema.outputs))
    if formal and formal[-1].option == VARIADIC
]


def model_of(*nodes: NodeProto, opsets: dict[str, int]) -> ModelProto:
    """A model of some nodes that need not be valid otherwise."""
    graph = helper.make_graph(nodes, "g", [], [])
    imports = [
        helper.make_opsetid(domain, version) for domain, version in opsets.items()
    ]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def saved(model: ModelProto, folder: Path) -> Path:
    path = folder / "m.onnx"
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize(
    ("schema", "what"),
    SCHEMAS,
    ids=[f"{schema.name}-{schema.since_version}-{what}" for schema, what in SCHEMAS],
)
def test_an_empty_variadic_name_is_an_error(
    schema: OpSchema, what: str, tmp_path: Path
) -> None:
    """For each operator of each version, first, in between and last."""
    formal = schema.inputs if what == "input" else schema.outputs
    first = len(formal) - 1
    for position in range(first, first + 3):
        names = [f"t{place}" for place in range(first + 3)]
        names[position] = ""
        node = helper.make_node(schema.name, [], [], "broken", domain=schema.domain)
        getattr(node, what).extend(names)
        path = saved(
            model_of(node, opsets={schema.domain: schema.since_version}), tmp_path
        )
        message = (
            rf"m\.onnx is not valid: node 'broken' \({schema.name}\): the name of"
            rf" {what} {position} is empty"
        )
        with pytest.raises(ModelError, match=message):
            load(path)


def max_of(*inputs: str) -> NodeProto:
    return helper.make_node("Max", inputs, ["m"], "broken")


def in_a_body() -> ModelProto:
    value = helper.make_tensor_value_info("m", TensorProto.FLOAT, None)
    branch = helper.make_graph([max_of("x", "")], "t", [], [value])
    outer = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    nested = helper.make_graph(
        [outer], "t", [], [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    )
    return model_of(
        helper.make_node("If", ["c"], ["z"], then_branch=nested, else_branch=nested),
        opsets={"": 17},
    )


def in_a_function() -> ModelProto:
    model = model_of(
        helper.make_node("F", ["x"], ["y"], domain="own"), opsets={"": 17, "own": 1}
    )
    imports = [helper.make_opsetid("", 17)]
    model.functions.append(
        helper.make_function("own", "F", ["x"], ["m"], [max_of("x", "")], imports)
    )
    return model


@pytest.mark.parametrize(
    ("model", "operator"),
    [
        (model_of(max_of("x", ""), opsets={"ai.onnx": 17}), "Max"),
        (model_of(max_of("x", ""), opsets={"": 1000}), "Max"),
        (model_of(max_of("", ""), opsets={"": 2**40}), "Max"),
        (model_of(max_of("x", "", "y"), opsets={"other": 1}), "Max"),
        (in_a_body(), "Max"),
        (in_a_function(), "Max"),
        (
            model_of(
                helper.make_node(
                    "QLinearConcat",
                    ["s", "z", "a", "s", ""],
                    ["y"],
                    "broken",
                    domain="com.microsoft",
                ),
                opsets={"com.microsoft": 1},
            ),
            "QLinearConcat",
        ),
    ],
    ids=["ai.onnx", "new", "newest", "no opset", "body", "function", "contributed"],
)
def test_wherever_the_node_is(model: ModelProto, operator: str) -> None:
    with pytest.raises(
        ModelError,
        match=rf"node 'broken' \({operator}\): the name of input \d is empty",
    ):
        check_variadic(model)


def test_a_node_without_a_name_is_known_by_its_output() -> None:
    with pytest.raises(
        ModelError, match=r"node 'y' \(Split\): the name of output 0 is empty"
    ):
        check_variadic(
            model_of(helper.make_node("Split", ["x"], ["", "y"]), opsets={"": 13})
        )


@pytest.mark.parametrize(
    "line",
    [
        "y = Clip (x, none, high)",
        "y = Clip (x, none, none)",
        "y, none = Dropout (x)",
        "y = Resize (x, none, scales)",
        """y = Loop (count, none, x) <body = b (int64 i, bool go, float[2,3] s) => (bool on, float[2,3] u)
            { on = Identity (go) u = Sin (s) }>""",  # noqa: E501
    ],
)
def test_what_is_optional_may_be_omitted(line: str) -> None:
    """A model with an omitted optional input or output is read, and runs."""
    text = "g (float[2,3] x) => (float[2,3] y) {" + line + "}"
    model = parse(
        text, high=np.float32(1), scales=np.float32([1, 1]), count=np.int64(2)
    )
    for node in model.graph.node:
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                names[place] = "" if name == "none" else name
    check_variadic(model)
    assert run(model, {"x": normal(2, 3)})[0].shape == (2, 3)


def test_a_function_of_the_model_may_omit_inputs() -> None:
    """A function takes the place of a standard operator of its name, and all of its inputs are
    optional.
    """
    model = model_of(
        helper.make_node("Max", ["x", ""], ["y"], domain="own"),
        opsets={"": 17, "own": 1},
    )
    imports = [helper.make_opsetid("", 17)]
    relu = helper.make_node("Relu", ["a"], ["m"])
    model.functions.append(
        helper.make_function("own", "Max", ["a", "b"], ["m"], [relu], imports)
    )
    check_variadic(model)


def valid(*inputs: str) -> ModelProto:
    model = parse(
        "g (float[2,3] x, float[2,3] z) => (float[2,3] y) { [top] y = Max (x, z) }"
    )
    model.graph.node[0].input[:] = inputs
    return model


DATA = [{"x": normal(2, 3), "z": normal(2, 3, seed=1)}]
GOOD = valid("x", "z")
ENTRIES: dict[str, Callable[[Any], Any]] = {
    "quantize": lambda model: quantize(model, DATA, "A8W8"),
    "quantize weights": lambda model: quantize(model, None, "W8"),
    "plan": plan_for,
    "compare": lambda model: compare(model, GOOD, DATA),
    "compare, second": lambda model: compare(GOOD, model, DATA),
    "analyze": lambda model: analyze(model, GOOD, DATA),
    "analyze, second": lambda model: analyze(GOOD, model, DATA),
    "convert": lambda model: convert(model, "float16"),
    "check": lambda model: npu.check(model, "stx"),
    "cut": lambda model: npu.cut(model, ["y"]),
    "preflight": lambda model: npu.preflight(model, "stx"),
    "legalize": npu.legalize,
    "choose": npu.choose,
    "simulate": lambda model: npu.simulate(model, DATA[0]),
}


@pytest.mark.parametrize("kind", ["path", "model"])
@pytest.mark.parametrize("name", ENTRIES)
def test_every_entry_point_checks(name: str, kind: str, tmp_path: Path) -> None:
    model = valid("x", "", "z")
    with pytest.raises(
        ModelError, match=r"node 'top' \(Max\): the name of input 1 is empty"
    ):
        ENTRIES[name](model if kind == "model" else saved(model, tmp_path))


@pytest.mark.parametrize("version", [-(2**63), -(2**31) - 1, -1, 2**31, 2**63 - 1])
def test_an_impossible_version_is_named(version: int, tmp_path: Path) -> None:
    """Names are looked up in a version before versions are checked; both have int64 in the file."""
    clip = helper.make_node("Clip", ["x", "", "high"], ["y"])
    model = model_of(clip, opsets={"": 17})
    model.opset_import[0].version = version
    for call in (lambda: load(saved(model, tmp_path)), lambda: plan_for(model)):
        with pytest.raises(ModelError, match=f"the impossible version {version}"):
            call()
