"""MatMul and Gemm.

Their integer products are converted to float anyway before they are rounded again, so the result is left to its
readers: it is quantized if one of them asks for it. Integer-only hardware needs it quantized in any case.
"""

from __future__ import annotations

from quark_onnx.graph import Node
from quark_onnx.plan import Plan
from quark_onnx.rules.base import rule


@rule("MatMul")
def matmul(node: Node, plan: Plan) -> None:
    """Two operands, either of which may be a weight: (..., K, N) on the right, (..., M, K) on the left.

    A stack of matrices on the right has one scale: onnxruntime refuses integer products with one for each column of it.
    """
    a, b = node.inputs
    for tensor, axis_from_end in ((a, 2), (b, 1)):
        shape = plan.graph.shape(tensor)
        summed = -1 if tensor == a or (shape is not None and len(shape) == 1) else -2
        if plan.graph.is_constant(tensor) and shape is not None and len(shape) >= 2:
            stacked = tensor == b and len(shape) > 2
            along = len(shape) + summed
            plan.weight(node, tensor, axis=None if stacked else len(shape) - axis_from_end, along=along)
        else:
            plan.activation(node, tensor, along=summed)
    if plan.rounds_results(node):
        plan.activation(node, node.outputs[0])


@rule("Gemm")
def gemm(node: Node, plan: Plan) -> None:
    """``alpha * A * B + beta * C``: B is the weight along its output axis; C an int32 bias if it is added unscaled."""
    a, b, c = node.input(0), node.input(1), node.input(2)
    plan.activation(node, a, along=0 if node.attribute("transA", 0) else 1)
    axis = 0 if node.attribute("transB", 0) else 1
    plan.weight(node, b, axis, along=1 - axis)
    unscaled = node.attribute("alpha", 1.0) == 1.0 and node.attribute("beta", 1.0) == 1.0
    channels = (plan.graph.shape(b) or ())[axis : axis + 1]
    if unscaled and channels and plan.graph.shape(c) == channels:
        plan.bias(node, c, a, b)
    if plan.rounds_results(node):
        plan.activation(node, node.outputs[0])
