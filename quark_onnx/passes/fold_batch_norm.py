"""Fold BatchNormalization into the Conv, ConvTranspose or Gemm before it.

``y = (W x + b - mean) * gamma / sqrt(var + epsilon) + beta`` is a layer with the weight ``W * factor`` and the bias
``(b - mean) * factor + beta``, where ``factor = gamma / sqrt(var + epsilon)`` for each output channel.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from quark_onnx.graph import Graph, Node
from quark_onnx.passes.base import register


@register
def fold_batch_norm(graph: Graph) -> int:
    """Fold every BatchNormalization in inference mode whose producer has constant weights and no other reader."""
    return sum(_fold(graph, node) for node in graph.nodes if node.kind == "BatchNormalization")


def _fold(graph: Graph, norm: Node) -> bool:
    source = norm.inputs[0]
    layer = graph.producer(source)
    if layer is None or layer.kind not in ("Conv", "ConvTranspose", "Gemm"):
        return False
    alone = graph.consumers(source) == [norm] and not graph.is_output(source)
    training = norm.attribute("training_mode", 0) or any(norm.outputs[1:])
    if not alone or training or graph.elem_type(layer.input(1)) != TensorProto.FLOAT:
        return False
    parameters = [graph.constant(name) for name in norm.inputs[1:5]]
    weight = graph.constant(layer.input(1))
    bias = graph.constant(layer.input(2)) if layer.input(2) else np.zeros(1)
    if weight is None or bias is None or any(value is None for value in parameters):
        return False
    if layer.kind == "Gemm" and not _plain_gemm(layer, bias):
        return False
    gamma, beta, mean, variance = (np.asarray(value, np.float64) for value in parameters)
    factor = gamma / np.sqrt(variance + norm.attribute("epsilon", 1e-5))
    if not np.isfinite(factor).all():
        return False

    name = graph.add_constant(f"{layer.input(1)}_folded", _scaled(layer, weight, factor).astype(np.float32))
    graph.set_input(layer, 1, name)
    folded_bias = ((bias.astype(np.float64) - mean) * factor + beta).astype(np.float32)
    name = graph.add_constant(f"{layer.input(2) or layer.name + '_bias'}_folded", folded_bias)
    if len(layer.inputs) < 3:
        graph.append_input(layer, name)
    else:
        graph.set_input(layer, 2, name)
    graph.remove([norm])
    graph.set_output(layer, 0, norm.outputs[0])
    return True


def _plain_gemm(layer: Node, bias: NDArray[np.float64]) -> bool:
    return layer.attribute("alpha", 1.0) == 1.0 and layer.attribute("beta", 1.0) == 1.0 and bias.ndim == 1


def _scaled(layer: Node, weight: NDArray[np.float32], factor: NDArray[np.float64]) -> NDArray[np.float64]:
    """The weight with each output channel multiplied by its factor."""
    if layer.kind == "Conv" or (layer.kind == "Gemm" and layer.attribute("transB", 0)):  # (M, ...)
        return weight * factor.reshape(-1, *[1] * (weight.ndim - 1))
    if layer.kind == "Gemm":  # (K, M)
        return weight * factor
    groups = layer.attribute("group", 1)  # ConvTranspose: (C, M / groups, ...), where C runs over the groups
    parts = weight.reshape(groups, -1, *weight.shape[1:])
    return (parts * factor.reshape(groups, 1, -1, *[1] * (weight.ndim - 2))).reshape(weight.shape)
