"""Plan the tensors of operators that pick indices or the largest values."""

from __future__ import annotations

from quark_onnx.graph import Node
from quark_onnx.plan import PlanBuilder
from quark_onnx.rules.base import kept_float, rule

_RANKING = "it ranks values, of which few codes make many equal"


@rule("TopK")
def top(node: Node, plan: PlanBuilder) -> None:
    """Keep float where possible, as rounding creates ties; otherwise share the input's scale."""
    if _reads_codes(node, plan) or not kept_float(node, plan, _RANKING):
        # The second result holds indices, and stays as it is.
        plan.same_as(node, node.outputs[0], node.inputs[0])


@rule("ArgMax", "ArgMin")
def position(node: Node, plan: PlanBuilder) -> None:
    """Keep float where possible, as rounding creates ties; otherwise quantize the input."""
    if (
        plan.asked.like_onnxruntime
        or _reads_codes(node, plan)
        or not kept_float(node, plan, _RANKING)
    ):
        plan.activation(node, node.inputs[0])


def _reads_codes(node: Node, plan: PlanBuilder) -> bool:
    """Return whether a node gets rounded values in any case, and the user asks for all pairs."""
    return plan.asked.all_pairs and plan.quantized(node.inputs[0], node)


@rule("NonMaxSuppression")
def suppression(node: Node, plan: PlanBuilder) -> None:
    """Keep float: boxes and scores decide by small differences, and the result holds indices."""
    plan.keep_node(node, "it selects boxes by small differences of overlaps and scores")
