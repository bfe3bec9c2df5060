"""Whether a model keeps weights in other files, found out without reading it a second time."""

from __future__ import annotations

import sys
from pathlib import Path

import onnx
import pytest
from onnx import numpy_helper

from quark_onnx.common.errors import ConfigError
from quark_onnx.files.overwrites import refuse_overwrites
from quark_onnx.writing.destination import keeps_weights_beside
from tests.models import parse, weight


def dense(folder: Path, *, external: bool) -> Path:
    model = parse("g (float[N,8] x) => (float[N,4] y) { y = MatMul (x, w) }")
    model.graph.initializer.append(numpy_helper.from_array(weight(8, 4), "w"))
    path = folder / "model.onnx"
    onnx.save(
        model,
        path,
        save_as_external_data=external,
        location="weights.bin",
        size_threshold=0,
    )
    return path


def test_a_model_in_one_file_is_not_parsed_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = dense(tmp_path, external=False)
    parsed = list[Path]()
    monkeypatch.setattr(
        sys.modules[refuse_overwrites.__module__], "read_stored", parsed.append
    )
    assert not keeps_weights_beside(path, tmp_path / "out.onnx")
    assert parsed == []


def test_weights_in_another_file_are_found_and_not_replaced(tmp_path: Path) -> None:
    path = dense(tmp_path, external=True)
    assert keeps_weights_beside(path, tmp_path / "out.onnx")
    with pytest.raises(
        ConfigError, match=r"would replace 'weights.bin', which holds weights"
    ):
        keeps_weights_beside(path, tmp_path / "weights.bin")


@pytest.mark.parametrize("content", [b"", b"location"])
def test_what_is_no_model_has_no_weights(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "odd.onnx").write_bytes(content)
    assert not keeps_weights_beside(tmp_path / "odd.onnx", tmp_path / "out.onnx")
    assert not keeps_weights_beside(tmp_path / "missing.onnx", tmp_path / "out.onnx")
