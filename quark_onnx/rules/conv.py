"""Conv and ConvTranspose."""

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
    """Like Conv, but the weight is (C, M/group, ...): a channel scale serves that channel of every group."""
    x, w, bias = node.input(0), node.input(1), node.input(2)
    plan.activation(node, x, along=1)
    plan.weight(node, w, axis=1, along=0)
    plan.bias(node, bias, x, w, repeat=node.attribute("group", 1))
    plan.activation(node, node.outputs[0])
