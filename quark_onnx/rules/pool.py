"""Averages: they lie within the input's range but use little of it, so the result has a scale of its own."""

from __future__ import annotations

from quark_onnx.graph import Node
from quark_onnx.plan import Plan
from quark_onnx.rules.base import rule


@rule("AveragePool", "GlobalAveragePool")
def average(node: Node, plan: Plan) -> None:
    """Input and result. Not with dilations: the integer operator that onnxruntime makes of them has none."""
    if node.attribute("dilations") is not None:
        plan.keep_node(node, "onnxruntime has no integer average pooling with dilations")
        return
    plan.activation(node, node.inputs[0], node.outputs[0])


@rule("LpPool", "GlobalLpPool")
def power_average(node: Node, plan: Plan) -> None:
    """Input and result."""
    plan.activation(node, node.inputs[0], node.outputs[0])
