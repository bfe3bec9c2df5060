"""onnx's shape inference, check and opset converter, in the isolated process where there is one.

They are native code on the fields of a file, and a field that no rule of ``graph.fields`` knows may
crash them.
"""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import ModelProto, version_converter

from calibrators.onnx_runtime.isolation import current
from calibrators.onnx_runtime.tensors import loaded


def infer_shapes(model: ModelProto, *, propagate: bool = False) -> ModelProto:
    """Return a copy of a model with the shapes that onnx infers.

    Args:
        model: the model, which is not changed.
        propagate: use data propagation, too.

    Raises:
        RuntimeCrash: onnx crashed, in the isolated process.
    """
    isolation = current()
    if isolation is None:
        return onnx.shape_inference.infer_shapes(model, data_prop=propagate)
    inferred = isolation.infer_shapes(model.SerializeToString(), propagate=propagate)
    return ModelProto.FromString(inferred)


def run_onnx_check(model: ModelProto | Path, *, full: bool) -> None:
    """Run onnx's check.

    Args:
        model: the model, or its file.
        full: infer shapes, too.

    Raises:
        RuntimeCrash: onnx crashed, in the isolated process.
    """
    isolation = current()
    if isolation is None:
        source = str(model) if isinstance(model, Path) else loaded(model)
        onnx.checker.check_model(source, full_check=full)
    elif isinstance(model, Path):
        isolation.check_model(model, full=full)
    else:
        isolation.check_model(loaded(model).SerializeToString(), full=full)


def convert_version(model: ModelProto, opset: int) -> ModelProto:
    """Return a model at another opset, by onnx's converter.

    Raises:
        RuntimeCrash: onnx crashed, in the isolated process.
    """
    isolation = current()
    if isolation is None:
        return version_converter.convert_version(model, opset)
    converted = isolation.convert_version(model.SerializeToString(), opset)
    return ModelProto.FromString(converted)
