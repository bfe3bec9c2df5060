"""Plan the tensors of attention operators."""

from __future__ import annotations

from quark_onnx.graph import Node
from quark_onnx.plan import PlanBuilder
from quark_onnx.rules.base import kept_float, rule

_MS = "com.microsoft::"
_REASON = "no runtime has an integer form of it: its scores would have no scale"


@rule(
    _MS + "Attention",
    _MS + "PackedAttention",
    _MS + "DecoderMaskedSelfAttention",
    _MS + "LongformerAttention",
)
def projecting(node: Node, plan: PlanBuilder) -> None:
    """Quantize input, projection weight along its output axis, and bias.

    The result is quantized where the engine has no float32.
    """
    _project(node, plan, node.input(0), 1, node.input(2))
    # Tokens with global attention have projections of their own (inputs 4 and 5).
    if node.op_type == "LongformerAttention":
        _project(node, plan, node.input(0), 4, node.input(5))
    plan.rounded_result(node)


@rule(_MS + "DecoderAttention")
def decoding(node: Node, plan: PlanBuilder) -> None:
    """Quantize query, key and the projection weights.

    The result is quantized where the engine has no float32.
    """
    _project(node, plan, node.input(0), 2, "")
    _project(node, plan, node.input(1), 3, "")
    plan.rounded_result(node)


def _project(node: Node, plan: PlanBuilder, x: str, index: int, bias: str) -> None:
    """Quantize a projection: input (..., in), weight (in, out) per output, and bias (out,).

    Args:
        index: position of the projection weight among the inputs.
        bias: name of the bias; empty if there is none.
    """
    # Without a constant projection there is no integer product to gain.
    w = node.input(index)
    if plan.graph.is_constant(w):
        plan.activation(node, x, along=-1)
        plan.weight_at(node, index)
        plan.bias(node, bias, x, w)


_STANDARD = ("Attention", "LinearAttention")
_CONTRIBUTED = (
    "MultiHeadAttention",
    "GroupQueryAttention",
    "DecoderMaskedMultiHeadAttention",
    "PackedMultiHeadAttention",
    "SparseAttention",
    "LinearAttention",
)


@rule(*_STANDARD, *(_MS + name for name in _CONTRIBUTED))
def attention(node: Node, plan: PlanBuilder) -> None:
    """Quantize query, key, value and result; float next to integers.

    Integers have no scale for the scores inside.
    """
    # Before kept_float, which keeps no node float for an engine without float arithmetic.
    if plan.safe and plan.integer_only(node):
        plan.keep_node(node, _REASON)
    elif not kept_float(node, plan, _REASON):
        plan.activation(node, *node.inputs[:3], node.outputs[0])


@rule("RotaryEmbedding", _MS + "RotaryEmbedding", _MS + "MRotaryEmbedding")
def rotary(node: Node, plan: PlanBuilder) -> None:
    """Keep float where possible; otherwise quantize input and result.

    Sines and cosines stay float.
    """
    if not kept_float(
        node,
        plan,
        "onnxruntime rotates floats alone, and the product behind it rounds once",
    ):
        plan.activation(node, node.inputs[0], node.outputs[0])


@rule(_MS + "BiasSoftmax")
def bias_softmax(node: Node, plan: PlanBuilder) -> None:
    """Keep float where possible, as the bias is a mask; otherwise quantize scores and result."""
    if not kept_float(node, plan, "it adds a mask before its softmax"):
        plan.activation(node, node.inputs[0])
        plan.activation(node, node.outputs[0], bounds=(0.0, 1.0))
