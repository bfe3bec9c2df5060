"""Look up the codes of embeddings by QEmbedLayerNormalization."""

from __future__ import annotations

from quark_onnx.fusions.base import (
    BYTES,
    CONTRIB,
    code_type,
    grid,
    one_scale,
    stored_codes,
)
from quark_onnx.graph import Graph, Node

#: Tables of words, positions and segments, then scale and bias of the normalization.
_CONSTANTS = (2, 3, 4, 5, 6)
_MASK, _POSITIONS = 7, 8


def q_embed_layer_normalization(graph: Graph, node: Node) -> bool:
    """Replace an EmbedLayerNormalization whose constants have codes with one scale each."""
    if node.input(_POSITIONS) or any(node.outputs[2:]):
        return False
    # The operator writes the index of the mask only.
    if node.attribute("mask_index_type", 1) != 1:
        return False
    codes, scales, zero_points = [], [], []
    types = set[int]()
    for index in _CONSTANTS:
        # Segments are optional.
        if not node.input(index):
            for names in (codes, scales, zero_points):
                names.append("")
            continue
        stored = stored_codes(graph, node.input(index))
        if stored is None or stored.block_size or not one_scale(graph, stored):
            return False
        types.add(code_type(graph, stored))
        scale, zero_point = grid(graph, stored)
        codes.append(stored.codes)
        scales.append(scale)
        zero_points.append(zero_point)
    if len(types) > 1 or not types <= BYTES:
        return False
    indices = [node.input(0), node.input(1)]
    inputs = [*indices, *codes, node.input(_MASK), *scales, *zero_points]
    outputs, epsilon = list(node.outputs), node.attribute("epsilon", 1e-12)
    graph.remove([node])
    graph.import_domain(CONTRIB)
    graph.add(
        "QEmbedLayerNormalization",
        inputs,
        outputs,
        name=node.name,
        domain=CONTRIB,
        epsilon=epsilon,
    )
    return True
