"""Blocked weights written as matrices with one block per row.

DequantizeLinear dequantizes the matrix, with one scale per row, and Reshape restores the shape of
the weight. There are two reasons:

- ONNX supports blocked scales from opset 21 on. The DequantizeLinear of the com.microsoft domain
  has 4-bit codes at every opset, but at most one scale per row (onnxruntime 1.32).
- onnxruntime dequantizes the weight of a convolution, Gemm or LSTM in each run. Where the values of
  a block are contiguous, it takes half the time for a scale per row that it takes for blocks.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from quark_onnx.files.half_precision import add_narrow
from quark_onnx.fusions.base import CONTRIB, Codes, value, zero_points
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.bodies import in_bodies
from quark_onnx.graph.node import kinds_of

#: Operators whose weights onnxruntime dequantizes in each run; a MatMul reads blocks as they are.
_LAYERS = frozenset({"Conv", "Gemm", "LSTM", "GRU", "RNN"})


def lower_blocks(graph: Graph) -> int:
    """Rewrite every blocked com.microsoft DequantizeLinear, bodies included.

    Those of the standard domain are rewritten where this is faster.

    Returns:
        The number of rewritten nodes.
    """
    contributed = list[Node]()
    contiguous = list[Node]()
    for node in graph.nodes:
        if not _size(node):
            continue
        if node.kind == f"{CONTRIB}::DequantizeLinear":
            contributed.append(node)
        elif node.kind == "DequantizeLinear" and _is_contiguous_weight(graph, node):
            contiguous.append(node)
    for node in contributed:
        _lower(graph, node)
    for node in contiguous:
        _lower_contiguous(graph, node)
    lowered = len(contributed) + len(contiguous)
    if lowered:
        graph.drop_unused()
    return lowered + in_bodies(graph, lower_blocks)


def _is_contiguous_weight(graph: Graph, node: Node) -> bool:
    """Return whether layers alone read a weight, whose blocks are full and contiguous.

    A Reshape may stand between. A line of fewer values than a block is a block.

    Args:
        node: a DequantizeLinear with blocks.
    """
    codes, result = node.inputs[0], node.outputs[0]
    # Only readers in the graph are known to be layers.
    if graph.is_output(result) or graph.captured(result):
        return False
    if not graph.is_constant(codes) or not _are_constant(graph, node.operands[1:]):
        return False
    readers = graph.consumers(result)
    if _is_reshaped(graph, node):
        # Readers of the reshaped weight.
        readers = graph.consumers(readers[0].outputs[0])
    if not kinds_of(readers) <= _LAYERS:
        return False
    shape = value(graph, codes).shape
    axis = int(node.attribute("axis", 1)) % len(shape)
    # A last block that is cut short would need padding, and a Gather to remove it in each run.
    full = shape[axis] <= _size(node) or shape[axis] % _size(node) == 0
    return full and prod(shape[axis + 1 :]) == 1


def _are_constant(graph: Graph, names: list[str]) -> bool:
    """Return whether parameters are constants, or Casts of constants in 16 bits.

    Args:
        names: names of scales and zero points.
    """
    for name in names:
        cast = graph.producer(name)
        if cast is not None and cast.op_type == "Cast":
            name = cast.inputs[0]
        if not graph.is_constant(name):
            return False
    return True


def _is_reshaped(graph: Graph, node: Node) -> bool:
    """Return whether a Reshape to known sizes alone reads the result of a node."""
    readers = graph.consumers(node.outputs[0])
    if len(readers) != 1 or readers[0].kind != "Reshape":
        return False
    sizes = graph.constant(readers[0].inputs[1])
    return sizes is not None and bool((sizes > 0).all())


def _lower_contiguous(graph: Graph, node: Node) -> None:
    """Replace blocks by rows, with a Reshape to the shape of the weight.

    Args:
        graph: the graph; changed in place.
        node: a DequantizeLinear whose blocks are contiguous.
    """
    codes = Codes.read_by(node)
    shape = value(graph, codes.codes).shape
    axis = codes.axis % len(shape)
    # A weight that several nodes dequantize is rewritten once.
    inputs = graph.once(
        ("block rows", *node.inputs, str(axis)),
        lambda: _rows(graph, codes, axis, shape[axis]),
    )
    if not codes.zero_point:
        # A DequantizeLinear without zero points takes less time.
        inputs = inputs[:2]
    output, result = node.outputs[0], graph.fresh(f"{codes.codes}_rows")
    # Before the node is removed, whose readers are looked at.
    is_reshaped = _is_reshaped(graph, node)
    graph.remove([node])
    graph.add("DequantizeLinear", inputs, [result], name=node.name, axis=0)
    if is_reshaped:
        # The rows get a name of their own, as the shape of the old name may be known.
        graph.replace_input(graph.consumers(output)[0], output, result)
        return
    stem = f"shape_{'_'.join(map(str, shape))}"
    by = graph.shared_constant(
        ("shape", *map(str, shape)), stem, lambda: np.array(shape, np.int64)
    )
    graph.add("Reshape", [result, by], [output])


def _size(node: Node) -> int:
    return int(node.attribute("block_size", 0))


def _lower(graph: Graph, node: Node) -> None:
    """Replace blocks along any axis by rows, and restore the layout of the weight.

    Args:
        graph: the graph; changed in place.
        node: a blocked DequantizeLinear of the com.microsoft domain.
    """
    codes = Codes.read_by(node)
    shape, rank = value(graph, codes.codes).shape, value(graph, codes.codes).ndim
    axis, size = codes.axis % rank, codes.block_size
    # The blocked axis comes last, where values of a block are contiguous.
    last = [*shape[:axis], *shape[axis + 1 :], shape[axis]]
    # Rounded up to whole blocks.
    padded = -(-shape[axis] // size) * size
    inputs = graph.once(
        ("block rows", *node.inputs, str(axis)),
        lambda: _rows(graph, codes, axis, padded),
    )
    result, output = graph.fresh(f"{codes.codes}_rows"), node.outputs[0]
    graph.remove([node])
    graph.add(
        "DequantizeLinear", inputs, [result], name=node.name, domain=CONTRIB, axis=0
    )
    steps: list[tuple[str, NDArray[Any] | None, dict[str, Any]]] = [
        ("Reshape", np.array([*last[:-1], padded], np.int64), {}),
    ]
    if padded != shape[axis]:  # Gather has the same form at every opset, Slice has not
        steps.append(("Gather", np.arange(shape[axis]), {"axis": rank - 1}))
    if axis != rank - 1:
        # Inverse of moving the axis to the end.
        back = [*range(axis), rank - 1, *range(axis, rank - 1)]
        steps.append(("Transpose", None, {"perm": back}))
    for number, (op_type, constant, attributes) in enumerate(steps, 1):
        inputs = [result]
        if number == len(steps):
            result = output
        else:
            result = graph.fresh(f"{output}_{op_type}")
        if constant is not None:
            inputs.append(graph.add_constant(f"{output}_{op_type}_by", constant))
        graph.add(op_type, inputs, [result], **attributes)


def _rows(graph: Graph, codes: Codes, axis: int, padded: int) -> list[str]:
    """Write codes, scales and zero points with a block per row; return the names.

    Args:
        axis: axis of the blocks, 0 or more.
        padded: length of a line, filled up to whole blocks; a shorter line is a block.
    """
    # (..., length); scales and zero points are (..., blocks), flattened to one per row.
    stored = np.moveaxis(value(graph, codes.codes), axis, -1)
    scales = np.moveaxis(value(graph, codes.scale), axis, -1).reshape(-1)
    zeros = np.moveaxis(zero_points(graph, codes), axis, -1).reshape(-1)
    # Zeros at the end are cut off again, whatever they dequantize to.
    filled = np.zeros((*stored.shape[:-1], padded), stored.dtype)
    filled[..., : stored.shape[-1]] = stored
    width = min(codes.block_size, padded)
    stem = f"{codes.codes}_in_rows"
    names = [graph.add_constant(stem, filled.reshape(-1, width))]
    if graph.elem_type(codes.scale) == TensorProto.FLOAT and graph.is_constant(
        codes.scale,
    ):
        names.append(graph.add_constant(f"{stem}_scale", scales))
    else:  # stored in 16 bits
        # A float16 scale with a Cast to float32, as the weight had it.
        names.append(add_narrow(graph, f"{stem}_scale", scales.astype(np.float16)))
    names.append(graph.add_constant(f"{stem}_zero_point", zeros.astype(stored.dtype)))
    return names
