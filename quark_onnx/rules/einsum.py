"""Plan the tensors of Einsum."""

from __future__ import annotations

from quark_onnx.graph import Node
from quark_onnx.patterns.weight_axes import equation_terms, last_axis, weight_axes
from quark_onnx.plan import PlanBuilder
from quark_onnx.rules.base import is_control_tensor, rule


@rule("Einsum")
def einsum(node: Node, plan: PlanBuilder) -> None:
    """Quantize the operands, a constant matrix as a weight along axes of the result.

    The result is quantized where the engine has no float32.
    """
    if is_control_tensor(node, plan, *node.inputs):
        return
    terms, result = equation_terms(node)
    for index, tensor in enumerate(node.inputs):
        is_weight = weight_axes(plan.graph, node, index) is not None
        if is_weight and plan.graph.is_constant(tensor):
            plan.weight_at(node, index)
        else:
            plan.activation(node, tensor, along=last_axis(terms, result, index))
    # Without a sum the result is an elementwise product, and rounded like that of a Mul.
    sums = not set(result).issuperset("".join(terms))
    if plan.rounds_results(node) or not (len(node.inputs) == 2 and sums):
        plan.activation(node, node.outputs[0])
