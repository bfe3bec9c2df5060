"""A model file that another program changes during a run never gives a mixture of two models.

Sessions open the file again, and weights are mapped from it. Whatever is replaced, and however,
the run ends with an error that names the file, and nothing is written.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from quark_onnx import quantize, quantize_dynamic, quantize_weights
from quark_onnx.common.errors import ModelError
from quark_onnx.files.unchanged import ModelFiles
from quark_onnx.planning import float_model
from tests.models import parse, weight

#: Weights of more than a megabyte are mapped from the file.
SIZES = {"small": 8, "mapped": 640}


def written(path: Path, size: int, factor: float, *, external: bool = False) -> Path:
    model = parse(
        f"g (float[1,{size}] x) => (float[1,{size}] y) {{ y = MatMul (x, w) }}",
        w=np.float32(factor) * weight(size, size),
    )
    onnx.save(
        model,
        path,
        save_as_external_data=external,
        location=f"{path.name}.data",
        size_threshold=0,
    )
    return path


def replaced(new: Path, old: Path) -> None:
    Path(new).replace(old)


def overwritten(new: Path, old: Path) -> None:
    shutil.copyfile(new, old)


RUNS: dict[str, Callable[[Path, Path], object]] = {
    "W8": lambda model, output: quantize_weights(model, "W8", output),
    "INT4": lambda model, output: quantize_weights(model, "INT4", output),
    "BF16": lambda model, output: quantize(model, None, "BF16", output=output),
    "DYNAMIC": lambda model, output: quantize_dynamic(model, output=output),
}


@pytest.mark.parametrize("change", [replaced, overwritten])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("run", RUNS)
def test_a_file_that_changes_after_it_was_read(
    run: str,
    size: str,
    change: Callable[[Path, Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = written(tmp_path / "m.onnx", SIZES[size], 1)
    other = written(tmp_path / "other.onnx", SIZES[size], 100)
    inlined = float_model.inlined

    def changing(opened: onnx.ModelProto) -> onnx.ModelProto:
        change(other, model)
        return inlined(opened)

    monkeypatch.setattr(float_model, "inlined", changing)
    output = tmp_path / "q.onnx"
    with pytest.raises(ModelError, match=r"m\.onnx was changed or replaced"):
        RUNS[run](model, output)
    assert not list(tmp_path.glob("q*"))


def test_another_model_is_named_rather_than_its_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session of another model would say that it lacks an input."""
    model = written(tmp_path / "m.onnx", 8, 1)
    inlined = float_model.inlined

    def changing(opened: onnx.ModelProto) -> onnx.ModelProto:
        onnx.save(parse("g (float[2] z) => (float[2] o) { o = Neg (z) }"), model)
        return inlined(opened)

    monkeypatch.setattr(float_model, "inlined", changing)
    with pytest.raises(ModelError, match="was changed or replaced"):
        quantize(model, [{"x": np.ones((1, 8), np.float32)}])


@pytest.mark.parametrize("name", ["m.onnx", "m.onnx.data"])
def test_each_file_of_a_model(name: str, tmp_path: Path) -> None:
    model = written(tmp_path / "m.onnx", 8, 1, external=True)
    files = ModelFiles.of(model)
    files.require_unchanged()
    stat = (tmp_path / name).stat()
    os.utime(tmp_path / name, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**9))
    with pytest.raises(ModelError, match=f"{name} was changed"):
        files.require_unchanged()


def test_files_that_are_gone_or_never_were(tmp_path: Path) -> None:
    model = written(tmp_path / "m.onnx", 8, 1)
    files = ModelFiles.of(model)
    model.unlink()
    files.require_unchanged()
    for other in (model, onnx.ModelProto(), tmp_path):
        ModelFiles.of(other).require_unchanged()
