"""Remove operators that hand their input on unchanged."""

from __future__ import annotations

from quark_onnx.graph import Graph, Node
from quark_onnx.passes.base import register


@register
def remove_identity(graph: Graph) -> int:
    """Remove Identity, Dropout outside training, and Cast to the type that a tensor has already."""
    return sum(graph.bypass(node) for node in graph.nodes if _hands_on(graph, node))


def _hands_on(graph: Graph, node: Node) -> bool:
    if node.kind == "Identity":
        return (
            graph.elem_type(node.inputs[0]) != 0
        )  # sequences and optionals have no element type: not ours to judge
    if node.kind == "Dropout":
        training = graph.constant(node.input(2)) if node.input(2) else False
        mask_read = any(
            name and (graph.consumers(name) or graph.is_output(name))
            for name in node.outputs[1:]
        )
        return training is not None and not training and not mask_read
    if node.kind == "Cast":
        return bool(node.attribute("to") == graph.elem_type(node.inputs[0]))
    return False
