"""Arithmetic between tensors."""

from __future__ import annotations

from quark_onnx.graph import Node
from quark_onnx.plan import Plan
from quark_onnx.rules.base import (
    DECIDING,
    NORMALIZING,
    RESIDUAL,
    feeds_root_or_division,
    is_control_tensor,
    kept_float,
    rule,
)

#: Matrix products, which are rounded after a bias was added to them.
_PRODUCTS = frozenset({"MatMul", "Einsum", "com.microsoft::FusedMatMul"})


@rule("Add")
def add(node: Node, plan: Plan) -> None:
    """Both operands and the result.

    Float where it adds a bias to a product or, in 8 bits, to a residual stream.
    """
    if any(
        reader.kind in NORMALIZING for reader in plan.graph.followers(node)
    ) and plan.is_low_bit(node):
        plan.keep_node(node, RESIDUAL)
    elif not plan.rounds_results(node) and any(_is_bias(node, plan, i) for i in (0, 1)):
        plan.keep_node(node, "it adds a bias to a product that is not rounded yet")
    else:
        _operands(node, plan, node.inputs)


def _is_bias(node: Node, plan: Plan, index: int) -> bool:
    """Whether an operand is a constant vector and the other one a matrix product that nothing else
    reads.
    """
    bias, product = node.inputs[index], node.inputs[1 - index]
    layer = plan.graph.producer(product)
    vector = plan.graph.is_constant(bias) and len(plan.graph.shape(bias) or ()) <= 1
    return (
        vector
        and layer is not None
        and layer.kind in _PRODUCTS
        and not plan.quantized(product)
    )


@rule("Div")
def division(node: Node, plan: Plan) -> None:
    """Numerator and result.

    The denominator too where there is no float, as its smallest values decide over all.
    """
    if plan.safe and not plan.integer_only(node):
        _operands(node, plan, node.inputs, quantized=node.inputs[:1])
        if node.name not in plan.kept:
            plan.keep_for(
                node,
                node.inputs[1],
                "it is a denominator: the smallest ones matter most",
            )
    else:
        _operands(node, plan, node.inputs)


@rule("Sub", "Mul", "Sum", "Mean", "SwiGLU")
def arithmetic(node: Node, plan: Plan) -> None:
    """All operands and the result, unless one of them is a mask."""
    _operands(node, plan, node.inputs)


@rule("Max", "Min")
def extremes(node: Node, plan: Plan) -> None:
    """All operands and the result, unless one of them is a mask or the result is to become a
    denominator.
    """
    _operands(node, plan, node.inputs)


@rule("com.microsoft::BiasAdd")
def bias_add(node: Node, plan: Plan) -> None:
    """Both summands and the result; the bias stays float."""
    _operands(node, plan, (node.input(0), node.input(2)))


@rule("Where")
def where(node: Node, plan: Plan) -> None:
    """The two alternatives and the result, unless one of them is a mask."""
    _operands(node, plan, node.inputs[1:])


def _operands(
    node: Node,
    plan: Plan,
    operands: tuple[str, ...],
    quantized: tuple[str, ...] | None = None,
) -> None:
    """Quantize operands, all of them unless it is said which, and the result.

    Nothing where a mask is among them.
    """
    if is_control_tensor(node, plan, *operands):
        return
    if (
        node.kind in _BOUNDING
        and feeds_root_or_division(node, plan)
        and kept_float(node, plan, DECIDING)
    ):
        return
    plan.activation(node, *(operands if quantized is None else quantized))
    plan.activation(node, node.outputs[0])


#: Arithmetic that keeps a denominator from zero.
_BOUNDING = frozenset({"Add", "Max", "Min"})
