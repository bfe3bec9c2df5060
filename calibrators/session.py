"""Open an onnxruntime session on a model in memory, whatever its size and whatever operators it embeds."""

from __future__ import annotations

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
        if _EXTENSION_DOMAINS & {opset.domain for opset in model.opset_import}:
            import onnxruntime_extensions

            options.register_custom_ops_library(onnxruntime_extensions.get_library_path())
        if model.ByteSize() > PROTOBUF_LIMIT:
            return _open_large(model, options)
        model = model.SerializeToString()
    source = str(model) if isinstance(model, Path) else model
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def _open_large(model: onnx.ModelProto, options: Any) -> Any:
    import onnxruntime as ort

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        copy = onnx.ModelProto()
        copy.CopyFrom(model)  # saving moves the tensors of the saved object into the file
        onnx.save_model(copy, str(path), save_as_external_data=True, location="model.onnx.data")
        del copy
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
