"""Arithmetic between tensors: Add, Sub, Mul, Div, Where."""

from __future__ import annotations

from quark_onnx.graph import Node
from quark_onnx.plan import Plan
from quark_onnx.rules.base import control, rule


@rule("Add", "Sub", "Mul", "Div")
def arithmetic(node: Node, plan: Plan) -> None:
    """Both operands and the result, unless one of them is a mask."""
    _operands(node, plan, node.inputs)


@rule("Where")
def where(node: Node, plan: Plan) -> None:
    """The two alternatives and the result, unless one of them is a mask."""
    _operands(node, plan, node.inputs[1:])


def _operands(node: Node, plan: Plan, operands: tuple[str, ...]) -> None:
    for tensor in operands:
        if plan.masks(tensor):
            plan.keep_node(node, f"{tensor!r} holds values that mean 'never'; no scale spans them and real values")
            return
        if control(plan.graph, tensor):
            plan.keep_node(node, f"{tensor!r} is computed from integers alone: a mask or a position, not a signal")
            return
    plan.activation(node, *operands)
    plan.activation(node, node.outputs[0])
