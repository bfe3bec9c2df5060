"""Store scales and zero points as initializers, in typed fields.

Scripts for onnxruntime read them there.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray
from onnx import helper

from quark_onnx.graph.graph import Graph


def add_parameter(graph: Graph, name: str, array: NDArray[Any]) -> str:
    """Add an initializer in its type's field (``float_data``, ``int32_data``); return the name.

    Args:
        graph: the graph, which is changed in place.
        name: preferred name.
        array: the values, of a type that ONNX has.
    """
    name = graph.fresh(name)
    kind = helper.np_dtype_to_tensor_dtype(array.dtype)
    graph.initializers[name] = helper.make_tensor(
        name,
        kind,
        array.shape,
        array.reshape(-1).tolist(),
    )
    return name
