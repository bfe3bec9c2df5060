"""Constant codes: the numbers that they stand for, where they are read, and copies of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from quark_onnx.graph.graph import Graph
from quark_onnx.graph.node import DEQUANTIZE, QUANTIZE, Node


def constant_behind(graph: Graph, tensor: str) -> str:
    """The constant that a tensor is, or the codes of one that a DequantizeLinear makes it of.

    Empty if computed.
    """
    producer = graph.producer(tensor)
    name = (
        producer.inputs[0]
        if producer is not None and producer.op_type in DEQUANTIZE
        else tensor
    )
    return name if graph.is_constant(name) else ""


def copied(graph: Graph, name: str, wish: str) -> str:
    """Another constant of the same values, by the name that is wished for, or one like it.

    Its name.
    """
    tensor = TensorProto()
    tensor.CopyFrom(graph.initializers[name])
    tensor.name = graph.fresh(wish)
    graph.initializers[tensor.name] = tensor
    return str(tensor.name)


def beyond_pairs(node: Node, step: Callable[[Node], list[Node]]) -> list[Node]:
    """What stands next to a node, Q and DQ nodes left out.

    ``step`` is ``Graph.leaders`` or ``followers``.
    """
    found, todo = list[Node](), step(node)
    while todo:
        each = todo.pop()
        if each.op_type in QUANTIZE | DEQUANTIZE:
            todo += step(each)
        else:
            found.append(each)
    return found


def dequantized(node: Node, values: list[NDArray[Any]]) -> NDArray[np.float32]:
    """What a DequantizeLinear computes of codes, scale and zero point.

    Codes may be integers or small floats.

    >>> from onnx import helper
    >>> node = Node(helper.make_node("DequantizeLinear", ["x", "s"], ["y"], axis=0))
    >>> dequantized(node, [np.int8([[1, 2], [3, 4]]), np.float32([1, 10])])
    array([[ 1.,  2.],
           [30., 40.]], dtype=float32)
    """
    codes, scale = values[0].astype(np.float32), values[1].astype(np.float32)
    zero = values[2].astype(np.float32) if len(values) > 2 else np.zeros_like(scale)
    axis, block = int(node.attribute("axis", 1)), int(node.attribute("block_size", 0))
    scale, zero = (spread(part, codes.shape, axis, block) for part in (scale, zero))
    result: NDArray[np.float32] = (codes - zero) * scale
    return result


def spread(
    part: NDArray[Any],
    shape: tuple[int, ...],
    axis: int | None,
    block: int = 0,
) -> NDArray[Any]:
    """A scale or zero point shaped to broadcast against a tensor: one number, one a channel, or one
    a block.
    """
    if part.size == 1 or axis is None:
        return part.reshape(())
    if part.ndim == 1 and not block:
        return part.reshape(
            [-1 if index == axis % len(shape) else 1 for index in range(len(shape))],
        )
    if part.ndim != len(shape):
        return part
    length = shape[axis]
    block = block or -(-length // part.shape[axis])
    return np.take(np.repeat(part, block, axis), range(length), axis)
