"""Plan the tensors of arithmetic operators."""

from __future__ import annotations

import numpy as np

from quark_onnx.graph import Graph, Node
from quark_onnx.graph.pattern import op, tensor
from quark_onnx.graph.shapes import known_sizes
from quark_onnx.plan import PlanBuilder, Quantize
from quark_onnx.rules.base import (
    RESIDUAL,
    enters_normalization,
    follows_floats,
    is_control_tensor,
    kept_before_root,
    kept_before_sum,
    kept_float,
    rule,
)
from quark_onnx.rules.passthrough import REARRANGING
from quark_onnx.rules.sensitive import POLE


def _is_constant_vector(graph: Graph, name: str) -> bool:
    """Return whether a tensor is a constant of rank 0 or 1, such as a bias."""
    return graph.is_constant(name) and len(graph.sizes(name)) <= 1


#: A matrix product, which is rounded after a bias was added to it.
_PRODUCT = op({"MatMul", "Einsum", "com.microsoft::FusedMatMul"}).named("product")
_BIASED = _PRODUCT + tensor("bias", where=_is_constant_vector)


@rule("Add")
def add(node: Node, plan: PlanBuilder) -> None:
    """Quantize operands and result.

    Two sums stay float: a bias added to a float product and, in 8 bits, a residual stream.
    """
    # Outlier channels of the residual stream set the range, and leave few codes to the others.
    if enters_normalization(node, plan) and plan.is_low_bit(node):
        plan.keep_node(node, RESIDUAL)
    # Product and sum stay in float32: the sum is rounded once, where it is read.
    elif _adds_bias(node, plan) and not plan.rounds_results(node):
        plan.keep_node(node, "it adds a bias to a product that is not rounded yet")
    else:
        _operands(node, plan, node.inputs)
        return
    _gemm_bias(node, plan)


def _adds_bias(node: Node, plan: PlanBuilder) -> bool:
    """Return whether a constant vector is added to a matrix product that is not rounded."""
    match = _BIASED.match(plan.graph, node.outputs[0], shared=True)
    return match is not None and not plan.quantized(match["product"])


def _gemm_bias(node: Node, plan: PlanBuilder) -> None:
    """Quantize the bias like that of a Gemm if onnxruntime fuses MatMul and Add to a Gemm.

    With a float bias this Gemm is computed in float, from weights that are dequantized in every
    run: MLP-Mixer takes 3.4 times as long (onnxruntime 1.32).
    """
    graph = plan.graph
    match = _BIASED.match(graph, node.outputs[0])
    if match is None:
        return
    product = graph.producer_of_kind(match["product"], ("MatMul",))
    if product is None or not _fuses_to_gemm(graph, product, match["bias"]):
        return
    # The pair of a quantized product stands between MatMul and Add, and prevents the fusion.
    if plan.quantized(match["product"]):
        return
    # Integer operators have kernels with a float bias, and other engines make no Gemm.
    if plan.fuses or not plan.asked.makes_gemms:
        return
    source, weight = product.inputs
    if _reads_codes(plan, product, source) and _reads_codes(plan, product, weight):
        plan.bias(node, match["bias"], source, weight, product=product)


def _fuses_to_gemm(graph: Graph, product: Node, bias: str) -> bool:
    """Return whether onnxruntime fuses a MatMul and the Add of its bias to a Gemm."""
    source, weight = product.inputs
    sizes = graph.sizes(source)
    # onnxruntime fuses matrices, and stacks of matrices whose sizes are all known.
    if len(sizes) != 2 and known_sizes(sizes) is None:
        return False
    if len(graph.sizes(weight)) != 2 or not graph.is_constant(weight):
        return False
    return graph.sizes(bias) == graph.sizes(weight)[1:]


def _reads_codes(plan: PlanBuilder, node: Node, name: str) -> bool:
    """Return whether a node reads a tensor in 8-bit integer codes."""
    entry = plan.entry(plan.use(name, node))
    return (
        isinstance(entry, Quantize)
        and entry.spec.dtype.uniform
        and entry.spec.dtype.bits == 8
    )


