"""Blocked weights at opsets whose DequantizeLinear lacks ``block_size``.

ONNX supports blocked scales from opset 21 on. The DequantizeLinear of the com.microsoft domain
has 4-bit codes at every opset, but at most one scale per row (onnxruntime 1.32). A blocked
weight is written as a matrix with one block per row. DequantizeLinear dequantizes the matrix,
and Reshape restores the shape of the weight.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from quark_onnx.fusions.base import CONTRIB, Codes, value, zero_points
from quark_onnx.graph import Graph, Node, add_narrow
from quark_onnx.graph.bodies import in_bodies


def lower_blocks(graph: Graph) -> int:
    """Rewrite every blocked com.microsoft DequantizeLinear, bodies included.

    Returns:
        The number of rewritten nodes.
    """
    blocked = [
        node
        for node in graph.nodes
        if node.kind == f"{CONTRIB}::DequantizeLinear" and _size(node)
    ]
    for node in blocked:
        _lower(graph, node)
    if blocked:
        graph.drop_unused()
    return len(blocked) + in_bodies(graph, lower_blocks)


def _size(node: Node) -> int:
    return int(node.attribute("block_size", 0))


def _lower(graph: Graph, node: Node) -> None:
    codes = Codes(node, node.input(0), node.input(1), node.input(2))
    shape, rank = value(graph, codes.codes).shape, value(graph, codes.codes).ndim
    axis, size = codes.axis % rank, codes.block_size
    last = [*shape[:axis], *shape[axis + 1 :], shape[axis]]
    padded = -(-shape[axis] // size) * size
    inputs = graph.once(
        ("block rows", *node.inputs, str(axis)),
        lambda: _rows(graph, codes, axis, padded),
    )
    result, output = graph.fresh(f"{codes.codes}_rows"), node.outputs[0]
    graph.remove([node])
    graph.add(
        "DequantizeLinear",
        inputs,
        [result],
        name=node.name,
        domain=CONTRIB,
        axis=0,
    )
    steps: list[tuple[str, NDArray[Any] | None, dict[str, Any]]] = [
        ("Reshape", np.array([*last[:-1], padded], np.int64), {}),
    ]
    if padded != shape[axis]:  # Gather has the same form at every opset, Slice has not
        steps.append(("Gather", np.arange(shape[axis]), {"axis": rank - 1}))
    if axis != rank - 1:
        back = [*range(axis), rank - 1, *range(axis, rank - 1)]
        steps.append(("Transpose", None, {"perm": back}))
    for place, (op_type, constant, attributes) in enumerate(steps, 1):
        source = result
        if place == len(steps):
            result = output
        else:
            result = graph.fresh(f"{output}_{op_type}")
        if constant is None:
            more = []
        else:
            more = [graph.add_constant(f"{output}_{op_type}_by", constant)]
        graph.add(op_type, [source, *more], [result], **attributes)


def _rows(graph: Graph, codes: Codes, axis: int, padded: int) -> list[str]:
    """Write codes, scales and zero points with a block per row; return the names."""
    stored = np.moveaxis(value(graph, codes.codes), axis, -1)
    scales = np.moveaxis(value(graph, codes.scale), axis, -1).reshape(-1)
    zeros = np.moveaxis(zero_points(graph, codes), axis, -1).reshape(-1)
    filled = np.zeros((*stored.shape[:-1], padded), stored.dtype)
    filled[..., : stored.shape[-1]] = stored
    stem = f"{codes.codes}_in_rows"
    names = [graph.add_constant(stem, filled.reshape(-1, codes.block_size))]
    if graph.elem_type(codes.scale) == TensorProto.FLOAT and graph.is_constant(
        codes.scale,
    ):
        names.append(graph.add_constant(f"{stem}_scale", scales))
    else:  # stored in 16 bits
        names.append(add_narrow(graph, f"{stem}_scale", scales.astype(np.float16)))
    names.append(graph.add_constant(f"{stem}_zero_point", zeros.astype(stored.dtype)))
    return names
