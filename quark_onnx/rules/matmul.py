"""Plan the tensors of MatMul and Gemm, and of the forms that onnxruntime fuses them to.

Integer products are converted to float before they are rounded again, so the result is quantized
only if a reader requests it. Integer-only hardware needs a quantized result in any case, and the
user may ask for it.
"""

from __future__ import annotations

from quark_onnx.graph import Node
from quark_onnx.patterns.conv_and_gemm import output_axis, unscaled
from quark_onnx.patterns.weight_axes import fused_sum_axis, transposed_matrix
from quark_onnx.plan import PlanBuilder
from quark_onnx.rules.base import enters_normalization, rule


@rule("MatMul")
def matmul(node: Node, plan: PlanBuilder) -> None:
    """Quantize the operands; a constant operand is a weight, per output channel."""
    a, b = node.inputs
    _operand(node, plan, 0, along=-1)
    # Rank 0 stands for an unknown shape: the axes are counted from the end then.
    rank = len(plan.graph.sizes(b))
    # A tensor times itself has one scale, along the axis of the left operand.
    _operand(node, plan, 1, along=-1 if rank == 1 or a == b else -2)
    _result(node, plan)


def _operand(node: Node, plan: PlanBuilder, index: int, *, along: int) -> None:
    """Quantize an operand of a product, a constant matrix as a weight.

    Args:
        index: position of the operand among the inputs.
        along: axis of the sum, from the end.
    """
    tensor = node.inputs[index]
    is_constant = plan.graph.is_constant(tensor)
    # A constant vector has no axis of output channels.
    is_matrix = is_constant and len(plan.graph.sizes(tensor)) > 1
    if is_matrix or transposed_matrix(plan.graph, tensor):
        plan.weight_at(node, index)
    else:
        plan.activation(node, tensor, along=along)


@rule(
    "com.microsoft::FusedMatMul",
    "com.microsoft::FusedMatMulActivation",
    "com.microsoft::TransposeMatMul",
)
def fused_matmul(node: Node, plan: PlanBuilder) -> None:
    """Quantize like MatMul, with optionally transposed operands."""
    for index, tensor in enumerate(node.inputs[:2]):
        rank = len(plan.graph.sizes(tensor))
        _operand(node, plan, index, along=fused_sum_axis(node, "AB"[index], rank))
    _result(node, plan)


@rule("com.microsoft::GemmFastGelu")
def gemm_gelu(node: Node, plan: PlanBuilder) -> None:
    """Quantize input and weight per output; the result where the engine has no float32."""
    plan.activation(node, node.input(0), along=-1)
    plan.weight_at(node, 1)
    _result(node, plan)


@rule("Gemm", "com.microsoft::FusedGemm")
def gemm(node: Node, plan: PlanBuilder) -> None:
    """Quantize ``alpha * A * B + beta * C``: a constant A or B is a weight.

    C is an int32 bias if it is added unscaled.
    """
    a = node.input(0)
    b = node.input(1)
    c = node.input(2)
    plan.weight_at(node, 0)
    axis = output_axis(node)
    plan.weight_at(node, 1)
    # C may be a matrix or a scalar as well, which has no value per scale of B.
    channels = plan.graph.sizes(b)[axis : axis + 1]
    if unscaled(node) and channels and plan.graph.shape(c) == channels:
        plan.bias(node, c, a, b)
    _result(node, plan)


def _result(node: Node, plan: PlanBuilder) -> None:
    """Quantize the result if the engine has no float32, or if the user asks for it."""
    plan.rounded_result(node)
    if plan.asked.all_pairs and not (
        plan.is_low_bit(node) and _joins_stream(node, plan)
    ):
        plan.activation(node, node.outputs[0])


def _joins_stream(node: Node, plan: PlanBuilder) -> bool:
    """Return whether a product is added to a residual stream, possibly after its bias."""
    sums = plan.graph.followers(node)
    for reader in list(sums):
        if reader.kind == "Add" and any(map(plan.graph.is_constant, reader.inputs)):
            sums = [*sums, *plan.graph.followers(reader)]
    return any(enters_normalization(reader, plan) for reader in sums)
