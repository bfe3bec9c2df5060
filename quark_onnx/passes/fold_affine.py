"""Fold multiplications by and additions of constants into the layer before or after them.

Converters write a BatchNormalization as Mul and Add, and exporters write the normalization of an
image before the first layer. With F = diag(factor),

    F (W x + b) + shift = (F W) x + (F b + shift)
    W (F x + shift) + b = (W F) x + (b + W shift)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from quark_onnx.graph import Graph, Node
from quark_onnx.graph.constant_input import ConstantInput
from quark_onnx.graph.matching import alone_reads, only_reader
from quark_onnx.passes.base import register
from quark_onnx.patterns.conv_and_gemm import (
    SPATIAL,
    Layer,
    is_padded,
    reads_activation,
)

Doubles = NDArray[np.float64]
_ARITHMETIC = ("Mul", "Div", "Add", "Sub")
#: Greatest ratio of the factors of input channels. The input channels of a weight share its scale:
#: channels with small factors would have few codes.
_MOST_SPREAD = 2.0
#: Larger addends are masks, for which an Add has rules of its own.
_MASK = 1e4
#: Rank of an image, with batch and channels.
_IMAGE = 4


class _Step(NamedTuple):
    """An affine step ``x * factor + shift``, with arrays that broadcast against x."""

    x: str
    factor: Doubles
    shift: Doubles


@register
def fold_affine(graph: Graph) -> int:
    """Fold Mul, Div, Add and Sub with a constant into Conv, ConvTranspose, Gemm and MatMul.

    Not folded: an Add after a MatMul, which is its bias; a factor of a weight with other readers;
    the affine part of a normalization, which runtimes fuse with the normalization; a
    standardization of unlike quantities before a layer; and masks.
    """
    count = sum(
        _fold_into_layer_before(graph, node) for node in graph.nodes_of(_ARITHMETIC)
    )
    # From the last node: a chain of steps is folded into the layer after it one by one.
    backward = reversed(graph.nodes_of(_ARITHMETIC))
    return count + sum(_fold_into_layer_after(graph, node) for node in backward)


def _step_of(graph: Graph, node: Node) -> _Step | None:
    """Return the affine step of a node with one constant operand; None for other nodes."""
    left, right = node.inputs
    constant_is_right = graph.is_constant(right)
    if graph.is_constant(left) == constant_is_right:
        return None
    x, name = (left, right) if constant_is_right else (right, left)
    stored = graph.constant(name)
    if (
        stored is None
        or graph.elem_type(x) != TensorProto.FLOAT
        or _is_mask(node, stored)
    ):
        return None
    constant = stored.astype(np.float64)
    if node.kind == "Div":
        # constant / x is not affine.
        if not constant_is_right or not constant.all():
            return None
        return _Step(x, 1 / constant, np.zeros(1))
    if node.kind == "Mul":
        return _Step(x, constant, np.zeros(1))
    sign = np.ones(1) if constant_is_right or node.kind == "Add" else -np.ones(1)
    shift = -constant if constant_is_right and node.kind == "Sub" else constant
    return _Step(x, sign, shift)


def _is_mask(node: Node, constant: NDArray[Any]) -> bool:
    """Return whether a sum hides values by a very large constant, as masks of attention do."""
    return node.kind in ("Add", "Sub") and bool(
        np.abs(constant).max(initial=0) >= _MASK
    )


def _fold_into_layer_before(graph: Graph, node: Node) -> bool:
    """Fold a step into the layer before it, or into a MatMul and its bias."""
    step = _step_of(graph, node)
    if step is None or not alone_reads(graph, node, step.x):
        return False
    producer = graph.producer(step.x)
    if producer is None:
        return False
    layer = _layer_with_bias(graph, producer)
    if layer is None:
        return False
    channels = layer.outputs(graph)
    factor = _per_channel(graph, step.x, layer, channels, step.factor)
    shift = _per_channel(graph, step.x, layer, channels, step.shift)
    if factor is None or shift is None or not _can_scale_weight(graph, layer, factor):
        return False
    if producer is not layer.node:
        _fold_into_added_bias(graph, producer, factor, shift)
    elif not _fold_into_bias(graph, layer, factor, shift):
        return False
    shape = layer.shape(graph)
    _scale_weight(graph, layer, factor.reshape(*shape[:2], *[1] * (len(shape) - 2)))
    graph.remove([node])
    graph.set_output(producer, 0, node.outputs[0])
    return True


def _layer_with_bias(graph: Graph, node: Node) -> Layer | None:
    """Return the node as a layer; for an Add, return the MatMul before it if it adds a bias."""
    if node.kind != "Add":
        return Layer.of(graph, node)
    step = _step_of(graph, node)
    if step is None or not alone_reads(graph, node, step.x):
        return None
    matmul = graph.producer_of_kind(step.x, {"MatMul"})
    layer = None if matmul is None else Layer.of(graph, matmul)
    if layer is None or step.shift.shape != (layer.outputs(graph),):
        return None
    return layer


def _fold_into_added_bias(
    graph: Graph, add: Node, factor: Doubles, shift: Doubles
) -> None:
    """Fold a step into the bias that an Add after a MatMul adds."""
    index = 0 if graph.is_constant(add.inputs[0]) else 1
    bias = ConstantInput(add, index).value(graph)
    folded = (bias * factor + shift).astype(np.float32)
    name = graph.add_constant(f"{add.inputs[index]}_folded", folded)
    graph.set_input(add, index, name)


def _fold_into_bias(
    graph: Graph, layer: Layer, factor: Doubles, shift: Doubles
) -> bool:
    """Fold a step into the bias of a layer; return False if the layer cannot have the bias."""
    if layer.node.kind == "MatMul":
        return not shift.any()
    bias = layer.bias(graph)
    if bias is None:
        return False
    if layer.node.input(2) or shift.any():
        layer.set_bias(graph, bias * factor + shift, "folded")
    return True


def _fold_into_layer_after(graph: Graph, node: Node) -> bool:
    """Fold a step into the layer after it, which is its only reader."""
    result = node.outputs[0]
    step = _step_of(graph, node)
    reader = only_reader(graph, result)
    layer = None if reader is None else Layer.of(graph, reader)
    if step is None or layer is None or _ends_normalization(graph, node):
        return False
    if graph.is_output(result) or not reads_activation(layer.node, result):
        return False
    inputs = layer.groups * layer.shape(graph)[2]
    factor = _per_channel(graph, step.x, layer, inputs, step.factor)
    shift = _per_channel(graph, step.x, layer, inputs, step.shift)
    if factor is None or shift is None or not _can_scale_weight(graph, layer, factor):
        return False
    magnitudes = np.abs(factor)
    if magnitudes.max() > _MOST_SPREAD * magnitudes.min():
        return False
    if shift.any() and not _add_response_to_bias(graph, layer, shift):
        return False
    kernel_axes = [1] * (len(layer.shape(graph)) - 3)
    _scale_weight(graph, layer, factor.reshape(layer.groups, 1, -1, *kernel_axes))
    graph.set_input(layer.node, 0, step.x)
    graph.remove([node])
    return True


def _add_response_to_bias(graph: Graph, layer: Layer, shift: Doubles) -> bool:
    """Add ``W shift`` to the bias; return False if the layer cannot have the bias.

    Args:
        shift: values of the input channels, (inputs,).
    """
    # The shift is missing in the padding of zeros, which no bias can express at the border.
    if layer.node.kind != "Conv" or is_padded(layer.node):
        return False
    # The values of an image vary as much as their mean. Other quantities, such as kelvins, vary
    # little: products with the mean would magnify the rounding of the weight.
    if len(graph.sizes(layer.node.input(1))) < _IMAGE:
        return False
    bias = layer.bias(graph)
    if bias is None:
        return False
    weight = layer.weight(graph)
    inputs = shift.reshape(layer.groups, 1, -1, *[1] * (weight.ndim - 3))
    response = (weight * inputs).sum(axis=tuple(range(2, weight.ndim)))
    layer.set_bias(graph, bias + response.reshape(-1), "folded")
    return True


def _ends_normalization(graph: Graph, node: Node) -> bool:
    """Return whether a chain of affine steps starts at an operator on two computed tensors.

    Such a chain ends a decomposed LayerNorm, RMSNorm or Gelu.
    """
    producer: Node | None = node
    while producer is not None and (step := _step_of(graph, producer)) is not None:
        producer = graph.producer_of_kind(step.x, _ARITHMETIC)
    return producer is not None


def _can_scale_weight(graph: Graph, layer: Layer, factor: Doubles) -> bool:
    """Return whether all factors are 1, or are finite while no other node reads the weight.

    A scaled copy of a shared weight would make the model larger.
    """
    if not (factor != 1).any():
        return True
    is_shared = len(graph.consumers(layer.node.input(1))) > 1
    return bool(np.isfinite(factor).all()) and not is_shared


def _scale_weight(graph: Graph, layer: Layer, factor: Doubles) -> None:
    """Multiply a weight by factors that broadcast against ``Layer.weight``."""
    if (factor != 1).any():
        layer.set_weight(graph, layer.weight(graph) * factor, "folded")


def _per_channel(
    graph: Graph, x: str, layer: Layer, channels: int, constant: Doubles
) -> Doubles | None:
    """Return a constant as a vector of the channels of a tensor.

    None if it has more axes than the tensor, or varies along another axis than the channels.

    Args:
        x: name of the input or of the result of a layer.
        channels: number of channels of ``x``.
        constant: broadcasts against ``x``.
    """
    if constant.size == 1 and constant.ndim <= 1:
        return np.full(channels, constant.item())
    shape = graph.sizes(x)
    rank = len(shape)
    axis = 1 if layer.node.kind in SPATIAL else rank - 1
    # A single channel could be broadcast to the channels of the constant.
    if not rank or constant.ndim > rank or shape[axis] != channels:
        return None
    sizes = (1,) * (rank - constant.ndim) + constant.shape
    if sizes[axis] not in (1, channels) or constant.size != sizes[axis]:
        return None
    return np.broadcast_to(constant.reshape(-1), (channels,))
