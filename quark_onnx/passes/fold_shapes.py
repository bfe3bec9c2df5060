"""Fold the shapes of tensors with static sizes."""

from __future__ import annotations

import numpy as np

from quark_onnx.graph import Graph, Node
from quark_onnx.graph.shapes import known_sizes
from quark_onnx.passes.base import register, rewrite_each


@register
def fold_shapes(graph: Graph) -> int:
    """Replace every Shape and Size with a known result by a constant."""
    return rewrite_each(graph, _fold, "Shape", "Size")


def _fold(graph: Graph, node: Node) -> bool:
    shape = graph.shape(node.inputs[0])
    if shape is None or graph.is_output(node.outputs[0]):
        return False
    # Only a Shape has these attributes.
    start = node.attribute("start", 0)
    end = node.attribute("end")
    # Only the sizes in the slice must be static, not those of the whole tensor.
    sizes = known_sizes(shape[start:end])
    if sizes is None:
        return False
    value = np.array(sizes, np.int64)
    if node.kind == "Size":
        value = np.array(np.prod(value), np.int64)
    graph.remove([node])
    graph.set_constant(node.outputs[0], value)
    return True
