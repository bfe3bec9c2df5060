"""Scales and zero points as initializers, stored where scripts for onnxruntime read them."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray
from onnx import helper

from quark_onnx.graph.graph import Graph


def add_parameter(graph: Graph, name: str, array: NDArray[Any]) -> str:
    """Add an initializer in the field that belongs to its type (``float_data``, ``int32_data``).

    Its name.
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
