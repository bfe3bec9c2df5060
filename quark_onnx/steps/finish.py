"""finish: check the quantized model, measure it against the float one, stamp it, and write it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx
from onnx import ModelProto

from calibrators.session import open_session
from quark_onnx.errors import ModelError
from quark_onnx.graph import Graph
from quark_onnx.graph.io import write
from quark_onnx.report.measure import OutputError, measure
from quark_onnx.steps.run import Sample, run_session


def finish(
    graph: Graph, original: ModelProto, samples: Sequence[Sample], output: Path | None, *, external: bool = False
) -> tuple[ModelProto, list[OutputError]]:
    """The finished model and its error at each output.

    With an ``output`` the model is written to a temporary file first; that file is checked and run on a sample, and only
    then renamed.

    Raises:
        ModelError: the model does not pass the check or does not run. That would be a defect; nothing is written.
    """
    graph.infer()
    model = graph.to_model()
    if output is None:
        if model.ByteSize() < onnx.checker.MAXIMUM_PROTOBUF:
            _check(model)
        session = _open(model)
    else:

        def verify(path: Path) -> None:
            _check(path)
            run_session(_open(path), samples[0])

        stored = ModelProto()
        stored.CopyFrom(model)
        write(stored, output, external=external, verify=verify)
        session = _open(output)
    return model, measure(open_session(original), session, samples)


def _check(model: ModelProto | Path) -> None:
    try:
        onnx.checker.check_model(str(model) if isinstance(model, Path) else model, full_check=True)
    except Exception as error:  # checker and shape inference raise unrelated types
        raise ModelError(f"the quantized model does not pass onnx's check: {error}") from error


def _open(model: ModelProto | Path):  # type: ignore[no-untyped-def]
    try:
        return open_session(model)
    except Exception as error:
        raise ModelError(f"onnxruntime cannot load the quantized model: {error}") from error
