"""Remove identity operators."""

from __future__ import annotations

from quark_onnx.graph import Graph, Node
from quark_onnx.passes.base import register


@register
def remove_identity(graph: Graph) -> int:
    """Remove Identity, Dropout outside training, and Cast to the present type."""
    return sum(graph.bypass(node) for node in graph.nodes if _is_identity(graph, node))


def _is_identity(graph: Graph, node: Node) -> bool:
    if node.kind == "Identity":
        # Sequences and optionals have no element type, and are left alone.
        return graph.elem_type(node.inputs[0]) != 0
    if node.kind == "Dropout":
        training = graph.optional_constant(node.input(2), False)
        mask_read = any(
            name and (graph.consumers(name) or graph.is_output(name))
            for name in node.outputs[1:]
        )
        return training is not None and not training and not mask_read
    if node.kind == "Cast":
        return bool(node.attribute("to") == graph.elem_type(node.inputs[0]))
    return False
