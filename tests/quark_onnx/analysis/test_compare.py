"""compare: the error between any two models on the user's data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quark_onnx import compare, quantize_static
from quark_onnx.common.errors import ConfigError, DataError, ModelError
from tests.models import conv_relu, detector_head, residual, run, samples
from tests.settings import TENSOR


def test_the_error_is_that_of_the_outputs(tmp_path: Path) -> None:
    model, data = residual(), samples(residual(), 5)
    path = tmp_path / "q.onnx"
    quantized = quantize_static(model, data, TENSOR, path)
    found = compare(model, path, data)
    reference, other = (
        np.stack([run(m, f)[0] for f in data]).astype(np.float64)
        for m in (model, quantized)
    )
    expected = 10 * np.log10((reference**2).sum() / ((reference - other) ** 2).sum())
    assert found.sqnr == pytest.approx(
        expected, abs=0.1
    )  # onnxruntime optimizes the one and not the other
    assert (found.samples, [o.name for o in found.outputs]) == (5, ["y"])
    assert (found.bytes_before, found.bytes_after) == (
        model.ByteSize(),
        path.stat().st_size,
    )


def test_a_model_equals_itself() -> None:
    assert compare(residual(), residual(), samples(residual())).sqnr == float("inf")


def test_only_so_many_samples() -> None:
    assert (
        compare(residual(), residual(), iter(samples(residual(), 9)), limit=4).samples
        == 4
    )


@pytest.mark.parametrize("limit", [0, -1, 2.5, "x"])
def test_a_limit_is_a_number_of_samples(limit: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"limit is .*; it must be a whole number of at least 1"
    ):
        compare(residual(), residual(), samples(residual()), limit=limit)


def test_what_cannot_be_compared() -> None:
    data = samples(residual())
    other = residual()
    other.graph.output[0].name = other.graph.node[-1].output[0] = "z"
    with pytest.raises(
        ModelError, match="the other model lacks the output 'y' of the reference"
    ):
        compare(residual(), other, data)
    broken = conv_relu()
    broken.graph.node[0].op_type = "NoSuchOperator"
    with pytest.raises(ModelError, match="onnxruntime cannot load the other model"):
        compare(residual(), broken, data)
    with pytest.raises(DataError, match="the model has no input"):
        compare(residual(), residual(), [{"z": data[0]["x"]}])
    with pytest.raises(DataError):
        compare(residual(), residual(), [])
    with pytest.raises(ModelError):
        compare(residual(), detector_head(), data)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ModelError, match=r"model file nowhere\.onnx cannot be read"):
        compare("nowhere.onnx", residual(), [])
