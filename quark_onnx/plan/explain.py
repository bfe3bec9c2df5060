"""Print the plan: nodes with the decisions for their tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
    inputs = _decisions(plan, "<", plan.reads(node))
    outputs = _decisions(plan, ">", map(Use, node.results))
    return "\n".join((title, *inputs, *outputs))


def _decisions(plan: Plan, sign: str, uses: Iterable[Use]) -> Iterator[str]:
    """Yield a line per use with a decision; a tensor kept float at the root is shown float.

    Args:
        sign: "<" for inputs, ">" for outputs.
    """
    for use in uses:
        entry = plan.entries.get(use)
        # A tensor that nothing asked for is float, and has no line.
        if entry is not None:
            root = plan.entry(use)
            text = str(root if isinstance(root, Keep) else entry)
            yield f"  {sign} {printable(use.tensor)}: {printable(text)}"
