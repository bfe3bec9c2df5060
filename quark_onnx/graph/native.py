"""onnx's shape inference, check and opset converter, in the isolated process where there is one.

They are native code on the fields of a file, and a field that no rule of ``graph.fields`` knows may
crash them.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import gettempdir

import onnx
from onnx import ModelProto, version_converter

from calibrators.onnx_runtime.external_tensors import is_stored, place, stored_bytes
from calibrators.onnx_runtime.isolation import current
from calibrators.onnx_runtime.tensors import initializers, loaded
from calibrators.scratch import ScratchFolder


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
    stored = model.SerializeToString()
    inferred = isolation.ask_onnx("inferring shapes", "infer", stored, propagate)
    return ModelProto.FromString(inferred)


def run_onnx_check(model: ModelProto | Path, *, full: bool) -> None:
    """Run onnx's check.

    Args:
        model: the model, or its file.
        full: infer shapes, too.

    Raises:
        RuntimeCrash: onnx crashed, in the isolated process.
    """
    if isinstance(model, ModelProto) and any(map(is_stored, initializers(model.graph))):
        try:
            with ScratchFolder(Path(gettempdir()), "check") as folder:
                run_onnx_check(_without_values(model, folder), full=full)
            return
        except OSError:  # the temporary folder cannot be written to
            model = loaded(model)
    isolation = current()
    source = str(model.absolute()) if isinstance(model, Path) else model
    if isolation is None:
        onnx.checker.check_model(source, full_check=full)
    else:
        stored = source if isinstance(source, str) else source.SerializeToString()
        isolation.ask_onnx("checking the model", "check", stored, full)


def _without_values(model: ModelProto, folder: Path) -> Path:
    """Write a model whose stored tensors refer to an empty file, and return the model file.

    onnx's check reads no values of large tensors: it looks for their file.
    """
    light = ModelProto()
    light.CopyFrom(model)
    for tensor in initializers(light.graph):
        if is_stored(tensor):
            place(tensor, "values", 0, stored_bytes(tensor))
    (folder / "values").touch()
    path = folder / "model.onnx"
    path.write_bytes(light.SerializeToString())
    return path


def convert_version(model: ModelProto, opset: int) -> ModelProto:
    """Return a model at another opset, by onnx's converter.

    Raises:
        RuntimeCrash: onnx crashed, in the isolated process.
    """
    isolation = current()
    if isolation is None:
        return version_converter.convert_version(model, opset)
    stored = model.SerializeToString()
    converted = isolation.ask_onnx("converting the opset", "convert", stored, opset)
    return ModelProto.FromString(converted)
