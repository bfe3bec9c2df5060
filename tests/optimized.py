"""What onnxruntime makes of a model when it loads it."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnxruntime as ort
from onnx import ModelProto


def optimized_kinds(model: ModelProto, folder: Path) -> list[str]:
    """Operators that onnxruntime really runs."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return [node.op_type for node in onnx.load(folder / "optimized.onnx").graph.node]
