"""Locate, copy and dequantize constant integer codes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from quark_onnx.graph.graph import Graph
from quark_onnx.graph.node import DEQUANTIZE, QUANTIZE, Node
from quark_onnx.kernels.axes import along

#: Types of 8-bit codes, and of 16-bit codes.
BYTES = frozenset({TensorProto.INT8, TensorProto.UINT8})
WORDS = frozenset({TensorProto.INT16, TensorProto.UINT16})


def constant_behind(graph: Graph, tensor: str) -> str:
    """Return the constant of a tensor, or the codes that a DequantizeLinear dequantizes.

    Empty if the tensor is computed.
    """
    dequantize = graph.producer_of_type(tensor, DEQUANTIZE)
    name = tensor if dequantize is None else dequantize.inputs[0]
    return name if graph.is_constant(name) else ""


def copied(graph: Graph, name: str, wish: str) -> str:
    """Copy a constant under the name ``wish``, made unique; return the name.

    Args:
        graph: the graph, which gets the copy.
        name: name of an initializer.
        wish: preferred name of the copy.
    """
    tensor = TensorProto()
    tensor.CopyFrom(graph.initializers[name])
    tensor.name = graph.fresh(wish)
    graph.initializers[tensor.name] = tensor
    return str(tensor.name)


def beyond_pairs(node: Node, step: Callable[[Node], list[Node]]) -> list[Node]:
    """Return the nodes next to a node, skipping Q and DQ nodes.

    Args:
        node: the node.
        step: ``Graph.leaders`` or ``Graph.followers``.
    """
    neighbours = list[Node]()
    todo = step(node)
    while todo:
        neighbour = todo.pop()
        if neighbour.op_type in QUANTIZE | DEQUANTIZE:
            todo += step(neighbour)
        else:
            neighbours.append(neighbour)
    return neighbours


def dequantized(node: Node, values: list[NDArray[Any]]) -> NDArray[np.float32]:
    """Compute a DequantizeLinear of codes, scale and zero point.

    Codes may be integers or small floats.

    >>> from onnx import helper
    >>> node = Node(helper.make_node("DequantizeLinear", ["x", "s"], ["y"], axis=0))
    >>> dequantized(node, [np.int8([[1, 2], [3, 4]]), np.float32([1, 10])])
    array([[ 1.,  2.],
           [30., 40.]], dtype=float32)
    """
    # In float32, as onnxruntime computes a DequantizeLinear with a float32 scale.
    codes = values[0].astype(np.float32)
    axis = int(node.attribute("axis", 1))
    block = int(node.attribute("block_size", 0))
    scale, *zero_point = (
        spread(parameter.astype(np.float32), codes.shape, axis, block)
        for parameter in values[1:]
    )
    if zero_point:
        codes = codes - zero_point[0]
    result: NDArray[np.float32] = codes * scale
    return result


def spread(
    part: NDArray[Any],
    shape: tuple[int, ...],
    axis: int | None,
    block: int = 0,
) -> NDArray[Any]:
    """Reshape a scale or zero point to broadcast against a tensor.

    Args:
        part: per-tensor, per-channel or per-block values.
        shape: shape of the tensor.
        axis: axis of the channels or blocks.
        block: values in a block.
    """
    if part.size == 1 or axis is None:
        return part.reshape(())
    if part.ndim == 1 and not block:
        # One value per channel: (C,) becomes (1, ..., C, ..., 1).
        return part.reshape(along(axis, len(shape)))
    # A shape that fits no layout of ONNX: left to numpy's broadcasting.
    if part.ndim != len(shape):
        return part
    # One value per block: repeated along the axis; the padding of the last block is cut off.
    length = shape[axis]
    # Without the attribute, ceil(length / number of scales) is the least possible block.
    block = block or -(-length // part.shape[axis])
    return np.take(np.repeat(part, block, axis), range(length), axis)


def codes_of(node: Node) -> str:
    """Return the codes that a node writes or reads.

    Args:
        node: a Q/DQ node of any domain.
    """
    return node.outputs[0] if node.op_type in QUANTIZE else node.inputs[0]


def code_type(graph: Graph, node: Node) -> int:
    """Return the ``TensorProto.DataType`` of the codes; 0 if unknown.

    Args:
        graph: the graph.
        node: a Q/DQ node of any domain.
    """
    # The zero point has the type of the codes by definition.
    if node.input(2):
        return graph.elem_type(node.input(2))
    if node.op_type in QUANTIZE:
        return _untyped(node)
    return graph.elem_type(node.inputs[0])


def written_type(node: Node, constants: Mapping[str, TensorProto]) -> int:
    """Return the ``TensorProto.DataType`` of the codes of a QuantizeLinear, by its constants.

    Args:
        node: the QuantizeLinear.
        constants: constants that it can read, by name.
    """
    zero_point = constants.get(node.input(2))
    return _untyped(node) if zero_point is None else zero_point.data_type


def _untyped(node: Node) -> int:
    """Return the type of the codes of a QuantizeLinear without a zero point."""
    # ONNX, QuantizeLinear: uint8 without a zero point and an output_dtype.
    return int(node.attribute("output_dtype", 0)) or int(TensorProto.UINT8)
