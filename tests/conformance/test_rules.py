"""What every rule must stand: minimal instances of its operator, with and without optional inputs
and known shapes.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.defs import OpSchema
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

import quark_onnx.rules  # noqa: F401  (importing registers the rules)
from quark_onnx import QConfig
from quark_onnx.common.registry import RULES
from quark_onnx.graph import Graph
from quark_onnx.plan import Quantize, explain
from quark_onnx.planning.make_plan import make_plan
from tests.cases import loop_over
from tests.settings import ALL, CHANNEL

OPSET = 21
KNOWN = [name for name in RULES if onnx.defs.has(name)]
CONTRIBUTED = [name for name in RULES if not onnx.defs.has(name)]
#: Inputs, at least and at most, and results of operators that onnxruntime adds, by its own schemas.
_ARITY = {
    f"{schema.domain}::{schema.name}" if schema.domain else schema.name: (
        schema.min_input,
        schema.max_input,
        schema.min_output,
    )
    for schema in get_all_operator_schema()
}
_VALUES = {
    OpSchema.AttrType.INT: 1,
    OpSchema.AttrType.INTS: [1, 1],
    OpSchema.AttrType.FLOAT: 1.0,
    OpSchema.AttrType.STRING: "constant",
}


def instance(
    name: str, *, optional: bool, shape: list[int] | None, constant: bool
) -> Graph:
    """A graph of one node, its inputs after the first constants if asked for."""
    domain, _, op_type = name.rpartition("::")
    opset = (
        max(OPSET, onnx.defs.get_schema(name).since_version) if name in KNOWN else OPSET
    )
    schema = onnx.defs.get_schema(name, opset) if name in KNOWN else None
    least, most, results = (
        (schema.min_input, schema.max_input, schema.min_output)
        if schema
        else _ARITY[name]
    )
    most = max(least, min(most, 9))
    attributes = (
        {k: _VALUES[a.type] for k, a in schema.attributes.items() if a.required}
        if schema
        else {}
    )
    inputs = [f"i{place}" for place in range(most if optional else least)]
    outputs = [f"o{place}" for place in range(results)]
    node = helper.make_node(
        op_type, inputs, outputs, name="node", domain=domain, **attributes
    )
    fixed = inputs[1:] if constant else []
    graph = helper.make_graph(
        [node],
        "g",
        [
            helper.make_tensor_value_info(i, TensorProto.FLOAT, shape)
            for i in inputs
            if i not in fixed
        ],
        [helper.make_tensor_value_info(o, TensorProto.FLOAT, None) for o in outputs],
        [
            numpy_helper.from_array(np.ones([2] * len(shape or ()), np.float32), i)
            for i in fixed
        ],
    )
    imports = [helper.make_opsetid("", opset)] + (
        [helper.make_opsetid(domain, 1)] if domain else []
    )
    return Graph.of(helper.make_model(graph, opset_imports=imports, ir_version=10))


@loop_over("constant", {"computed": False, "constant": True})
@loop_over(
    "shape",
    {"unknown": None, "scalar": [], "1": [2], "2": [2, 2], "4": [2, 2, 2, 2]},
)
@loop_over("optional", {"least": False, "most": True})
@pytest.mark.parametrize("name", [*KNOWN, *CONTRIBUTED])
def test_a_rule_plans_any_instance(
    name: str, optional: bool, shape: list[int] | None, constant: bool
) -> None:
    graph = instance(name, optional=optional, shape=shape, constant=constant)
    before = graph.to_model()
    plan = make_plan(graph, CHANNEL)
    assert graph.to_model() == before, "a rule reads the graph and writes to the plan"
    for use in plan.entries:
        assert use.tensor in graph.names and use.node in (None, "node")
        entry = plan.entry(use)
        rank = len(graph.shape(plan.root(use).tensor) or ())
        assert (
            not isinstance(entry, Quantize)
            or entry.axis is None
            or rank < 3
            or entry.axis < rank
        )
    assert explain(plan) == explain(make_plan(graph.copy(), CHANNEL))


@loop_over("config", ALL)
@pytest.mark.parametrize("name", RULES)
def test_every_configuration_plans_it(name: str, config: QConfig) -> None:
    graph = instance(name, optional=True, shape=[2, 2, 2, 2], constant=True)
    make_plan(graph, config.with_(safe=False))
    plan = make_plan(graph, config.with_(activation=None, weight=None))
    assert not any(plan.quantized(tensor) for tensor in graph.names), (
        "nothing was asked for"
    )


def test_the_operators_that_onnx_does_not_know_are_few() -> None:
    odd = {name for name in CONTRIBUTED if "::" not in name}
    assert odd <= {"Upsample", "SimplifiedLayerNormalization"}, odd
    assert _ARITY.keys() >= set(CONTRIBUTED), (
        "every other one is an operator of onnxruntime"
    )
