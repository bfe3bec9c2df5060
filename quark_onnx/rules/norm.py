"""Normalizations: input and result; their few parameters stay float, where they cost nothing."""

from __future__ import annotations

from quark_onnx.graph import Node
from quark_onnx.plan import Plan
from quark_onnx.rules.base import NORMALIZING, RESIDUAL, rule


@rule("LayerNormalization", "InstanceNormalization", "BatchNormalization")
def normalization(node: Node, plan: Plan) -> None:
    """Input and first result; the statistics that may follow it stay float."""
    if node.kind in NORMALIZING and plan.coarse(node):
        plan.keep_node(node, RESIDUAL)
    else:
        plan.activation(node, node.inputs[0], node.outputs[0])
