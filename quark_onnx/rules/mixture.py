"""Plan the tensors of mixtures of experts."""

from __future__ import annotations

from quark_onnx.graph import Node
from quark_onnx.plan import PlanBuilder
from quark_onnx.rules.base import rule

#: Weights of the experts: up projection, down projection, gate.
_WEIGHTS = (2, 4, 6)


@rule("com.microsoft::MoE")
def mixture(node: Node, plan: PlanBuilder) -> None:
    """Quantize the weights of the experts with a scale per output of each.

    Input and result are quantized where the engine has no float32. The router's probabilities stay
    float, as few codes would choose other experts.
    """
    for place in _WEIGHTS:
        if plan.graph.is_constant(node.input(place)):
            plan.weight_at(node, place)
    if plan.rounds_results(node):
        plan.activation(node, node.inputs[0], node.outputs[0])
