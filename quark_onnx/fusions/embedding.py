"""Look up the codes of embeddings by QEmbedLayerNormalization."""

from __future__ import annotations

from quark_onnx.fusions.base import (
    CONTRIB,
    code_type,
    grid,
    one_scale,
    stored_codes,
)
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.codes import BYTES
from quark_onnx.patterns.coded_embedding import (
    MASK,
    PARAMETERS,
    TABLES,
    has_coded_form,
)


def q_embed_layer_normalization(graph: Graph, node: Node) -> bool:
    """Replace an EmbedLayerNormalization whose constants have codes with one scale each."""
    if not has_coded_form(graph, node):
        return False
    codes, scales, zero_points = list[str](), list[str](), list[str]()
    types = set[int]()
    for index in (*TABLES, *PARAMETERS):
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
    inputs = [*indices, *codes, node.input(MASK), *scales, *zero_points]
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
