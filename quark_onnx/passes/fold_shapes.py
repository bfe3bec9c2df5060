"""Fold the shapes of tensors with static sizes."""

from __future__ import annotations

import numpy as np

from quark_onnx.containers import of_type
from quark_onnx.graph import Graph, Node
from quark_onnx.passes.base import register


@register
def fold_shapes(graph: Graph) -> int:
    """Replace every Shape and Size with a known result by a constant."""
    return sum(
        _fold(graph, node) for node in graph.nodes if node.kind in ("Shape", "Size")
    )


def _fold(graph: Graph, node: Node) -> bool:
    shape = graph.shape(node.inputs[0])
    if shape is None or graph.is_output(node.outputs[0]):
        return False
    start = node.attribute("start", 0)
    end = node.attribute("end")
    dims = shape[start:end] if node.kind == "Shape" else shape
    sizes = of_type(dims, int)
    if len(sizes) < len(dims):
        return False
    value = np.array(sizes, np.int64)
    if node.kind == "Size":
        value = np.array(np.prod(value), np.int64)
    graph.remove([node])
    graph.set_constant(node.outputs[0], value)
    return True
