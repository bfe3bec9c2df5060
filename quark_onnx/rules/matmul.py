"""MatMul and Gemm, also as onnxruntime fuses them.

Their integer products are converted to float anyway before they are rounded again, so the result is
left to its readers: it is quantized if one of them asks for it. Integer-only hardware needs it
quantized in any case.
"""

from __future__ import annotations

from quark_onnx.graph import Node
from quark_onnx.patterns.conv_and_gemm import unscaled
from quark_onnx.plan import Plan
from quark_onnx.rules.base import rule


@rule("MatMul")
def matmul(node: Node, plan: Plan) -> None:
    """Both operands, a constant one as a weight along its output axis.

    The result where there is no float32.

    A weight is (..., K, N) on the right, (..., M, K) on the left. A stack of matrices on the right
    has one scale: onnxruntime refuses integer products with one for each column of it.
    """
    a, b = node.inputs
    for tensor, axis_from_end in ((a, 2), (b, 1)):
        shape = plan.graph.shape(tensor)
        summed = -1 if tensor == a or (shape is not None and len(shape) == 1) else -2
        if plan.graph.is_constant(tensor) and shape is not None and len(shape) >= 2:
            stacked = tensor == b and len(shape) > 2
            along = len(shape) + summed
            plan.weight(
                node,
                tensor,
                axis=None if stacked else len(shape) - axis_from_end,
                along=along,
            )
        else:
            plan.activation(node, tensor, along=summed)
    if plan.rounds_results(node):
        plan.activation(node, node.outputs[0])


_FUSED = ("FusedMatMul", "FusedMatMulActivation", "TransposeMatMul")


@rule(*(f"com.microsoft::{name}" for name in _FUSED))
def fused_matmul(node: Node, plan: Plan) -> None:
    """Like MatMul, either operand transposed or not; a stack of matrices has one scale."""
    for place, tensor in enumerate(node.inputs[:2]):
        letter = "AB"[place]
        shape, turned = (
            plan.graph.shape(tensor) or (),
            bool(node.attribute(f"trans{letter}", 0)),
        )
        moved = bool(node.attribute(f"transBatch{letter}", 0))
        along = -1 if (place == 0) != turned else -2
        if moved and along == -2:
            along = -len(shape)  # the rows come before the batch
        if len(shape) == 1:
            along = -1
        if plan.graph.is_constant(tensor) and len(shape) >= 2:
            axis = (0 if along == -1 else 1) if len(shape) == 2 else None
            plan.weight(node, tensor, axis=axis, along=len(shape) + along)
        else:
            plan.activation(node, tensor, along=along)
    if plan.rounds_results(node):
        plan.activation(node, node.outputs[0])


@rule("com.microsoft::GemmFastGelu")
def gemm_gelu(node: Node, plan: Plan) -> None:
    """Input and weight along its output axis; the result where there is no float32."""
    plan.activation(node, node.input(0), along=-1)
    plan.weight(node, node.input(1), axis=1, along=0)
    if plan.rounds_results(node):
        plan.activation(node, node.outputs[0])


@rule("Gemm", "com.microsoft::FusedGemm")
def gemm(node: Node, plan: Plan) -> None:
    """``alpha * A * B + beta * C``: B is the weight along its output axis.

    C an int32 bias if it is added unscaled.
    """
    a, b, c = node.input(0), node.input(1), node.input(2)
    along = 0 if node.attribute("transA", 0) else 1
    plan.activation(node, a, along=along)
    axis = 0 if node.attribute("transB", 0) else 1
    plan.weight(node, b, axis, along=1 - axis)
    channels = (plan.graph.shape(b) or ())[axis : axis + 1]
    if unscaled(node) and channels and plan.graph.shape(c) == channels:
        plan.bias(node, c, a, b)
    if plan.rounds_results(node):
        plan.activation(node, node.outputs[0])
