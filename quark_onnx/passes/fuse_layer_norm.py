"""Write a normalization that comes in parts, over the last axis or over images, as the one operator
that it is.

Its parts would be rounded one by one, the mean of squares among them, and each is a chance for a
compiler to leave the rest of the model to the CPU: MobileViT falls into 49 pieces (XDNA1 study,
2026-07).
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
    """Make a LayerNormalization of every one that is written with ReduceMean, Sub, Pow, Sqrt and
    Div.
    """
    if graph.opset < _OPSET:
        return 0
    return sum(
        _replace(graph, norm, "LayerNormalization", -1, axis=-1)
        for norm in norms(graph)
    )


@register
def whole_image_norms(graph: Graph) -> int:
    """Make an InstanceNormalization of every one over images that is written so, as TensorFlow's
    converters do.
    """
    return sum(
        _replace(graph, norm, "InstanceNormalization", 1) for norm in image_norms(graph)
    )


def _replace(
    graph: Graph,
    norm: Norm,
    kind: str,
    channels: int,
    **attributes: Any,
) -> bool:
    """Put an operator in the place of the parts.

    Args:
        channels: the axis along which scale and shift lie.
    """
    if not (norm.bare and norm.centered):
        return False
    [source] = norm.sources
    last, shape = graph.producer(norm.result), graph.shape(source)
    width = shape[channels] if shape else None
    if (
        last is None
        or not isinstance(width, int)
        or not width
        or graph.elem_type(source) != TensorProto.FLOAT
    ):
        return False
    if shape != graph.shape(norm.result):  # a constant of more axes adds some
        return False
    if any(
        each is not None and not _fits(graph, each, width)
        for each in (norm.scale, norm.shift)
    ):
        return False
    inputs = [
        source,
        graph.add_constant(f"{norm.name}_scale", _vector(graph, norm.scale, width, 1)),
    ]
    if (
        norm.shift is not None or kind == "InstanceNormalization"
    ):  # which has to have one
        inputs.append(
            graph.add_constant(
                f"{norm.name}_shift",
                _vector(graph, norm.shift, width, 0),
            ),
        )
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


def _fits(graph: Graph, stored: ConstantInput, width: int) -> bool:
    """Whether there is one value for each channel.

    The shape of a result is what the model declares, right or wrong.
    """
    return stored.spread(graph, width) and stored.value(graph).size in (1, width)


def _vector(
    graph: Graph,
    stored: ConstantInput | None,
    width: int,
    default: float,
) -> np.ndarray:
    found = np.full(1, default) if stored is None else stored.value(graph).reshape(-1)
    return np.broadcast_to(found, (width,)).astype(np.float32)
