"""The embedded example: a trained network keeps its accuracy on images that it never saw."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from quark_onnx import QConfig, compare, quantize_static
from tests.models import Array, Feeds
from tests.settings import portable

FOLDER = Path(__file__).parents[2] / "examples" / "digits"
MODEL = FOLDER / "digits.onnx"


@cache
def digits() -> tuple[list[Feeds], Array, Array]:
    """Calibration samples, test images and their labels."""
    with np.load(FOLDER / "digits.npz") as arrays:
        calibration, test = (
            arrays[name] / np.float32(16) for name in ("calibration", "test")
        )
        return (
            [{"image": images} for images in np.split(calibration, 8)],
            test,
            arrays["labels"],
        )


def accuracy(model: Path) -> float:
    _, images, labels = digits()
    session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    (scores,) = session.run(None, {"image": images})
    return float((scores.argmax(axis=1) == labels).mean())


def test_the_float_model_is_good() -> None:
    assert accuracy(MODEL) == pytest.approx(0.9889, abs=1e-4)


@pytest.mark.parametrize(
    ("preset", "points", "floor"),
    [("A8W8", 1, 25), ("S8S8", 1, 25), ("A16W8", 1, 30), ("XINT8", 2, 15)],
)
def test_a_quantized_model_is_about_as_good(
    tmp_path: Path, preset: str, points: float, floor: float
) -> None:
    samples, images, _ = digits()
    output = tmp_path / "out.onnx"
    quantize_static(MODEL, samples, portable(QConfig.of(preset)), output)
    assert accuracy(output) >= accuracy(MODEL) - points / 100
    assert output.stat().st_size < MODEL.stat().st_size / 2
    assert compare(MODEL, output, [{"image": images}]).sqnr >= floor


@pytest.mark.parametrize(
    "calibrator",
    [
        "minmax",
        "mean_minmax",
        "best",
        "percentile",
        "layerwise_percentile",
        "entropy",
        "minmse",
        "nonoverflow",
    ],
)
def test_with_any_calibrator(tmp_path: Path, calibrator: str) -> None:
    output = tmp_path / "out.onnx"
    quantize_static(MODEL, digits()[0], {"calibrator": calibrator}, output)
    assert accuracy(output) >= accuracy(MODEL) - 0.01
