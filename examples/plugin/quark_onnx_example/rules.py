"""A rule for Det: its matrices are quantized, and the determinants, which are sums of products of
many values, stay float.
"""

from quark_onnx.graph import Node
from quark_onnx.plan import PlanBuilder
from quark_onnx.rules import rule


@rule("Det")
def determinant(node: Node, plan: PlanBuilder) -> None:
    """The matrices; determinants stay float."""
    plan.activation(node, node.inputs[0])
