"""Fuse a decomposed normalization, over the last axis or over images, into one operator.

The decomposed operators would be rounded one by one, the mean of squares among them, and each may
cause a compiler to leave the remaining model to the CPU: MobileViT falls into 49 subgraphs (XDNA1
study, 2026-07).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto

from quark_onnx.graph import Graph
from quark_onnx.graph.constant_input import ConstantInput
from quark_onnx.passes.base import register
from quark_onnx.patterns.norms import Norm, image_norms, norms

#: First opset with LayerNormalization.
_OPSET = 17


@register
def fuse_layer_norm(graph: Graph) -> int:
    """Replace ReduceMean, Sub, Pow, Sqrt and Div by LayerNormalization."""
    if graph.opset < _OPSET:
        return 0
    return sum(
        _replace(graph, norm, "LayerNormalization", -1, axis=-1)
        for norm in norms(graph)
    )


@register
def whole_image_norms(graph: Graph) -> int:
    """Replace decomposed normalizations over images by InstanceNormalization.

    TensorFlow's converters write them.
    """
    return sum(
        _replace(graph, norm, "InstanceNormalization", 1) for norm in image_norms(graph)
    )


def _replace(
    graph: Graph, norm: Norm, kind: str, channels: int, **attributes: Any
) -> bool:
    """Replace a decomposed normalization by an operator; return False if it must stay.

    Args:
        channels: axis of scale and shift.
    """
    last = graph.producer(norm.result)
    width = _width(graph, norm, channels)
    if last is None or width is None:
        return False
    scale = _vector(graph, norm.scale, width, 1)
    inputs = [*norm.sources, graph.add_constant(f"{norm.name}_scale", scale)]
    # InstanceNormalization requires a shift.
    if norm.shift is not None or kind == "InstanceNormalization":
        shift = _vector(graph, norm.shift, width, 0)
        inputs.append(graph.add_constant(f"{norm.name}_shift", shift))
    # Only the node with the result: the others become unused, and are dropped later.
    graph.remove([last])
    graph.add(
        kind,
        inputs,
        [norm.result],
        name=norm.name,
        epsilon=norm.epsilon,
        **attributes,
    )
    return True


def _width(graph: Graph, norm: Norm, channels: int) -> int | None:
    """Return the number of channels; None if an operator cannot compute the normalization."""
    # An operator has no bare tensor, and is fused already.
    if not norm.bare or not norm.centered:
        return None
    [source] = norm.sources
    shape = graph.sizes(source)
    if not shape or graph.elem_type(source) != TensorProto.FLOAT:
        return None
    width = shape[channels]
    if not isinstance(width, int) or not width:
        return None
    # A constant of higher rank would broadcast the result.
    if shape != graph.shape(norm.result):
        return None
    # Scale and shift may hold one value for all channels.
    for stored in (norm.scale, norm.shift):
        if stored is not None and not _fits(graph, stored, width):
            return None
    return width


def _fits(graph: Graph, stored: ConstantInput, width: int) -> bool:
    """Return whether a constant has a value per channel; declared shapes may be wrong."""
    return stored.spread(graph, width) and stored.value(graph).size in (1, width)


def _vector(
    graph: Graph, stored: ConstantInput | None, width: int, default: float
) -> np.ndarray:
    if stored is None:
        values = np.full(1, default)
    else:
        values = stored.value(graph).reshape(-1)
    # Both operators require one value per channel: shape (width,).
    return np.broadcast_to(values, (width,)).astype(np.float32)
