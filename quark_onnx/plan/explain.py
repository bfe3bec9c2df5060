"""The plan as text that a person reads: each node with what becomes of its tensors."""

from __future__ import annotations

from quark_onnx.graph import Node
from quark_onnx.plan.entries import Keep, Use
from quark_onnx.plan.plan import Plan


def explain(plan: Plan) -> str:
    """One paragraph for each node: its name and type, then its inputs (<), outputs (>) and their decisions."""
    return "\n".join(_paragraph(plan, node) for node in plan.graph.nodes)


def _shown(name: str) -> str:
    """A name as it may be printed: what would move the cursor or end the line is written as an escape."""
    return name if name.isprintable() else name.encode("unicode_escape").decode()


def _paragraph(plan: Plan, node: Node) -> str:
    reason = plan.kept.get(node.name)
    lines = [f"{_shown(node.name)} ({_shown(node.kind)})" + (f"  float: {reason}" if reason else "")]
    for sign, tensors in (("<", node.inputs), (">", node.outputs)):
        for tensor in filter(None, tensors):
            use = plan.use(tensor, node) if sign == "<" else Use(tensor)
            entry = plan.entries.get(use)
            root = plan.entry(use)
            if entry is not None:
                lines.append(f"  {sign} {_shown(tensor)}: {_shown(str(root if isinstance(root, Keep) else entry))}")
    return "\n".join(lines)
