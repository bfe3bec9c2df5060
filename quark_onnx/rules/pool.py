"""Plan the tensors of averages, with separate scales for the results.

An average uses only a small part of the input's range.
"""

from __future__ import annotations

from quark_onnx.graph import Graph, Node
from quark_onnx.graph.traversal import reach
from quark_onnx.plan import PlanBuilder
from quark_onnx.rules.base import follows_floats, rule
from quark_onnx.rules.passthrough import REARRANGING

#: Operators that convert scores, or do not read their values.
_SCORES = frozenset({"Softmax", "LogSoftmax", "Sigmoid", "Shape"})


@rule("AveragePool", "GlobalAveragePool")
def average(node: Node, plan: PlanBuilder) -> None:
    """Quantize input and result, except where onnxruntime's integer operator differs.

    onnxruntime's integer operator has no dilations, and counts beyond the padding in ceil mode.
    """
    if follows_floats(node, plan, node.inputs[0]):
        return
    if node.attribute("dilations") is not None:
        plan.keep_node(
            node, "onnxruntime has no integer average pooling with dilations"
        )
    elif node.attribute("ceil_mode", 0) and node.attribute("count_include_pad", 0):
        plan.keep_node(
            node,
            "onnxruntime's integer average pooling counts beyond the padding with"
            " ceil_mode",
        )
    elif _is_too_coarse(node, plan):
        # Constraint C2 of the target: input and result of a pool have one position.
        reason = (
            "the target wants the scale of its input for its result, too coarse for the"
            " scores it makes"
        )
        plan.keep_node(node, reason)
        # A reader's request for the result would bring back the scale of the input.
        plan.keep(node.outputs[0], reason)
    else:
        plan.activation(node, node.inputs[0], node.outputs[0])


def _is_too_coarse(node: Node, plan: PlanBuilder) -> bool:
    """Return whether a result with the scale of the input degrades the model's scores."""
    if not plan.aligns or not plan.safe or not plan.integer_only(node):
        return False
    return _makes_scores(plan.graph, node)


def _makes_scores(graph: Graph, node: Node) -> bool:
    """Return whether a result only reaches the outputs, by moves of values or a softmax."""
    allowed = REARRANGING | _SCORES
    # ``reach`` includes the node itself, which is a pool.
    downstream = [reader for reader in reach([node], graph.followers) if reader != node]
    return all(reader.kind in allowed for reader in downstream)


@rule("LpPool", "GlobalLpPool")
def power_average(node: Node, plan: PlanBuilder) -> None:
    """Quantize input and result."""
    plan.activation(node, node.inputs[0], node.outputs[0])
