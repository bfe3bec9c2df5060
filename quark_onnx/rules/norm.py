"""Normalizations: input and result; their few parameters stay float, where they cost nothing."""

from __future__ import annotations

from quark_onnx.graph import Node
from quark_onnx.plan import Plan
from quark_onnx.rules.base import rule


@rule("LayerNormalization", "InstanceNormalization", "BatchNormalization")
def normalization(node: Node, plan: Plan) -> None:
    """Input and first result; the statistics that may follow it stay float."""
    plan.activation(node, node.inputs[0], node.outputs[0])
