"""finish: check the quantized model, measure it against the float one, and write it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
from onnx import ModelProto

from calibrators.session import open_session
from quark_onnx.errors import ModelError
from quark_onnx.graph import Graph
from quark_onnx.graph.io import write
from quark_onnx.report.measure import OutputError, measure
from quark_onnx.steps.run import Sample, run_session


def finish(graph: Graph, original: ModelProto, samples: Sequence[Sample]) -> tuple[ModelProto, list[OutputError]]:
    """The finished model, which loads and runs, and its error at each output on the samples.

    Raises:
        ModelError: the model does not pass the check or does not run. That would be a defect of this package.
    """
    graph.infer()
    model = graph.to_model()
    if model.ByteSize() < onnx.checker.MAXIMUM_PROTOBUF:
        _check(model, original)
    sessions = _open(original, "float"), _open(model)
    try:
        return model, measure(*sessions, samples)
    except Exception as error:  # onnxruntime raises several unrelated types
        raise ModelError(f"the quantized model cannot be measured against the float one: {error}") from error


def save(model: ModelProto, output: Path, sample: Sample, *, original: ModelProto, external: bool) -> None:
    """Write the model to a temporary file, check that file, run it on a sample, and only then rename it.

    Args:
        original: the float model.
        external: keep large tensors in a second file even if protobuf could hold them.

    Raises:
        ModelError: the file cannot be written, or is not what it should be; then nothing is left behind.
    """

    def verify(path: Path) -> None:
        _check(path, original)
        run_session(_open(path), sample)

    stored = ModelProto()
    stored.CopyFrom(model)  # writing external data moves the tensors out of the object
    write(stored, output, external=external, verify=verify)


def _check(model: ModelProto | Path, original: ModelProto) -> None:
    """onnx's full check. Where its shape inference fails on the float model already, the check without it."""
    error = _objection(model, full=True)
    if error and original.ByteSize() < onnx.checker.MAXIMUM_PROTOBUF and _objection(original, full=True):
        error = _objection(model, full=False)
    if error:
        raise ModelError(f"the quantized model does not pass onnx's check: {error}") from error


def _objection(model: ModelProto | Path, *, full: bool) -> Exception | None:
    try:
        onnx.checker.check_model(str(model) if isinstance(model, Path) else model, full_check=full)
    except Exception as error:  # checker and shape inference raise unrelated types
        return error
    return None


def _open(model: ModelProto | Path, kind: str = "quantized") -> Any:
    try:
        return open_session(model)
    except Exception as error:
        raise ModelError(f"onnxruntime cannot load the {kind} model: {error}") from error
