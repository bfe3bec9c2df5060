"""Fold what asks for the shape of a tensor, where that is known."""

from __future__ import annotations

import math

import numpy as np

from quark_onnx.graph import Graph, Node


def fold_shapes(graph: Graph) -> int:
    """Turn each Shape and Size of a tensor with known dimensions into a constant."""
    return sum(_fold(graph, node) for node in graph.nodes if node.kind in ("Shape", "Size"))


def _fold(graph: Graph, node: Node) -> bool:
    shape, result = graph.shape(node.inputs[0]), node.outputs[0]
    dims = [dim for dim in shape or () if isinstance(dim, int)]
    if shape is None or len(dims) < len(shape) or graph.is_output(result):
        return False
    asked = dims[node.attribute("start", 0) : node.attribute("end")]
    graph.remove([node])
    graph.set_constant(result, np.array(asked if node.kind == "Shape" else math.prod(dims), np.int64))
    return True
