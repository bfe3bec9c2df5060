"""Print the plan: nodes with the decisions for their tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from calibrators.shown import printable
from quark_onnx.graph import Node
from quark_onnx.plan.entries import Keep, Use

if TYPE_CHECKING:
    from quark_onnx.plan.plan import Plan


def explain(plan: Plan) -> str:
    """Return a paragraph per node: name and type, inputs (<), outputs (>), decisions."""
    return "\n".join(_paragraph(plan, node) for node in plan.graph.nodes)


def _paragraph(plan: Plan, node: Node) -> str:
    title = f"{printable(node.name)} ({printable(node.kind)})"
    reason = plan.kept.get(node.name)
    if reason:
        title += f"  float: {reason}"
    uses = [("<", tensor, plan.use(tensor, node)) for tensor in node.operands]
    uses += [(">", tensor, Use(tensor)) for tensor in node.results]
    lines = [title]
    for sign, tensor, use in uses:
        entry = plan.entries.get(use)
        if entry is None:
            continue
        root = plan.entry(use)
        text = str(root if isinstance(root, Keep) else entry)
        lines.append(f"  {sign} {printable(tensor)}: {printable(text)}")
    return "\n".join(lines)