@rule("Div")
def division(node: Node, plan: PlanBuilder) -> None:
    """Quantize numerator and result; the denominator only for engines without float.

    The smallest values of a denominator decide the largest results. With a constant numerator the
    node is a reciprocal, and stays float.
    """
    if plan.graph.is_constant(node.inputs[0]) and kept_float(node, plan, POLE):
        return
    # The error of a rounded denominator is relative to its largest value, the error of the quotient
    # is largest at its smallest value.
    reason = "it is a denominator: the smallest ones matter most"
    _with_float_operands(node, plan, (node.inputs[1],), reason)


@rule("Mul")
def product(node: Node, plan: PlanBuilder) -> None:
    """Quantize factors and result; a reciprocal only for engines without float.

    A product with a reciprocal is a division, as in normalizations that multiply by ``1 / norm``.
    """
    if kept_before_sum(node, plan):
        return
    factors = tuple(name for name in node.inputs if _is_reciprocal(plan.graph, name))
    reason = "it is a reciprocal: the largest ones leave few codes to the others"
    _with_float_operands(node, plan, factors, reason)


@rule("Sub", "Sum", "Mean", "SwiGLU")
def arithmetic(node: Node, plan: PlanBuilder) -> None:
    """Quantize the operands and the result, unless an operand is a mask."""
    _operands(node, plan, node.inputs)


@rule("Max", "Min")
def extremes(node: Node, plan: PlanBuilder) -> None:
    """Quantize operands and result, unless an operand is a mask or the result a denominator."""
    _operands(node, plan, node.inputs)


@rule("com.microsoft::BiasAdd")
def bias_add(node: Node, plan: PlanBuilder) -> None:
    """Quantize both summands and the result; the bias stays float."""
    _operands(node, plan, (node.input(0), node.input(2)))


@rule("Where")
def where(node: Node, plan: PlanBuilder) -> None:
    """Quantize both alternatives and the result, unless an alternative is a mask."""
    if not follows_floats(node, plan, *node.inputs[1:]):
        _operands(node, plan, node.inputs[1:])


def _is_reciprocal(graph: Graph, name: str) -> bool:
    """Return whether a tensor has the values of a reciprocal, such as ``1 / norm``."""
    while (mover := graph.producer_of_kind(name, _MOVING)) is not None:
        name = mover.inputs[0]
    node = graph.producer(name)
    if node is None or graph.is_constant(name):
        return False
    if node.kind == "Div":
        return graph.is_constant(node.inputs[0])
    if node.kind == "Pow":
        exponent = graph.constant(node.inputs[1])
        return exponent is not None and bool(np.all(exponent < 0))
    return node.kind == "Reciprocal"


#: Operators between a reciprocal and the product with it.
_MOVING = REARRANGING | {"Expand"}


def _with_float_operands(
    node: Node, plan: PlanBuilder, kept: tuple[str, ...], reason: str
) -> None:
    """Quantize operands and result; some operands stay float if the engine has float.

    Args:
        kept: names of the operands that stay float.
        reason: why they stay float.
    """
    if not kept or not plan.safe or plan.integer_only(node):
        _operands(node, plan, node.inputs)
        return
    quantized = tuple(name for name in node.inputs if name not in kept)
    _operands(node, plan, node.inputs, quantized=quantized)
    # A node that an operand has kept float reads floats in any case.
    if node.name not in plan.kept:
        for name in kept:
            plan.keep_for(node, name, reason)


def _operands(
    node: Node,
    plan: PlanBuilder,
    operands: tuple[str, ...],
    quantized: tuple[str, ...] | None = None,
) -> None:
    """Quantize operands and the result, unless an operand is a mask.

    Args:
        operands: names of the operands, of which none may be a mask.
        quantized: names of the operands to quantize; None for all.
    """
    if is_control_tensor(node, plan, *operands):
        return
    # A bound keeps a denominator from 0, but its rounded result may be 0 again.
    if kept_before_root(node, plan):
        return
    plan.activation(node, *(operands if quantized is None else quantized))
    plan.activation(node, node.outputs[0])
