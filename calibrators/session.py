"""Open an onnxruntime session on a model in memory, whatever its size and whatever operators it embeds."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import onnx

#: A protobuf message ends at 2 GiB; above this estimate a model travels through a file with external data.
PROTOBUF_LIMIT = 1_900_000_000

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

    try:
        return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        if not any(domain in str(error) for domain in _EXTENSION_DOMAINS):
            raise
    import onnxruntime_extensions

    options.register_custom_ops_library(onnxruntime_extensions.get_library_path())
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def _open_large(model: onnx.ModelProto, options: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        copy = onnx.ModelProto()
        copy.CopyFrom(model)  # saving moves the tensors of the saved object into the file
        onnx.save_model(copy, str(path), save_as_external_data=True, location="model.onnx.data")
        del copy
        return _open(str(path), options)


def estimate_bytes(model: onnx.ModelProto) -> int:
    """Size of a model's weights; unlike ``ByteSize`` it does not serialize the model to learn it."""
    return sum(map(tensor_bytes, model.graph.initializer))


def tensor_bytes(tensor: onnx.TensorProto) -> int:
    """Size of a tensor by its shape and type, an upper bound for types of less than a byte."""
    try:
        width = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    except KeyError:
        width = 1
    return math.prod(tensor.dims) * int(width)
