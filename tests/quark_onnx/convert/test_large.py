"""Models that are worked on through files: the same results, weights in a file of their own,
nothing left over.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from quark_onnx import convert
from quark_onnx.graph import store
from tests.models import parse, run, weight


@pytest.mark.parametrize(
    "to",
    [
        "float16",
        "bfloat16",
        "unique-initializers",
        "shared-initializers",
        "fixed-shapes",
    ],
)
def test_through_files(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = parse(
        "g (float[N,256] x) => (float[N,256] y) { h = MatMul (x, w) i = MatMul (h, v) y"
        " = MatMul (i, w) }",
        w=weight(256, 256),
        v=weight(256, 256, seed=1),
    )
    small = convert(model, to).model
    onnx.save(
        model, tmp_path / "in.onnx", save_as_external_data=True, location="in.bin"
    )
    monkeypatch.setattr(store, "LARGE_MODEL", 1000)
    done = convert(tmp_path / "in.onnx", to, tmp_path / "out.onnx")
    result = onnx.load(tmp_path / "out.onnx")
    assert (
        done.steps[0].outputs or to == "shared-initializers"
    )  # there is nothing to share
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "in.bin",
        "in.onnx",
        "out.onnx",
        "out.onnx.data",
    ]
    for a, b in zip(result.graph.initializer, small.graph.initializer, strict=True):
        np.testing.assert_array_equal(
            onnx.numpy_helper.to_array(a), onnx.numpy_helper.to_array(b)
        )
    if to != "bfloat16":
        sample = {"x": np.ones((1, 256), np.float32)}
        np.testing.assert_array_equal(run(result, sample)[0], run(small, sample)[0])


def test_the_default_of_an_input_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = parse(
        "g (float[N,256] x, float[256,256] w) => (float[N,256] y) { y = MatMul (x, w) }",
        w=weight(256, 256),
    )
    onnx.save(
        model, tmp_path / "in.onnx", save_as_external_data=True, location="in.bin"
    )
    monkeypatch.setattr(store, "LARGE_MODEL", 1000)
    convert(tmp_path / "in.onnx", "float16", tmp_path / "out.onnx")
    [default] = onnx.load(tmp_path / "out.onnx").graph.initializer
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(default), weight(256, 256))
