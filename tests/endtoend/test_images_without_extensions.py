"""The documented way to read images without onnxruntime-extensions gives the same samples."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from calibrators.readers.open import ImageSpec, InputSpec, open_reader
from tests.models import parse, weight
from tests.pictures import pictures

ROOT = Path(__file__).parents[2]
Image = pytest.importorskip("PIL.Image")


@pytest.fixture
def documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of the code in the documentation, after it has run on a few images."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    for place, picture in enumerate(pictures(8, size=48)):
        pixels = picture[0].transpose(1, 2, 0).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{place}.png")
    model = parse(
        """g (float[N, 3, 224, 224] input) => (float[N, 4, 1, 1] y) {
            a = Conv <strides = [8, 8]> (input, w)
            y = GlobalAveragePool (a)
        }""",
        w=weight(4, 3, 8, 8),
    )
    onnx.save(model, "model.onnx")
    text = (ROOT / "docs" / "howto" / "data.md").read_text(encoding="utf-8")
    section = text.split("### Images without onnxruntime-extensions")[1]
    (code,) = re.findall(r"```python\n(.*?)```", section.split("\n## ")[0], re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    return names


def test_the_model_is_written(documented: dict[str, Any]) -> None:
    onnx.checker.check_model("quantized.onnx", full_check=True)


@pytest.mark.images
def test_the_samples_are_those_of_the_reader(documented: dict[str, Any]) -> None:
    """Up to two steps of a pixel, as Pillow rounds to whole pixels after each axis."""
    spec = ImageSpec(
        size=(224, 224), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
    )
    reader = open_reader(
        "images", [InputSpec("input", None, (1, 3, 224, 224))], images=spec
    )
    for own, read in zip(documented["samples"]("images"), reader, strict=True):
        assert own["input"].dtype == read["input"].dtype == np.float32
        np.testing.assert_allclose(own["input"], read["input"], atol=2.01 / 255 / 0.224)
