"""Gather rows of a table of integer codes before they are dequantized."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from quark_onnx.fusions.base import (
    CONTRIB,
    Codes,
    replace,
    stored_codes,
    value,
    zero_points,
)
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.codes import BYTES

_NIBBLES = frozenset({TensorProto.INT4, TensorProto.UINT4})

#: GatherBlockQuantized supports block sizes that are powers of two, from here on.
_LEAST_BLOCK = 16


def gather_codes(graph: Graph, node: Node) -> bool:
    """Gather from a matrix of 4-bit blocks, or of 8 bits with a scale per row or per tensor."""
    table = stored_codes(graph, node.inputs[0])
    # Rows are looked up; along another axis a row would be cut.
    if table is None or node.attribute("axis", 0) != 0:
        return False
    if value(graph, table.codes).ndim != 2:
        return False
    if table.block_size:
        return _gather_blocks(graph, node, table)
    return _gather_bytes(graph, node, table)


def _gather_blocks(graph: Graph, node: Node, table: Codes) -> bool:
    """Gather rows of 4-bit blocks by GatherBlockQuantized, which dequantizes them."""
    size = table.block_size
    # size & (size - 1) clears the lowest bit set.
    power_of_two = not size & (size - 1)
    if size < _LEAST_BLOCK or not power_of_two or table.axis % 2 != 1:
        return False
    if graph.elem_type(table.codes) not in _NIBBLES:
        return False
    inputs = [table.codes, node.inputs[1], table.scale]
    if table.zero_point:
        inputs.append(table.zero_point)
    graph.import_domain(CONTRIB)
    result = graph.compute(
        "GatherBlockQuantized",
        inputs,
        f"{node.name}_rows",
        name=node.name,
        domain=CONTRIB,
        gather_axis=0,
        quantize_axis=1,
        block_size=size,
    )
    replace(graph, node, result)
    return True


def _gather_bytes(graph: Graph, node: Node, table: Codes) -> bool:
    """Gather rows of bytes, and dequantize them by Cast, Sub and Mul."""
    scale = value(graph, table.scale)
    zeros = zero_points(graph, table)
    by_row = scale.ndim == 1 and table.axis % 2 == 0
    if not by_row and scale.ndim != 0:
        return False
    if graph.elem_type(table.codes) not in BYTES:
        return False
    result = graph.fresh(f"{node.name}_rows")
    codes = graph.fresh(f"{node.name}_codes")
    floats = graph.fresh(f"{node.name}_floats")
    indices = node.inputs[1]
    factor = table.scale
    if by_row:
        factor = _of_rows(graph, node, table.scale, scale)
    graph.add("Gather", [table.codes, indices], [codes], name=node.name, axis=0)
    graph.add("Cast", [codes], [floats], to=int(TensorProto.FLOAT))
    # A symmetric table needs no subtraction.
    if zeros.any():
        floats_of_zeros = zeros.astype(np.float32)
        if by_row:
            offsets = _of_rows(graph, node, table.zero_point, floats_of_zeros)
        else:
            offsets = graph.add_constant(f"{table.zero_point}_float", floats_of_zeros)
        floats = graph.compute("Sub", [floats, offsets], f"{node.name}_shifted")
    graph.add("Mul", [floats, factor], [result])
    replace(graph, node, result)
    return True


def _of_rows(graph: Graph, node: Node, name: str, values: NDArray[Any]) -> str:
    """Gather the parameters of the rows that a node gathers; return their name.

    Args:
        values: the parameters of all rows, one per row, which are stored once per table.
    """
    column = graph.shared_constant(
        ("by row", name), f"{name}_by_row", lambda: values[:, None]
    )
    return graph.compute(
        "Gather", [column, node.inputs[1]], f"{node.name}_scales", axis=0
    )
