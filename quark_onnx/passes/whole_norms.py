"""Write a normalization that comes in parts as the one operator that it is.

Its parts would be rounded one by one, the mean of squares among them, and each is a chance for a compiler to leave the
rest of the model to the CPU: MobileViT falls into 49 pieces (XDNA1 study, 2026-07).
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from quark_onnx.graph import Graph
from quark_onnx.graph.norms import Norm, norms
from quark_onnx.graph.stored import Stored
from quark_onnx.passes.base import register

#: First opset with LayerNormalization.
_OPSET = 17


@register
def whole_norms(graph: Graph) -> int:
    """Make a LayerNormalization of every one that is written with ReduceMean, Sub, Pow, Sqrt and Div."""
    if graph.opset < _OPSET:
        return 0
    return sum(_replace(graph, norm) for norm in norms(graph) if norm.bare and norm.centered)


def _replace(graph: Graph, norm: Norm) -> bool:
    [source] = norm.sources
    last = graph.producer(norm.result)
    width = (graph.shape(source) or (None,))[-1]
    if last is None or not isinstance(width, int) or not width or graph.elem_type(source) != TensorProto.FLOAT:
        return False
    if graph.shape(source) != graph.shape(norm.result):  # a constant of more axes adds some
        return False
    if any(each is not None and not each.spread(graph, width) for each in (norm.scale, norm.shift)):
        return False
    vectors = [_vector(graph, stored, width) for stored in (norm.scale, norm.shift)]
    scale = vectors[0] if vectors[0] is not None else np.ones(width, np.float32)
    names = [graph.add_constant(f"{norm.name}_scale", scale)]
    if vectors[1] is not None:
        names.append(graph.add_constant(f"{norm.name}_shift", vectors[1]))
    graph.remove([last])
    inputs = [source, *names]
    graph.add("LayerNormalization", inputs, [norm.result], name=norm.name, axis=-1, epsilon=norm.epsilon)
    return True


def _vector(graph: Graph, stored: Stored | None, width: int) -> np.ndarray | None:
    if stored is None:
        return None
    return np.broadcast_to(stored.value(graph), (width,)).astype(np.float32)
