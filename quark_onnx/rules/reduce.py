"""Plan the tensors of sums, means and norms, with separate scales for the results."""

from __future__ import annotations

from quark_onnx.graph import Node
from quark_onnx.plan import PlanBuilder
from quark_onnx.rules.base import is_control_tensor, kept_before_root, rule


@rule("ReduceMean", "ReduceSum", "ReduceL1", "ReduceL2", "ReduceSumSquare", "CumSum")
def reduction(node: Node, plan: PlanBuilder) -> None:
    """Quantize input and result, unless the input is a mask or the result a denominator."""
    if is_control_tensor(node, plan, node.inputs[0]) or kept_before_root(node, plan):
        return
    # A scale of its own: a mean has a smaller range than its input, a sum a larger one.
    plan.activation(node, node.inputs[0], node.outputs[0])
