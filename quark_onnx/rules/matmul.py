"""Plan the tensors of MatMul and Gemm, also as onnxruntime fuses them.

Integer products are converted to float before they are rounded again, so the result is quantized
only if a reader requests it. Integer-only hardware needs a quantized result in any case.
"""

from __future__ import annotations

from quark_onnx.graph import Node
from quark_onnx.patterns.conv_and_gemm import output_axis, unscaled
from quark_onnx.plan import PlanBuilder
from quark_onnx.rules.base import rule


@rule("MatMul")
def matmul(node: Node, plan: PlanBuilder) -> None:
    """Quantize the operands; a constant operand is a weight, per output channel.

    The result is quantized where the engine has no float32. A weight is (..., K, N) on the right,
    (..., M, K) on the left. A stack of matrices on the right has one scale: onnxruntime refuses
    integer products with per-column scales there.
    """
    a, b = node.inputs
    _operand(node, plan, a, along=-1, axis=-2)
    # Rank 0 stands for an unknown shape: the axes are counted from the end then.
    rank = len(plan.graph.sizes(b))
    # a tensor times itself has one scale, along the axis of the left operand
    along = -1 if rank == 1 or a == b else -2
    _operand(node, plan, b, along=along, axis=None if rank > 2 else -1)
    plan.rounded_result(node)


def _operand(
    node: Node,
    plan: PlanBuilder,
    tensor: str,
    *,
    along: int,
    axis: int | None,
) -> None:
    """Quantize an operand of a product, a constant matrix as a weight.

    Args:
        node: the product.
        plan: the plan.
        tensor: the operand.
        along: axis of the sum, from the end.
        axis: axis of the output channels, from the end; None for one scale.
    """
    rank = len(plan.graph.sizes(tensor))
    # A constant vector has no axis of output channels.
    if rank < 2 or not plan.graph.is_constant(tensor):
        plan.activation(node, tensor, along=along)
        return
    if axis is not None:
        axis += rank
    plan.weight(node, tensor, axis=axis, along=rank + along)


@rule(
    "com.microsoft::FusedMatMul",
    "com.microsoft::FusedMatMulActivation",
    "com.microsoft::TransposeMatMul",
)
def fused_matmul(node: Node, plan: PlanBuilder) -> None:
    """Quantize like MatMul, with optionally transposed operands.

    A stack of matrices has one scale.
    """
    for letter, tensor in zip("AB", node.inputs, strict=False):
        rank = len(plan.graph.sizes(tensor))
        along = _sum_axis(node, letter, rank)
        axis = None
        if rank == 2:
            # The other axis of a matrix: -1 for -2, and -2 for -1.
            axis = -3 - along
        _operand(node, plan, tensor, along=along, axis=axis)
    plan.rounded_result(node)


def _sum_axis(node: Node, letter: str, rank: int) -> int:
    """Return the axis of the sum of an operand of a fused MatMul, from the end.

    Args:
        node: the product.
        letter: "A" for the left operand, "B" for the right one.
        rank: rank of the operand; 0 if unknown.
    """
    if rank == 1:
        return -1
    # The last axis of A and the second to last of B, the reverse if transposed.
    transposed = bool(node.attribute(f"trans{letter}", 0))
    if (letter == "A") != transposed:
        return -1
    # With the batch axes in the middle, the rows come first.
    if node.attribute(f"transBatch{letter}", 0):
        return -rank
    return -2


@rule("com.microsoft::GemmFastGelu")
def gemm_gelu(node: Node, plan: PlanBuilder) -> None:
    """Quantize input and weight per output; the result where the engine has no float32."""
    plan.activation(node, node.input(0), along=-1)
    plan.weight(node, node.input(1), axis=1, along=0)
    plan.rounded_result(node)


@rule("Gemm", "com.microsoft::FusedGemm")
def gemm(node: Node, plan: PlanBuilder) -> None:
    """Quantize ``alpha * A * B + beta * C``: B is a weight along its output axis.

    C is an int32 bias if it is added unscaled.
    """
    a = node.input(0)
    b = node.input(1)
    c = node.input(2)
    along = 0 if node.attribute("transA", 0) else 1
    plan.activation(node, a, along=along)
    axis = output_axis(node)
    plan.weight(node, b, axis, along=1 - axis)
    # C may be a matrix or a scalar as well, which has no value per scale of B.
    channels = plan.graph.sizes(b)[axis : axis + 1]
    if unscaled(node) and channels and plan.graph.shape(c) == channels:
        plan.bias(node, c, a, b)
    plan.rounded_result(node)
