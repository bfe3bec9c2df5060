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
        _check(model)
    return model, measure(open_session(original), _open(model), samples)


def save(model: ModelProto, output: Path, sample: Sample, *, external: bool) -> None:
    """Write the model to a temporary file, check that file, run it on a sample, and only then rename it.

    Args:
        external: keep large tensors in a second file even if protobuf could hold them.

    Raises:
        ModelError: the file cannot be written, or is not what it should be; then nothing is left behind.
    """

    def verify(path: Path) -> None:
        _check(path)
        run_session(_open(path), sample)

    stored = ModelProto()
    stored.CopyFrom(model)  # writing external data moves the tensors out of the object
    write(stored, output, external=external, verify=verify)


def _check(model: ModelProto | Path) -> None:
    try:
        onnx.checker.check_model(str(model) if isinstance(model, Path) else model, full_check=True)
    except Exception as error:  # checker and shape inference raise unrelated types
        raise ModelError(f"the quantized model does not pass onnx's check: {error}") from error


def _open(model: ModelProto | Path) -> Any:
    try:
        return open_session(model)
    except Exception as error:
        raise ModelError(f"onnxruntime cannot load the quantized model: {error}") from error
