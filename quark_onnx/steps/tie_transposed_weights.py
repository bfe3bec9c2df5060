"""Tie transposed weights: store a table once that is another layer's weight, transposed.

Folding turns such a weight into a constant of its own, so that it gets the scales that suit it.
Where they are those of the table, or both stay float, its values are the table's; a Transpose
brings them into the form that is read, which runtimes fold away as they load the model.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from quark_onnx.graph import Graph

#: Codes and floats that runtimes transpose.
_TURNED = frozenset({TensorProto.INT8, TensorProto.UINT8, TensorProto.FLOAT})

#: Data type, shape, and a hash of values: equal for equal matrices.
_Key = tuple[str, tuple[int, ...], bytes]


def tie_transposed_weights(graph: Graph) -> list[str]:
    """Let a matrix that is the transpose of another one be computed from it.

    What was done, for the report.
    """
    matrices = _with_partner(
        graph,
        [name for name in graph.initializers if _may_share(graph, name)],
    )
    known: dict[_Key, str] = {}
    notes = list[str]()
    for name in matrices:
        codes = _codes(graph, name)
        twin = known.get(_key(codes.T))
        if twin is None:
            known.setdefault(_key(codes), name)
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
    if tensor.data_type not in _TURNED or len(tensor.dims) != 2 or min(tensor.dims) < 2:
        return False
    return (
        graph.is_constant(name)
        and not graph.captured(name)
        and not graph.is_output(name)
    )


def _with_partner(graph: Graph, names: list[str]) -> list[str]:
    """Keep the matrices whose first row is the first column of one, or the other way round.

    Whole matrices are hashed after that only: most models have no such pair.
    """
    rows = {name: _key(_codes(graph, name)[:1]) for name in names}
    columns = {name: _key(_codes(graph, name)[:, :1].T) for name in names}
    first_rows, first_columns = set(rows.values()), set(columns.values())
    return [
        name
        for name in names
        if rows[name] in first_columns or columns[name] in first_rows
    ]


def _codes(graph: Graph, name: str) -> NDArray[Any]:
    codes = graph.constant(name)
    assert codes is not None
    return codes


def _key(codes: NDArray[Any]) -> _Key:
    content = hashlib.blake2b(np.ascontiguousarray(codes).data, digest_size=32).digest()
    return codes.dtype.str, codes.shape, content
