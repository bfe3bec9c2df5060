"""Fold multiplications by and additions of constants into the layer before or after them.

Converters write a BatchNormalization as Mul and Add, and exporters write the normalization of an
image in front of the first layer. ``(W x + b) * factor + shift`` is a layer with the weight
``W * factor`` and the bias ``b * factor + shift``; ``W (x * factor + shift) + b`` is one with the
weight ``W * factor`` and the bias ``b + W shift``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from quark_onnx.graph import Graph, Node
from quark_onnx.graph.constant_input import ConstantInput
from quark_onnx.graph.matching import only_reader
from quark_onnx.passes.base import register
from quark_onnx.patterns.conv_and_gemm import SPATIAL, Layer, reads_activation

Doubles = NDArray[np.float64]
_ARITHMETIC = ("Mul", "Div", "Add", "Sub")
#: Most by which factors of input channels may differ. The inputs of a weight share its scale: those
#: with small factors would have no codes left.
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

    An Add after a MatMul stays, as its bias. Shared weights stay as they are, and so does the
    affine part of a normalization, which runtimes fuse with the normalization. A standardization
    of unlike quantities stays in front of a layer, as do masks.
    """
    count = sum(_fold_behind(graph, node) for node in graph.nodes_of(_ARITHMETIC))
    # Backward, so that the layer comes nearer with each step that is folded.
    steps = reversed(graph.nodes_of(_ARITHMETIC))
    return count + sum(_fold_in_front(graph, node) for node in steps)


def _step_of(graph: Graph, node: Node) -> _Step | None:
    """Return the affine step of a node with one constant operand; None for other nodes."""
    left, right = graph.constant(node.inputs[0]), graph.constant(node.inputs[1])
    if (left is None) == (right is None):
        return None
    is_right = right is not None
    x = node.inputs[0] if is_right else node.inputs[1]
    stored = right if right is not None else left
    if (
        stored is None
        or graph.elem_type(x) != TensorProto.FLOAT
        or _is_mask(node, stored)
    ):
        return None
    constant = stored.astype(np.float64)
    if node.kind == "Div":
        # A computed divisor is no factor.
        if not is_right or not constant.all():
            return None
        return _Step(x, 1 / constant, np.zeros(1))
    if node.kind == "Mul":
        return _Step(x, constant, np.zeros(1))
    sign = np.ones(1) if is_right or node.kind == "Add" else -np.ones(1)
    shift = -constant if is_right and node.kind == "Sub" else constant
    return _Step(x, sign, shift)


def _is_mask(node: Node, constant: NDArray[Any]) -> bool:
    return node.kind in ("Add", "Sub") and bool(
        np.abs(constant).max(initial=0) >= _MASK
    )


def _fold_behind(graph: Graph, node: Node) -> bool:
    """Fold a step into the layer, or into the MatMul and its bias, before it."""
    step = _step_of(graph, node)
    if step is None or not _only_read_by(graph, step.x, node):
        return False
    last = graph.producer(step.x)
    layer = None if last is None else _layer_with_bias(graph, last)
    if last is None or layer is None:
        return False
    channels = layer.outputs(graph)
    factor = _by_channel(graph, step.x, layer, channels, step.factor)
    shift = _by_channel(graph, step.x, layer, channels, step.shift)
    if factor is None or shift is None or not _may_scale(graph, layer, factor):
        return False
    if last is not layer.node:
        _change_addend(graph, last, factor, shift)
    elif not _change_bias(graph, layer, factor, shift):
        return False
    shape = layer.shape(graph)
    by_output = factor.reshape(*shape[:2], *[1] * (len(shape) - 2))
    _multiply_weight(graph, layer, by_output)
    graph.remove([node])
    graph.set_output(last, 0, node.outputs[0])
    return True


def _layer_with_bias(graph: Graph, last: Node) -> Layer | None:
    """Return the layer that a node is, or the MatMul whose bias a node adds."""
    if last.kind != "Add":
        return Layer.of(graph, last)
    step = _step_of(graph, last)
    if step is None or not _only_read_by(graph, step.x, last):
        return None
    product = graph.producer_of_kind(step.x, {"MatMul"})
    layer = None if product is None else Layer.of(graph, product)
    if layer is None or step.shift.shape != (layer.outputs(graph),):
        return None
    return layer


