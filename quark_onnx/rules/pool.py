"""Averages: they lie within the input's range but use little of it, so the result has a scale of
its own.
"""

from __future__ import annotations

from quark_onnx.graph import Graph, Node
from quark_onnx.graph.traversal import reach
from quark_onnx.plan import Plan
from quark_onnx.rules.base import rule
from quark_onnx.rules.passthrough import REARRANGING

#: What turns scores into others, or reads nothing of them.
_SCORES = frozenset({"Softmax", "LogSoftmax", "Sigmoid", "Shape"})


@rule("AveragePool", "GlobalAveragePool")
def average(node: Node, plan: Plan) -> None:
    """Input and result.

    Not with dilations, which onnxruntime's integer operator lacks, nor where it counts wrongly.
    """
    if node.attribute("dilations") is not None:
        plan.keep_node(
            node,
            "onnxruntime has no integer average pooling with dilations",
        )
    elif node.attribute("ceil_mode", 0) and node.attribute("count_include_pad", 0):
        plan.keep_node(
            node,
            "onnxruntime's integer average pooling counts beyond the padding with"
            " ceil_mode",
        )
    elif (
        plan.aligns
        and plan.safe
        and plan.integer_only(node)
        and _makes_scores(plan.graph, node)
    ):
        reason = (
            "the target wants the scale of its input for its result, too coarse for the"
            " scores it makes"
        )
        plan.keep_node(node, reason)
        plan.keep(node.outputs[0], reason)
    else:
        plan.activation(node, node.inputs[0], node.outputs[0])


def _makes_scores(graph: Graph, node: Node) -> bool:
    """Whether nothing but the outputs of the model are made of a result, and only by moving its
    values or a softmax.
    """
    behind = reach([node], graph.followers)
    rest = [each for each in behind if each is not node]
    return all(each.kind in REARRANGING or each.kind in _SCORES for each in rest)


@rule("LpPool", "GlobalLpPool")
def power_average(node: Node, plan: Plan) -> None:
    """Input and result."""
    plan.activation(node, node.inputs[0], node.outputs[0])
