"""Plan the tensors of convolutions."""

from __future__ import annotations

from quark_onnx.graph import Node
from quark_onnx.plan import PlanBuilder
from quark_onnx.rules.base import rule


@rule("Conv")
def conv(node: Node, plan: PlanBuilder) -> None:
    """Quantize input, weight (M, C/group, ...) per output channel, int32 bias, and result."""
    x = node.input(0)
    w = node.input(1)
    bias = node.input(2)
    plan.activation(node, x, along=1)
    plan.weight_at(node, 1)
    plan.bias(node, bias, x, w)
    plan.activation(node, node.outputs[0])


@rule("ConvTranspose")
def conv_transpose(node: Node, plan: PlanBuilder) -> None:
    """Quantize like Conv, with a weight of shape (C, M/group, ...).

    The scale of a channel serves this channel of every group, unless the groups differ much.
    """
    x = node.input(0)
    w = node.input(1)
    bias = node.input(2)
    plan.activation(node, x, along=1)
    plan.weight_at(node, 1)
    # M/group scales of the weight may serve M values of the bias, group after group.
    plan.bias(node, bias, x, w, repeat=node.attribute("group", 1))
    plan.activation(node, node.outputs[0])


@rule("com.microsoft::FusedConv")
def fused_conv(node: Node, plan: PlanBuilder) -> None:
    """Quantize like Conv, with the summand."""
    x = node.input(0)
    w = node.input(1)
    bias = node.input(2)
    # The input Z is added to the product before the fused activation.
    added = node.input(3)
    plan.activation(node, x, along=1)
    plan.weight_at(node, 1)
    plan.bias(node, bias, x, w)
    plan.activation(node, added, node.outputs[0])


@rule("DeformConv")
def deform_conv(node: Node, plan: PlanBuilder) -> None:
    """Quantize like Conv; the offsets and their mask stay float, as positions."""
    x = node.input(0)
    w = node.input(1)
    # Input 2 holds the offsets, input 4 the mask.
    bias = node.input(3)
    plan.activation(node, x, along=1)
    plan.weight_at(node, 1)
    plan.bias(node, bias, x, w)
    plan.activation(node, node.outputs[0])


@rule("CausalConvWithState", "com.microsoft::CausalConvWithState")
def causal_conv(node: Node, plan: PlanBuilder) -> None:
    """Quantize input, weight (C, 1, ...) per channel, bias and result; the state stays float."""
    x = node.input(0)
    w = node.input(1)
    bias = node.input(2)
    plan.activation(node, x)
    plan.weight_at(node, 1)
    plan.bias(node, bias, x, w)
    plan.activation(node, node.outputs[0])