def _change_addend(graph: Graph, last: Node, factor: Doubles, shift: Doubles) -> None:
    """Fold a step into the bias that an Add after a MatMul adds."""
    place = 0 if graph.is_constant(last.inputs[0]) else 1
    addend = ConstantInput(last, place).value(graph)
    changed = (addend * factor + shift).astype(np.float32)
    name = graph.add_constant(f"{last.inputs[place]}_folded", changed)
    graph.set_input(last, place, name)


def _change_bias(graph: Graph, layer: Layer, factor: Doubles, shift: Doubles) -> bool:
    """Fold a step into the bias of a layer; return False where it can have none."""
    if layer.node.kind == "MatMul":
        return not shift.any()
    bias = layer.bias(graph)
    if bias is None:
        return False
    if layer.node.input(2) or shift.any():
        layer.set_bias(graph, bias * factor + shift, "folded")
    return True


def _fold_in_front(graph: Graph, node: Node) -> bool:
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
    factor = _by_channel(graph, step.x, layer, inputs, step.factor)
    shift = _by_channel(graph, step.x, layer, inputs, step.shift)
    if factor is None or shift is None or not _may_scale(graph, layer, factor):
        return False
    sizes = np.abs(factor)
    if sizes.max() > _MOST_SPREAD * sizes.min():
        return False
    if shift.any() and not _shift_bias(graph, layer, shift):
        return False
    kernel_axes = [1] * (len(layer.shape(graph)) - 3)
    _multiply_weight(graph, layer, factor.reshape(layer.groups, 1, -1, *kernel_axes))
    graph.set_input(layer.node, 0, step.x)
    graph.remove([node])
    return True


def _shift_bias(graph: Graph, layer: Layer, shift: Doubles) -> bool:
    """Add the response to constant inputs to the bias; return False where there is none.

    Args:
        shift: values of the input channels, (inputs,).
    """
    # Padding adds zeros, which no bias imitates at the border.
    if layer.node.kind != "Conv" or _pads(layer.node):
        return False
    # The values of an image vary as much as their mean. Other quantities, as a temperature in
    # kelvins, vary little: products with the mean would magnify the rounding of the weight.
    if len(graph.sizes(layer.node.input(1))) < _IMAGE:
        return False
    bias = layer.bias(graph)
    if bias is None:
        return False
    weight = layer.weight(graph)
    by_input = shift.reshape(layer.groups, 1, -1, *[1] * (weight.ndim - 3))
    response = (weight * by_input).sum(axis=tuple(range(2, weight.ndim)))
    layer.set_bias(graph, bias + response.reshape(-1), "folded")
    return True


def _pads(node: Node) -> bool:
    padding = node.attribute("auto_pad", "NOTSET")
    if padding == "NOTSET":
        return any(node.attribute("pads", []))
    return bool(padding != "VALID")


def _ends_normalization(graph: Graph, node: Node) -> bool:
    """Return whether the values of an affine step come from a division or product of two tensors.

    So do those of a decomposed LayerNorm, RMSNorm or Gelu.
    """
    producer: Node | None = node
    while producer is not None and (step := _step_of(graph, producer)) is not None:
        producer = graph.producer_of_kind(step.x, _ARITHMETIC)
    return producer is not None


def _only_read_by(graph: Graph, tensor: str, node: Node) -> bool:
    """Return whether nothing else reads a tensor, which is no output either."""
    return graph.consumers(tensor) == [node] and not graph.is_output(tensor)


def _may_scale(graph: Graph, layer: Layer, factor: Doubles) -> bool:
    """Return whether the weight may be multiplied: by finite factors, and for this layer alone.

    A copy of a shared weight would make the model larger.
    """
    if not (factor != 1).any():
        return True
    is_shared = len(graph.consumers(layer.node.input(1))) > 1
    return bool(np.isfinite(factor).all()) and not is_shared


def _multiply_weight(graph: Graph, layer: Layer, factor: Doubles) -> None:
    """Multiply a weight by factors that broadcast against ``Layer.weight``."""
    if (factor != 1).any():
        layer.set_weight(graph, layer.weight(graph) * factor, "folded")


def _by_channel(
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
    # A single channel could be broadcast to those of the constant.
    if not rank or constant.ndim > rank or shape[axis] != channels:
        return None
    sizes = (1,) * (rank - constant.ndim) + constant.shape
    if sizes[axis] not in (1, channels) or constant.size != sizes[axis]:
        return None
    return np.broadcast_to(constant.reshape(-1), (channels,))
