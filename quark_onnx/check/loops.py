"""Refuse loops that never end: every run of such a model would take forever."""

from __future__ import annotations

from collections.abc import Mapping

from onnx import ModelProto, NodeProto, TensorProto
from onnx.numpy_helper import to_array

from quark_onnx.common.errors import ModelError
from quark_onnx.graph.constants import scopes_of
from quark_onnx.graph.node import bodies_of, makers_of


def check_loops(model: ModelProto) -> None:
    """Check that every Loop can end: by its number of iterations, or by its condition.

    Raises:
        ModelError: a Loop never ends (ONNX specification of Loop); the message names it.
    """
    for graph, constants in scopes_of(model):
        for node in graph.node:
            if node.op_type == "Loop" and _is_endless(node, constants):
                raise ModelError(
                    f"node {node.name or node.output[0]!r} (Loop) never ends: it has no"
                    " number of iterations, and its condition is always true",
                )


def _is_endless(node: NodeProto, constants: Mapping[str, TensorProto]) -> bool:
    """Return whether a Loop is known to never end.

    Args:
        constants: constants that the Loop can read, by name.
    """
    inputs = [*node.input, "", ""]
    if inputs[0]:
        return False
    for body in bodies_of([node]):
        # onnxruntime refuses a body without a condition.
        if not body.output or len(body.input) < 2:
            return False
        name = body.output[0].name
        makers = makers_of(body.node)
        passed = set[str]()  # a damaged body may have a cycle
        while name in makers and _is_identity(makers[name]) and name not in passed:
            passed.add(name)
            name = makers[name].input[0]
        tensors = {tensor.name: tensor for tensor in body.initializer}
        for inner in body.node:
            values = [entry.t for entry in inner.attribute if entry.name == "value"]
            if inner.op_type == "Constant" and name in inner.output and values:
                tensors[name] = values[0]
        if name == body.input[1].name:
            # Without a condition the first iteration runs, and onnxruntime reads the body's.
            return not inputs[1] or _is_true(constants.get(inputs[1]))
        computed = name in makers and name not in tensors
        return not computed and _is_true(tensors.get(name, constants.get(name)))
    return False


def _is_identity(node: NodeProto) -> bool:
    return node.op_type == "Identity" and bool(node.input)


def _is_true(value: TensorProto | None) -> bool:
    if value is None or value.data_type != TensorProto.BOOL:
        return False
    return bool(to_array(value).all())
