"""Read the parameters of Q/DQ nodes of any tool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from calibrators import Grid, QParams, quantize
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.codes import code_type, dequantized
from quark_onnx.graph.constant_input import private
from quark_onnx.graph.node import DEQUANTIZE

#: Ranges of the integer types of QuantizeLinear.
ENDS = {
    int(kind): np.iinfo(helper.tensor_dtype_to_np_dtype(kind))
    for kind in (
        TensorProto.INT8,
        TensorProto.UINT8,
        TensorProto.INT16,
        TensorProto.UINT16,
    )
}


@dataclass(frozen=True)
class NodeParameters:
    """Scale and zero point of a node, with the axis and the block size of several ones."""

    scale: NDArray[Any]
    zero_point: NDArray[Any]
    axis: int
    block_size: int

    @property
    def granularity(self) -> tuple[int, int] | None:
        """Axis and block size of several scales; None for one."""
        return None if self.scale.size == 1 else (self.axis, self.block_size)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NodeParameters):
            return False
        # The comparison that a dataclass generates is ambiguous for arrays.
        same_scale = np.array_equal(self.scale, other.scale)
        same_zero_point = np.array_equal(self.zero_point, other.zero_point)
        same_granularity = self.granularity == other.granularity
        return same_scale and same_zero_point and same_granularity


def parameters(graph: Graph, node: Node) -> NodeParameters | None:
    """Return the parameters of a node; None if computed.

    Args:
        graph: the graph.
        node: a Q/DQ node of any domain.

    Returns:
        Scale and zero point of equal shape, () for a single scale; zeros for an omitted zero point.
    """
    scale = graph.constant(node.input(1))
    if scale is None:
        return None
    zero = graph.optional_constant(node.input(2), np.zeros(scale.shape))
    if zero is None:
        return None
    zero = zero.astype(np.float32)
    # Tools write one scale as a scalar, or as a vector of one element.
    if scale.size == 1:
        scale = scale.reshape(())
        zero = zero.reshape(())
    return NodeParameters(
        scale,
        zero,
        int(node.attribute("axis", 1)),
        int(node.attribute("block_size", 0)),
    )


def write_zero_point(graph: Graph, node: Node) -> None:
    """Add an omitted zero point: zeros of the type of the codes.

    Args:
        graph: the graph, which is changed in place.
        node: a Q/DQ node, with known type of codes and static shape of the scale.
    """
    if node.input(2):
        return
    kind = code_type(graph, node)
    shape = graph.shape(node.inputs[1])
    assert kind and shape is not None
    sizes = [int(size or 0) for size in shape]
    zeros = np.zeros(sizes, helper.tensor_dtype_to_np_dtype(kind))
    # Zero points of one type and shape are shared.
    key = ("zero point", str(kind), *map(str, sizes))
    name = graph.shared_constant(key, "zero_point", lambda: zeros)
    graph.fill_input(node, 2, name)


def readers(graph: Graph, node: Node) -> list[Node] | None:
    """Return the DequantizeLinear nodes after a QuantizeLinear.

    None if another node reads the codes.

    Args:
        graph: the graph.
        node: a QuantizeLinear.

    Returns:
        At least one node, all with the parameters of ``node``. None, too, if codes are an output or
            read by a body, if nobody reads them, or if a parameter is computed.
    """
    result = node.outputs[0]
    node_parameters = parameters(graph, node)
    consumers = graph.consumers(result)
    if node_parameters is None or not consumers or not private(graph, result):
        return None
    for consumer in consumers:
        if consumer.op_type not in DEQUANTIZE or consumer.inputs[0] != result:
            return None
        if parameters(graph, consumer) != node_parameters:
            return None
    return consumers


def constant(graph: Graph, node: Node) -> NDArray[Any] | None:
    """Return the result of a DequantizeLinear of constants; None if an input is computed.

    Args:
        graph: the graph.
        node: a DequantizeLinear.
    """
    arrays = [graph.constant(name) for name in node.operands]
    values = [array for array in arrays if array is not None]
    if len(values) < len(arrays):
        return None
    # The result has the type of the scale (float32, float16).
    return dequantized(node, values).astype(values[1].dtype)


def rounded(graph: Graph, node: Node) -> NDArray[Any] | None:
    """Return the result of a pair for a constant; None if unknown.

    Args:
        graph: the graph.
        node: a QuantizeLinear.

    Returns:
        Dequantized values of the type and shape of the constant. None if the input or a parameter
            is computed, for blocks, and for codes other than integers of 8 and 16 bits.
    """
    array = graph.constant(node.inputs[0])
    node_parameters = parameters(graph, node)
    if array is None or node_parameters is None:
        return None
    kind = code_type(graph, node)
    # Other codes, such as small floats, are not rounded by ``quantize``.
    if kind not in ENDS or node_parameters.block_size:
        return None
    scale, zero_point = node_parameters.scale, node_parameters.zero_point
    axis = node_parameters.axis % array.ndim if scale.ndim else None
    params = QParams(scale.astype(np.float32), zero_point.astype(np.int64), axis)
    codes = quantize(array, params, Grid(int(ENDS[kind].min), int(ENDS[kind].max)))
    return dequantized(node, [codes, scale, zero_point]).astype(array.dtype)
