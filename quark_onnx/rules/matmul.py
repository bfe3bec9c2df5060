"""PlanBuilder the tensors of MatMul and Gemm, also as onnxruntime fuses them.

Integer products are converted to float before they are rounded again, so the result is quantized
only if a reader requests it. Integer-only hardware needs a quantized result in any case.
"""

from __future__ import annotations

from quark_onnx.graph import Node
from quark_onnx.patterns.conv_and_gemm import unscaled
from quark_onnx.plan import PlanBuilder
from quark_onnx.rules.base import rule


@rule("MatMul")
def matmul(node: Node, plan: PlanBuilder) -> None:
    """Quantize the operands; a constant operand is a weight, per output channel.

    The result is quantized where the engine has no float32. A weight is (..., K, N) on the right,
    (..., M, K) on the left. A stack of matrices on the right has one scale: onnxruntime refuses
    integer
    products with per-column scales there.
    """
    a, b = node.inputs
    for tensor, axis_from_end in ((a, 2), (b, 1)):
        shape = plan.graph.shape(tensor)
        vector = shape is not None and len(shape) == 1
        summed = -1 if tensor == a or vector else -2
        if plan.graph.is_constant(tensor) and shape is not None and len(shape) >= 2:
            rank = len(shape)
            stacked = tensor == b and rank > 2
            axis = None if stacked else rank - axis_from_end
            plan.weight(node, tensor, axis=axis, along=rank + summed)
        else:
            plan.activation(node, tensor, along=summed)
    if plan.rounds_results(node):
        plan.activation(node, node.outputs[0])


@rule(
    "com.microsoft::FusedMatMul",
    "com.microsoft::FusedMatMulActivation",
    "com.microsoft::TransposeMatMul",
)
def fused_matmul(node: Node, plan: PlanBuilder) -> None:
    """Quantize like MatMul, with optionally transposed operands.

    A stack of matrices has one scale.
    """
    for place, tensor in enumerate(node.inputs[:2]):
        letter = "AB"[place]
        shape = plan.graph.shape(tensor) or ()
        transposed = bool(node.attribute(f"trans{letter}", 0))
        batch_last = bool(node.attribute(f"transBatch{letter}", 0))
        along = -1 if (place == 0) != transposed else -2
        if batch_last and along == -2:
            along = -len(shape)  # the rows come before the batch axes
        if len(shape) == 1:
            along = -1
        if plan.graph.is_constant(tensor) and len(shape) >= 2:
            if len(shape) == 2:
                axis = 0 if along == -1 else 1
            else:
                axis = None
            plan.weight(node, tensor, axis=axis, along=len(shape) + along)
        else:
            plan.activation(node, tensor, along=along)
    if plan.rounds_results(node):
        plan.activation(node, node.outputs[0])


@rule("com.microsoft::GemmFastGelu")
def gemm_gelu(node: Node, plan: PlanBuilder) -> None:
    """Quantize input and weight per output; the result where the engine has no float32."""
    plan.activation(node, node.input(0), along=-1)
    plan.weight(node, node.input(1), axis=1, along=0)
    if plan.rounds_results(node):
        plan.activation(node, node.outputs[0])


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
    axis = 0 if node.attribute("transB", 0) else 1
    plan.weight(node, b, axis, along=1 - axis)
    channels = (plan.graph.shape(b) or ())[axis : axis + 1]
    if unscaled(node) and channels and plan.graph.shape(c) == channels:
        plan.bias(node, c, a, b)
    if plan.rounds_results(node):
        plan.activation(node, node.outputs[0])
