"""The plan as text that a person reads: each node with what becomes of its tensors."""

from __future__ import annotations

from calibrators.shown import printable
from quark_onnx.graph import Node
from quark_onnx.plan.entries import Keep, Use
from quark_onnx.plan.plan import Plan


def explain(plan: Plan) -> str:
    """One paragraph for each node: its name and type, then its inputs (<), outputs (>) and their
    decisions.
    """
    return "\n".join(_paragraph(plan, node) for node in plan.graph.nodes)


def _paragraph(plan: Plan, node: Node) -> str:
    reason = plan.kept.get(node.name)
    lines = [
        f"{printable(node.name)} ({printable(node.kind)})"
        + (f"  float: {reason}" if reason else ""),
    ]
    for sign, tensors in (("<", node.inputs), (">", node.outputs)):
        for tensor in filter(None, tensors):
            use = plan.use(tensor, node) if sign == "<" else Use(tensor)
            entry = plan.entries.get(use)
            root = plan.entry(use)
            if entry is not None:
                lines.append(
                    f"  {sign} {printable(tensor)}:"
                    f" {printable(str(root if isinstance(root, Keep) else entry))}",
                )
    return "\n".join(lines)
