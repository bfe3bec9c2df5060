"""Averages: they lie within the input's range but use little of it, so the result has a scale of its own."""

from __future__ import annotations

from quark_onnx.graph import Node
from quark_onnx.plan import Plan
from quark_onnx.rules.base import rule


@rule("AveragePool", "GlobalAveragePool")
def average(node: Node, plan: Plan) -> None:
    """Input and result. Not with dilations, which onnxruntime's integer operator lacks, nor where it counts wrongly."""
    if node.attribute("dilations") is not None:
        plan.keep_node(node, "onnxruntime has no integer average pooling with dilations")
    elif node.attribute("ceil_mode", 0) and node.attribute("count_include_pad", 0):
        plan.keep_node(node, "onnxruntime's integer average pooling counts beyond the padding with ceil_mode")
    else:
        plan.activation(node, node.inputs[0], node.outputs[0])


@rule("LpPool", "GlobalLpPool")
def power_average(node: Node, plan: Plan) -> None:
    """Input and result."""
    plan.activation(node, node.inputs[0], node.outputs[0])
