"""Arithmetic between tensors: Add, Sub, Mul, Div, Where."""

from __future__ import annotations

from quark_onnx.graph import Node
from quark_onnx.plan import Plan
from quark_onnx.rules.base import NORMALIZING, RESIDUAL, control, rule


@rule("Add")
def add(node: Node, plan: Plan) -> None:
    """Like all arithmetic, but a bias is added before any rounding, and a residual stream is too wide for few bits."""
    if any(reader.kind in NORMALIZING for reader in plan.graph.followers(node)) and plan.coarse(node):
        plan.keep_node(node, RESIDUAL)
    elif not plan.rounds_results(node) and any(_is_bias(node, plan, i) for i in (0, 1)):
        plan.keep_node(node, "it adds a bias to a product that is not rounded yet")
    else:
        _operands(node, plan, node.inputs)


def _is_bias(node: Node, plan: Plan, index: int) -> bool:
    """Whether an operand is a constant vector and the other one a matrix product that nothing else reads."""
    bias, product = node.inputs[index], node.inputs[1 - index]
    layer = plan.graph.producer(product)
    vector = plan.graph.is_constant(bias) and len(plan.graph.shape(bias) or ()) <= 1
    return vector and layer is not None and layer.kind == "MatMul" and not plan.quantized(product)


@rule("Div")
def division(node: Node, plan: Plan) -> None:
    """Like all arithmetic, but a small denominator decides over everything, and is what few codes tell apart least."""
    if plan.safe and not plan.integer_only(node):
        _operands(node, plan, node.inputs, quantized=node.inputs[:1])
        if node.name not in plan.kept:
            plan.keep_for(node, node.inputs[1], "it is a denominator: the smallest ones matter most")
    else:
        _operands(node, plan, node.inputs)


@rule("Sub", "Mul")
def arithmetic(node: Node, plan: Plan) -> None:
    """Both operands and the result, unless one of them is a mask."""
    _operands(node, plan, node.inputs)


@rule("Where")
def where(node: Node, plan: Plan) -> None:
    """The two alternatives and the result, unless one of them is a mask."""
    _operands(node, plan, node.inputs[1:])


def _operands(node: Node, plan: Plan, operands: tuple[str, ...], quantized: tuple[str, ...] | None = None) -> None:
    """Quantize operands, all of them unless it is said which, and the result; nothing where a mask is among them."""
    for tensor in operands:
        if plan.masks(tensor):
            plan.keep_node(node, f"{tensor!r} holds values that mean 'never'; no scale spans them and real values")
            return
        if control(plan.graph, tensor):
            plan.keep_node(node, f"{tensor!r} is computed from integers alone: a mask or a position, not a signal")
            return
    plan.activation(node, *(operands if quantized is None else quantized))
    plan.activation(node, node.outputs[0])
