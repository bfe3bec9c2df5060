"""Convolutions."""

from __future__ import annotations

from quark_onnx.graph import Node
from quark_onnx.plan import Plan
from quark_onnx.rules.base import rule


@rule("Conv")
def conv(node: Node, plan: Plan) -> None:
    """Input, weight along the output channels (M, C/group, ...), int32 bias, output."""
    x, w, bias = node.input(0), node.input(1), node.input(2)
    plan.activation(node, x, along=1)
    plan.weight(node, w, axis=0, along=1)
    plan.bias(node, bias, x, w)
    plan.activation(node, node.outputs[0])


@rule("ConvTranspose")
def conv_transpose(node: Node, plan: Plan) -> None:
    """Like Conv, but the weight is (C, M/group, ...): a channel scale serves that channel of every
    group.
    """
    x, w, bias = node.input(0), node.input(1), node.input(2)
    plan.activation(node, x, along=1)
    plan.weight(node, w, axis=1, along=0)
    plan.bias(node, bias, x, w, repeat=node.attribute("group", 1))
    plan.activation(node, node.outputs[0])


@rule("com.microsoft::FusedConv")
def fused_conv(node: Node, plan: Plan) -> None:
    """Like Conv; what is added to the product and the result are quantized too."""
    x, w, bias, added = (node.input(place) for place in range(4))
    plan.activation(node, x, along=1)
    plan.weight(node, w, axis=0, along=1)
    plan.bias(node, bias, x, w)
    plan.activation(node, added, node.outputs[0])


@rule("DeformConv")
def deform_conv(node: Node, plan: Plan) -> None:
    """Like Conv; the offsets and their mask stay float, as they are positions."""
    x, w, bias = node.input(0), node.input(1), node.input(3)
    plan.activation(node, x, along=1)
    plan.weight(node, w, axis=0, along=1)
    plan.bias(node, bias, x, w)
    plan.activation(node, node.outputs[0])


@rule("CausalConvWithState", "com.microsoft::CausalConvWithState")
def causal_conv(node: Node, plan: Plan) -> None:
    """Input, weight along the channels (C, 1, ...), bias and result.

    The state, which runs on, stays float.
    """
    x, w, bias = node.input(0), node.input(1), node.input(2)
    plan.activation(node, x)
    plan.weight(node, w, axis=0, along=2)
    plan.bias(node, bias, x, w)
    plan.activation(node, node.outputs[0])
