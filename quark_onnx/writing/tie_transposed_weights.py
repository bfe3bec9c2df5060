"""Tied transposed weights: a single stored table for two layers.

Constant folding turns the transpose of a table into a separate constant with its own scales. If
the scales are equal, or both stay float, the values equal the table's. A Transpose restores the
second weight, and runtimes fold it when they load the model.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from quark_onnx.graph import Graph

#: Types of codes and floats that runtimes can transpose.
_TURNED = frozenset({TensorProto.INT8, TensorProto.UINT8, TensorProto.FLOAT})

#: Data type, shape, and a hash of values: equal for equal matrices.
_Key = tuple[str, tuple[int, ...], bytes]


def tie_transposed_weights(graph: Graph) -> list[str]:
    """Replace a matrix by the transpose of an equal stored matrix.

    Returns:
        Notes for the report.
    """
    # Names in the order of the file: the first of a pair is stored.
    names = [name for name in graph.initializers if _may_share(graph, name)]
    stored: dict[_Key, str] = {}
    notes = list[str]()
    for name in _with_partner(graph, names):
        codes = graph.known(name)
        # Codes are compared without their scales, which DequantizeLinear nodes apply afterwards.
        twin = stored.get(_key(codes.T))
        if twin is None:
            # The first of several equal matrices.
            stored.setdefault(_key(codes), name)
            continue
        turned = graph.fresh(f"{name}_shared")
        graph.replace_uses(name, turned)
        graph.add("Transpose", [twin], [turned], perm=[1, 0])
        notes.append(f"{name!r} is {twin!r} turned round, and not stored")
    if notes:
        graph.drop_unused()
    return notes


def _may_share(graph: Graph, name: str) -> bool:
    tensor = graph.initializers[name]
    # A row or column vector is its own transpose in memory, and costs little.
    if tensor.data_type not in _TURNED or len(tensor.dims) != 2 or min(tensor.dims) < 2:
        return False
    return (
        graph.is_constant(name)
        and not graph.captured(name)
        and not graph.is_output(name)
    )


def _with_partner(graph: Graph, names: list[str]) -> list[str]:
    """Return the matrices whose first row equals another's first column.

    Complete matrices are hashed only afterwards: most models have no such pair.

    Args:
        names: names of constant matrices; the result has their order.
    """
    rows = {name: _key(graph.known(name)[:1]) for name in names}
    columns = {name: _key(graph.known(name)[:, :1].T) for name in names}
    first_rows, first_columns = set(rows.values()), set(columns.values())
    return [
        name
        for name in names
        if rows[name] in first_columns or columns[name] in first_rows
    ]


def _key(codes: NDArray[Any]) -> _Key:
    # A hash of 32 bytes: collisions are out of the question.
    content = hashlib.blake2b(np.ascontiguousarray(codes).data, digest_size=32).digest()
    return codes.dtype.str, codes.shape, content
