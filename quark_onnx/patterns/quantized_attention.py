"""Find the attentions that onnxruntime's QAttention can compute."""

from __future__ import annotations

from typing import Any

from quark_onnx.graph import Node

ATTENTION = "com.microsoft::Attention"

#: Attributes that QAttention has, and computes as Attention does (onnxruntime,
#: ContribOperators.md).
ATTRIBUTES = ("num_heads", "unidirectional", "scale", "mask_filter_value")
#: Inputs of Attention up to the past; QAttention has none of the later ones.
_INPUTS = 5


def has_quantized_form(node: Node) -> bool:
    """Return whether a com.microsoft Attention has a QAttention, which needs a bias."""
    return (
        node.kind == ATTENTION
        and bool(node.input(2))
        and set(effective_attributes(node)).issubset(ATTRIBUTES)
        and not any(node.inputs[_INPUTS:])
    )


def effective_attributes(node: Node) -> dict[str, Any]:
    """Return the attributes, except attributes of 0 that QAttention does not have."""
    given = node.attributes.items()
    return {name: value for name, value in given if name in ATTRIBUTES or value}
