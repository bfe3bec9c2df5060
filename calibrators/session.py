"""Open an onnxruntime session on a model in memory, whatever its size and whatever operators it embeds.

What does not fit into one protobuf message travels through files.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
from onnx import numpy_helper
from onnx.external_data_helper import set_external_data

#: A protobuf message ends at 2 GiB; above this estimate a model travels through a file with external data.
PROTOBUF_LIMIT = 1_900_000_000

#: Beside weights of this size the rest of a model does not count.
_LARGE = 100_000_000
#: Tensors below this size stay inside the model file.
_SMALL_TENSOR = 1024
#: External tensors start at multiples of this, as ONNX advises.
_PAGE = 4096

_EXTENSION_DOMAINS = {"ai.onnx.contrib", "com.microsoft.extensions"}


def open_session(model: onnx.ModelProto | bytes | Path, *, threads: int = 0, optimize: bool = True) -> Any:
    """An ``onnxruntime.InferenceSession`` on the CPU.

    Args:
        model: the model, its serialized bytes, or a file.
        threads: threads inside an operator; 0 lets onnxruntime choose.
        optimize: apply onnxruntime's graph optimizations.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if isinstance(model, onnx.ModelProto):
        if estimate_bytes(model) > PROTOBUF_LIMIT:
            return _open_large(model, options)
        model = model.SerializeToString()
    return _open(str(model) if isinstance(model, Path) else model, options)


def _open(source: str | bytes, options: Any) -> Any:
    import onnxruntime as ort

    # Without the fallback: there is no other provider to fall back to, and onnxruntime prints it to stdout.
    settings: dict[str, Any] = {"providers": ["CPUExecutionProvider"], "enable_fallback": 0}
    try:
        return ort.InferenceSession(source, options, **settings)
    except Exception as error:
        if not any(domain in str(error) for domain in _EXTENSION_DOMAINS):
            raise
    import onnxruntime_extensions

    options.register_custom_ops_library(onnxruntime_extensions.get_library_path())
    return ort.InferenceSession(source, options, **settings)


def _open_large(model: onnx.ModelProto, options: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        write_external(model, path, path.with_name("model.onnx.data"))
        return _open(str(path), options)


def write_external(model: onnx.ModelProto, path: Path, data: Path) -> None:
    """Write a model, which is not changed, to ``path``, and its large initializers, if any, to ``data`` beside it.

    onnx's own conversion refuses a name that a file in the current folder has, wherever the model goes.
    """
    stored = onnx.ModelProto()
    stored.CopyFrom(model)
    with data.open("wb") as file:
        for tensor in _initializers(stored.graph):
            if tensor_bytes(tensor) < _SMALL_TENSOR:
                continue
            if not tensor.raw_data and tensor.data_type != onnx.TensorProto.STRING:  # as float_data, say
                tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor), tensor.name))
            if len(values := tensor.raw_data) >= _SMALL_TENSOR:
                file.seek(-file.tell() % _PAGE, os.SEEK_CUR)  # where a runtime can map it into memory
                set_external_data(tensor, data.name, file.tell(), file.write(values))
                tensor.ClearField("raw_data")
    if not data.stat().st_size:
        data.unlink()
    path.write_bytes(stored.SerializeToString())


def _initializers(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """The initializers of a graph and its subgraphs."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _initializers(inner)


def estimate_bytes(model: onnx.ModelProto) -> int:
    """Size of a model's weights; unlike ``ByteSize`` it does not serialize the model to learn it."""
    return sum(map(tensor_bytes, _initializers(model.graph)))


def model_bytes(model: onnx.ModelProto) -> int:
    """Size of a model; of a large one, which is slow or impossible to serialize, that of its weights."""
    estimate = estimate_bytes(model)
    return estimate if estimate > _LARGE else model.ByteSize()


def tensor_bytes(tensor: onnx.TensorProto) -> int:
    """Size of a tensor by its shape and type, an upper bound for types of less than a byte."""
    try:
        width = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    except KeyError:
        width = 1
    return math.prod(tensor.dims) * int(width)
