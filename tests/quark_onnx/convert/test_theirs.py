"""Models that onnxruntime's own quantizer wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from quark_onnx import convert
from tests.models import Feeds, residual, run

quantization = pytest.importorskip("onnxruntime.quantization")


def theirs(form: str, folder: Path, data: list[Feeds]) -> ModelProto:
    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            self.rest = iter(data)

        def get_next(self) -> Any:
            return next(self.rest, None)

    onnx.save(residual(), folder / "float.onnx")
    quantization.quantize_static(
        folder / "float.onnx",
        folder / "out.onnx",
        Reader(),
        getattr(quantization.QuantFormat, form),
    )
    return onnx.load(folder / "out.onnx")


@pytest.mark.filterwarnings("ignore")
def test_operators_become_pairs(tmp_path: Path, data: list[Feeds]) -> None:
    model = theirs("QOperator", tmp_path, data)
    done = convert(model, "qoperator-to-qdq").model
    assert any(node.op_type.startswith("QLinear") for node in model.graph.node)
    assert not any(
        node.op_type.startswith("QLinear") or node.domain for node in done.graph.node
    )
    for sample in data:
        a, b = run(model, sample)[0], run(done, sample)[0]
        assert np.linalg.norm(a - b) < 0.05 * np.linalg.norm(a)
    bare = convert(done, "without-qdq").model
    for sample in data:
        a, b = run(residual(), sample)[0], run(bare, sample)[0]
        assert np.linalg.norm(a - b) < 0.05 * np.linalg.norm(a)


@pytest.mark.filterwarnings("ignore")
def test_pairs_without_pairs(tmp_path: Path, data: list[Feeds]) -> None:
    bare = convert(theirs("QDQ", tmp_path, data), "without-qdq").model
    assert not any(node.op_type.endswith("tizeLinear") for node in bare.graph.node)
    for sample in data:
        a, b = run(residual(), sample)[0], run(bare, sample)[0]
        assert np.linalg.norm(a - b) < 0.05 * np.linalg.norm(a)
