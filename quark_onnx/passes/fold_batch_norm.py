"""Fold BatchNormalization into the Conv, ConvTranspose or Gemm before it.

``y = (W x + b - mean) * gamma / sqrt(var + epsilon) + beta`` is a layer with the weight
``W * factor`` and the bias ``(b - mean) * factor + beta``, where
``factor = gamma / sqrt(var + epsilon)`` for each output channel.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from quark_onnx.graph import Graph, Node
from quark_onnx.passes.base import register
from quark_onnx.patterns.conv_and_gemm import Layer, unscaled


@register
def fold_batch_norm(graph: Graph) -> int:
    """Fold BatchNormalization into a producer with constant weights and no other reader."""
    return sum(
        _fold(graph, node) for node in graph.nodes if node.kind == "BatchNormalization"
    )


def _fold(graph: Graph, norm: Node) -> bool:
    source = norm.inputs[0]
    layer = graph.producer(source)
    parameters = [graph.constant(name) for name in norm.inputs[1:5]]
    if layer is None or any(value is None for value in parameters):
        return False
    if layer.kind not in ("Conv", "ConvTranspose", "Gemm"):
        return False
    # Another reader of the layer would get the normalized result.
    only_reader = graph.consumers(source) == [norm] and not graph.is_output(source)
    training = norm.attribute("training_mode", 0) or any(norm.outputs[1:])
    if (
        not only_reader
        or training
        or graph.elem_type(layer.input(1)) != TensorProto.FLOAT
    ):
        return False
    bias = graph.optional_constant(layer.input(2), np.zeros(1))
    if graph.constant(layer.input(1)) is None or bias is None:
        return False
    # alpha and beta of a Gemm would scale the folded constants once more.
    scaled = layer.kind == "Gemm" and not (unscaled(layer) and bias.ndim == 1)
    gamma, beta, mean, variance = (
        np.asarray(value, np.float64) for value in parameters
    )
    factor = gamma / np.sqrt(variance + norm.attribute("epsilon", 1e-5))
    if scaled or not np.isfinite(factor).all():
        return False

    # With outputs in front, one factor per output fits Conv, ConvTranspose and Gemm alike.
    stored = Layer.stored(layer)
    weight = stored.weight(graph)
    stored.set_weight(
        graph,
        weight
        * factor.reshape(
            *weight.shape[:2],
            *[1] * (weight.ndim - 2),
        ),
        "folded",
    )
    stored.set_bias(
        graph,
        (bias.astype(np.float64) - mean) * factor + beta,
        "folded",
    )
    graph.remove([norm])
    graph.set_output(layer, 0, norm.outputs[0])
    return True
