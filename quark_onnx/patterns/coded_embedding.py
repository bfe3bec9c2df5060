"""Find EmbedLayerNormalizations that QEmbedLayerNormalization computes on codes of constants."""

from __future__ import annotations

from quark_onnx.graph import Graph, Node

#: Tables of words, positions and segments, after two inputs with indices.
TABLES = (2, 3, 4)
#: Scale and bias of the normalization.
PARAMETERS = (5, 6)
MASK = 7
_POSITIONS = 8


def has_coded_form(graph: Graph, node: Node) -> bool:
    """Return whether the operator on codes has the inputs and outputs of a node."""
    # It has no input for positions, and no output for the sum.
    if node.input(_POSITIONS) or any(node.outputs[2:]):
        return False
    # It always writes the index of the mask.
    if not node.input(MASK) or node.attribute("mask_index_type", 1) == 1:
        return True
    index = node.outputs[1]
    return not graph.consumers(index) and not graph.is_output(index)
