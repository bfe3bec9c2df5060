"""QuantizationSpec: how a tensor is quantized, and what is said of settings that make no sense."""

from __future__ import annotations

from typing import Any

import pytest

from calibrators import Entropy, Grid, MinMax, MinMSE, Percentile
from quark_onnx import QuantizationSpec
from quark_onnx.common.errors import ConfigError
from quark_onnx.config import format_calibrator, parse_calibrator
from quark_onnx.dtypes import INT8, UINT8


def test_names_stand_for_formats_and_calibrators() -> None:
    spec = QuantizationSpec(
        "UInt8", symmetric=False, calibrator="percentile:percentile=99.9"
    )
    assert spec == QuantizationSpec(UINT8, symmetric=False, calibrator=Percentile(99.9))


def test_with_changes_a_copy() -> None:
    spec = QuantizationSpec()
    assert spec.with_(per_channel=True, calibrator="entropy") == QuantizationSpec(
        per_channel=True, calibrator=Entropy()
    )
    assert spec == QuantizationSpec(INT8, symmetric=True, calibrator=MinMax())


@pytest.mark.parametrize(
    ("spec", "grid"),
    [
        (QuantizationSpec("int8"), Grid(-128, 127)),
        (QuantizationSpec("int8", narrow=True), Grid(-127, 127)),
        (QuantizationSpec("uint8", narrow=True), Grid(0, 255)),
        (QuantizationSpec("uint8").as_onnxruntime, Grid(0, 255, even=True)),
        (QuantizationSpec("uint8", pow2=True), Grid(0, 255, pow2=True)),
        (QuantizationSpec("int8").as_onnxruntime, Grid(-128, 127)),
        (QuantizationSpec("uint8", symmetric=False), Grid(0, 255, symmetric=False)),
        (QuantizationSpec("int8", reduce_range=True), Grid(-64, 64)),
        (
            QuantizationSpec("int8", symmetric=False, reduce_range=True),
            Grid(-64, 63, symmetric=False),
        ),
        (QuantizationSpec("uint8", reduce_range=True), Grid(0, 127)),
        (QuantizationSpec("int16", pow2=True), Grid(-32768, 32767, pow2=True)),
        (QuantizationSpec("uint16", symmetric=False), Grid(0, 65535, symmetric=False)),
    ],
)
def test_the_codes_that_a_spec_uses(spec: QuantizationSpec, grid: Grid) -> None:
    assert spec.grid == grid


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "int9"}, "unknown number format 'int9'; did you mean 'int8'?"),
        (
            {"dtype": 8},
            "dtype is 8; it must be a number format; known: bfloat16, bfp16, float16, fp4e2m1",
        ),
        ({"symmetric": "yes"}, "symmetric is 'yes'; it must be true or false"),
        ({"pow2": 1}, "pow2 is 1; it must be true or false"),
        ({"calibrator": "minmx"}, "unknown calibrator 'minmx'; did you mean 'minmax'?"),
        (
            {"calibrator": 3},
            "calibrator is 3; it must be a calibrator or a name; known: best, entropy",
        ),
        (
            {"calibrator": "percentile:percentle=9"},
            "calibrator 'percentile' has no setting 'percentle'; did you mean 'percentile'?",
        ),
        (
            {"calibrator": "percentile:99"},
            "calibrator 'percentile:99': '99' is not of the form setting=value",
        ),
        (
            {"calibrator": "percentile:percentile=x"},
            "'x' is neither a number nor true or false",
        ),
        (
            {"per_chanel": True},
            "QuantizationSpec has no setting 'per_chanel'; did you mean 'per_channel'?",
        ),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        QuantizationSpec().with_(**settings)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "calibrator",
    [
        MinMax(),
        MinMax(moving_average=True, constant=0.5),
        Percentile(99.0),
        Entropy(),
        MinMSE(),
    ],
)
def test_a_calibrator_survives_its_text_form(calibrator: Any) -> None:
    assert parse_calibrator(format_calibrator(calibrator)) == calibrator


def test_a_spec_reads_as_a_phrase() -> None:
    spec = QuantizationSpec(
        "uint8", symmetric=False, calibrator="percentile:percentile=99.9"
    )
    assert str(spec) == "uint8 asymmetric percentile:percentile=99.9"
    assert (
        str(QuantizationSpec(per_channel=True, pow2=True))
        == "int8 symmetric per_channel pow2 minmax"
    )
