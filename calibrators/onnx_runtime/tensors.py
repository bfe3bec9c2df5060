"""The tensors of a model: their sizes, and their values in a file next to the model."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from calibrators.onnx_runtime.external_tensors import (
    copy_values,
    is_stored,
    load_values,
    place,
    stored_bytes,
)

#: With weights of this size, the other parts of a model are negligible.
_LARGE = 100_000_000
#: Tensors below this size stay inside the model file.
SMALL_TENSOR = 1024
#: External tensors start at multiples of this, as ONNX advises.
PAGE = 4096


def write_external(model: onnx.ModelProto, path: Path, data: Path) -> None:
    """Write a model to ``path``, and large initializers to ``data``.

    The model is not changed. onnx's own conversion refuses a name that a file in the current folder
    has, wherever the model is written.

    Args:
        model: the model.
        path: the model file.
        data: the file of the external tensors, in the same folder.
    """
    stored = onnx.ModelProto()
    stored.CopyFrom(model)
    with data.open("wb") as file:
        for tensor in initializers(stored.graph):
            if is_stored(tensor):
                file.seek(-file.tell() % PAGE, os.SEEK_CUR)
                place(tensor, data.name, file.tell(), copy_values(tensor, file))
            if is_stored(tensor) or tensor_bytes(tensor) < SMALL_TENSOR:
                continue
            # The values may be in another field, such as float_data.
            if not tensor.raw_data and tensor.data_type != onnx.TensorProto.STRING:
                tensor.CopyFrom(
                    numpy_helper.from_array(numpy_helper.to_array(tensor), tensor.name),
                )
            if len(values := tensor.raw_data) >= SMALL_TENSOR:
                # Aligned, so that a runtime can map the tensor into memory.
                file.seek(-file.tell() % PAGE, os.SEEK_CUR)
                place(tensor, data.name, file.tell(), file.write(values))
    # No tensor was large: a model without external data has no second file.
    if not data.stat().st_size:
        data.unlink()
    path.write_bytes(stored.SerializeToString())


def loaded(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with the tensors in the message; uncopied if unchanged."""
    if not any(is_stored(tensor) for tensor in initializers(model.graph)):
        return model
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for tensor in initializers(result.graph):
        if is_stored(tensor):
            load_values(tensor)
    return result


def initializers(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Yield the initializers of a graph and of the subgraphs."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from initializers(inner)


def estimate_bytes(model: onnx.ModelProto) -> int:
    """Return the size of a model's weights.

    Unlike ``ByteSize``, this does not serialize the model.
    """
    return sum(tensor_bytes(tensor) for tensor in initializers(model.graph))


def model_bytes(model: onnx.ModelProto) -> int:
    """Return the size of a model; of the weights alone for large models."""
    estimate = estimate_bytes(model)
    tensors = list(initializers(model.graph))
    if estimate > _LARGE:
        return estimate
    more = sum(_added_by_values(tensor) for tensor in tensors if is_stored(tensor))
    graph = model.graph.ByteSize()
    return model.ByteSize() + _field_bytes(graph + more) - _field_bytes(graph)


def _added_by_values(tensor: onnx.TensorProto) -> int:
    """Return the bytes by which a stored tensor grows if the values replace the reference."""
    plain = onnx.TensorProto()
    plain.CopyFrom(tensor)
    plain.ClearField("external_data")
    plain.ClearField("data_location")
    stored = plain.ByteSize() + _field_bytes(stored_bytes(tensor))
    return _field_bytes(stored) - _field_bytes(tensor.ByteSize())


def _field_bytes(length: int) -> int:
    """Return the size of a field of protobuf: tag, length as a varint, and content.

    >>> _field_bytes(127), _field_bytes(128)
    (129, 131)
    """
    return 1 + max(1, -(-length.bit_length() // 7)) + length


def tensor_bytes(tensor: onnx.TensorProto) -> int:
    """Return the size of a tensor, an upper bound for types of less than a byte."""
    try:
        width = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    except KeyError:
        width = 1
    return math.prod(tensor.dims) * int(width)


def tensor_size(tensor: onnx.TensorProto) -> int:
    """Return the size of a tensor's stored values; types of less than a byte are packed."""
    try:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        # Bytes of eight elements: 4 for a type of four bits.
        packed = len(numpy_helper.from_array(np.zeros(8, dtype)).raw_data)
    except (KeyError, TypeError, ValueError):
        return tensor_bytes(tensor)
    return -(-math.prod(tensor.dims) * packed // 8)
