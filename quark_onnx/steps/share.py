"""share: a table that is the weight of another layer, turned round, is stored once.

Folding turns such a weight into a constant of its own, so that it gets the scales that suit it. Where they are those of
the table, or both stay float, its values are the table's; a Transpose brings them into the form that is read, which
runtimes fold away as they load the model.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from onnx import TensorProto

from quark_onnx.graph import Graph

#: Codes and floats that runtimes transpose.
_TURNED = frozenset({TensorProto.INT8, TensorProto.UINT8, TensorProto.FLOAT})


def share_transposed(graph: Graph) -> list[str]:
    """Let a matrix that is the transpose of another one be computed from it; what was done, for the report."""
    by_shape: dict[tuple[int, ...], list[str]] = defaultdict(list)
    notes = list[str]()
    for name, tensor in list(graph.initializers.items()):
        shape = tuple(tensor.dims)
        if tensor.data_type not in _TURNED or len(shape) != 2 or min(shape) < 2 or not graph.is_constant(name):
            continue
        if graph.captured(name) or graph.is_output(name):
            continue
        twin = next((other for other in by_shape[shape[::-1]] if _is_transpose(graph, name, other)), None)
        if twin is None:
            by_shape[shape].append(name)
            continue
        turned = graph.fresh(f"{name}_shared")
        graph.replace_uses(name, turned)
        graph.add("Transpose", [twin], [turned], perm=[1, 0])
        notes.append(f"{name!r} is {twin!r} turned round, and not stored")
    if notes:
        graph.drop_unused()
    return notes


def _is_transpose(graph: Graph, name: str, other: str) -> bool:
    if graph.initializers[name].data_type != graph.initializers[other].data_type:
        return False
    first, second = graph.constant(name), graph.constant(other)
    assert first is not None and second is not None
    return bool(np.array_equal(first[0], second[:, 0]) and np.array_equal(first, second.T))
