"""Fold BatchNormalization into the Conv, ConvTranspose or Gemm before it.

``y = (W x + b - mean) * gamma / sqrt(var + epsilon) + beta`` is a layer with the weight
``W * factor`` and the bias ``(b - mean) * factor + beta``, where
``factor = gamma / sqrt(var + epsilon)`` for each output channel.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from quark_onnx.graph import Graph, Node
from quark_onnx.graph.pattern import op
from quark_onnx.passes.base import register, rewrite_each
from quark_onnx.patterns.conv_and_gemm import Layer, unscaled

Doubles = NDArray[np.float64]
#: Another reader of the layer would get the normalized result.
_NORMALIZED_LAYER = op("BatchNormalization", op({"Conv", "ConvTranspose", "Gemm"}))


@register
def fold_batch_norm(graph: Graph) -> int:
    """Fold BatchNormalization into a producer with constant weights and no other reader."""
    return rewrite_each(graph, _fold, "BatchNormalization")


def inference_parameters(graph: Graph, norm: Node) -> list[Doubles] | None:
    """Return scale, shift, mean and variance of a BatchNormalization, of shape (channels,).

    None if one of them is computed, or the node is in training mode.
    """
    # In training mode the statistics are those of the batch.
    if norm.attribute("training_mode", 0) or any(norm.outputs[1:]):
        return None
    parameters = [graph.constant(name) for name in norm.inputs[1:5]]
    # float64, as differences of the parameters cancel
    arrays = [array.astype(np.float64) for array in parameters if array is not None]
    return arrays if len(arrays) == 4 else None


def _fold(graph: Graph, norm: Node) -> bool:
    match = _NORMALIZED_LAYER.match(graph, norm.outputs[0])
    parameters = inference_parameters(graph, norm)
    if match is None or parameters is None:
        return False
    layer = match.nodes[1]
    gamma, beta, mean, variance = parameters
    if graph.elem_type(layer.input(1)) != TensorProto.FLOAT:
        return False
    # A missing bias counts as 0, and is created below.
    bias = graph.optional_constant(layer.input(2), np.zeros(1))
    if graph.constant(layer.input(1)) is None or bias is None:
        return False
    # alpha and beta of a Gemm would scale the folded constants once more.
    if layer.kind == "Gemm" and (not unscaled(layer) or bias.ndim != 1):
        return False
    factor = gamma / np.sqrt(variance + norm.attribute("epsilon", 1e-5))
    # A variance and an epsilon of 0 divide by zero.
    if not np.isfinite(factor).all():
        return False

    # With outputs in front, one factor per output fits Conv, ConvTranspose and Gemm alike.
    stored = Layer.stored(layer)
    weight = stored.weight(graph)
    by_output = factor.reshape(*weight.shape[:2], *[1] * (weight.ndim - 2))
    stored.set_weight(graph, weight * by_output, "folded")
    folded_bias = (bias.astype(np.float64) - mean) * factor + beta
    stored.set_bias(graph, folded_bias, "folded")
    # The layer takes over the name of the result, which readers and outputs use.
    graph.remove([norm])
    graph.set_output(layer, 0, norm.outputs[0])
    return True
