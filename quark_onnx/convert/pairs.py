"""Q/DQ nodes of any tool: the type of their codes, their scales, and whether two of them mean the
same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from calibrators import Grid, QParams, quantize
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.codes import dequantized
from quark_onnx.graph.node import DEQUANTIZE, QUANTIZE

#: The first and the last code of the integer types of QuantizeLinear.
ENDS = {
    int(kind): np.iinfo(helper.tensor_dtype_to_np_dtype(kind))
    for kind in (
        TensorProto.INT8,
        TensorProto.UINT8,
        TensorProto.INT16,
        TensorProto.UINT16,
    )
}


def codes_of(node: Node) -> str:
    """The codes that a node writes or reads."""
    return node.outputs[0] if node.op_type in QUANTIZE else node.inputs[0]


def code_type(graph: Graph, node: Node) -> int:
    """``TensorProto.DataType`` of the codes; 0 where it is not known."""
    if node.input(2):
        return graph.elem_type(node.input(2))
    if node.op_type in QUANTIZE:
        return int(node.attribute("output_dtype", 0)) or int(TensorProto.UINT8)
    return graph.elem_type(node.inputs[0])


@dataclass(frozen=True)
class Parameters:
    """Scale and zero point of a node, and along which axis, in blocks of what size, there is more
    than one.
    """

    scale: NDArray[Any]
    zero_point: NDArray[Any]
    axis: int
    block_size: int

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Parameters)
            and np.array_equal(self.scale, other.scale)
            and np.array_equal(self.zero_point, other.zero_point)
            and (
                self.scale.size == 1
                or (self.axis, self.block_size) == (other.axis, other.block_size)
            )
        )


def parameters(graph: Graph, node: Node) -> Parameters | None:
    """What a node reads beside values or codes; None if that is computed."""
    scale, zero = (
        graph.constant(node.input(1)),
        graph.constant(node.input(2)) if node.input(2) else None,
    )
    if scale is None or (zero is None and node.input(2)):
        return None
    zero = (
        np.zeros(scale.shape, np.float32) if zero is None else zero.astype(np.float32)
    )
    if scale.size == 1:
        scale, zero = scale.reshape(()), zero.reshape(())
    return Parameters(
        scale,
        zero,
        int(node.attribute("axis", 1)),
        int(node.attribute("block_size", 0)),
    )


def write_zero_point(graph: Graph, node: Node) -> None:
    """Give a node that leaves its zero point out the one that it has: zeros of the type of its
    codes.
    """
    if node.input(2):
        return
    kind, shape = code_type(graph, node), graph.shape(node.inputs[1])
    assert kind and shape is not None
    sizes = [int(size or 0) for size in shape]
    key = ("zero point", str(kind), *map(str, sizes))
    [name] = graph.once(
        key,
        lambda: [
            graph.add_constant(
                "zero_point",
                np.zeros(sizes, helper.tensor_dtype_to_np_dtype(kind)),
            ),
        ],
    )
    if len(node.inputs) > 2:
        graph.set_input(node, 2, name)
    else:
        graph.append_input(node, name)


def readers(graph: Graph, node: Node) -> list[Node] | None:
    """The DequantizeLinear nodes that undo a QuantizeLinear.

    None if anything else reads its codes.
    """
    result, own = node.outputs[0], parameters(graph, node)
    found = graph.consumers(result)
    alone = (
        found
        and own is not None
        and not (graph.is_output(result) or graph.captured(result))
    )
    undone = all(
        each.op_type in DEQUANTIZE and each.inputs[0] == result for each in found
    )
    if not alone or not undone or any(parameters(graph, each) != own for each in found):
        return None
    return found


def constant(graph: Graph, node: Node) -> NDArray[Any] | None:
    """What a DequantizeLinear makes of constant codes.

    None if anything that it reads is computed.
    """
    values = [graph.constant(name) for name in node.inputs if name]
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return dequantized(node, known).astype(known[1].dtype)


def rounded(graph: Graph, node: Node) -> NDArray[Any] | None:
    """What a pair makes of a constant that its QuantizeLinear reads.

    None where that is not known here.
    """
    array, own, kind = (
        graph.constant(node.inputs[0]),
        parameters(graph, node),
        code_type(graph, node),
    )
    if array is None or own is None or kind not in ENDS or own.block_size:
        return None
    axis = own.axis % array.ndim if own.scale.ndim else None
    params = QParams(
        own.scale.astype(np.float32),
        own.zero_point.astype(np.int64),
        axis,
    )
    codes = quantize(array, params, Grid(int(ENDS[kind].min), int(ENDS[kind].max)))
    return dequantized(node, [codes, own.scale, own.zero_point]).astype(array.dtype)
