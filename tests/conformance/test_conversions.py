"""What every registered conversion promises, on float and quantized models."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from quark_onnx import QConfig, convert, quantize
from quark_onnx.cli import main
from quark_onnx.common.errors import ConfigError, ModelError
from quark_onnx.common.registry import CONVERSIONS
from quark_onnx.convert import Converted
from tests.cases import loop_over
from tests.models import MODELS, canonical, run, samples

#: Settings that a conversion cannot do without.
SETTINGS: dict[str, dict[str, Any]] = {"opset": {"opset": 21}}
#: A value of each setting that not every conversion reads.
UNREAD: dict[str, Any] = {"opset": 21, "shapes": {"x": [1, 4, 8, 8]}, "io": True}
FLOATS = ("transformer_block", "branches", "shared_weight")
#: What the CPU provider of onnxruntime has no kernels for: bfloat16, and AMD Vitis' operators.
WITHOUT_KERNELS = ("bfloat16", "vitis-names")
PRESETS = {
    "int8": QConfig.of("A8W8"),
    "int16": QConfig.of("A16W8"),
    "operators": QConfig.of("A8W8").with_(form="operators"),
    "vendor": QConfig.of("S16S8").with_(form="vendor"),
    "blocks": QConfig.of("INT4"),
}

every_conversion = pytest.mark.parametrize("name", CONVERSIONS)
every_model = loop_over("kind", {kind: kind for kind in (*FLOATS, *PRESETS)})


@cache
def made(kind: str) -> ModelProto:
    """A float model by its name, or a quantized one by that of its preset."""
    if kind in FLOATS:
        return MODELS[kind]()
    model, config = MODELS["residual"](), PRESETS[kind]
    data = samples(model, 4) if config.measures else None
    return quantize(model, data, config).model


@cache
def once(name: str, kind: str) -> Converted:
    return converted(name, made(kind))


def converted(name: str, model: ModelProto, output: Path | None = None) -> Converted:
    return convert(model, name, output, **SETTINGS.get(name, {}))


def check_equal_outputs(before: ModelProto, after: ModelProto, rtol: float) -> None:
    """Both models compute the same on inputs of the converted one, whose shapes are closed."""
    for feeds in samples(after, 2):
        for expected, found in zip(run(before, feeds), run(after, feeds), strict=True):
            atol = rtol * max(1.0, np.abs(expected).max(initial=0))
            np.testing.assert_allclose(found, expected, rtol=rtol, atol=atol)


@every_model
@every_conversion
def test_it_keeps_what_it_claims(name: str, kind: str) -> None:
    model = made(kind)
    before = canonical(model)
    result = once(name, kind)
    assert canonical(model) == before, "the caller's model is never changed"
    [step] = result.steps
    assert (step.name, step.keeps) == (name, CONVERSIONS[name].keeps)
    if not step.notes:
        assert canonical(result.model) == before, "no notes, and it differs"
        return
    onnx.checker.check_model(result.model, full_check=True)
    for values in ("input", "output"):
        assert [value.name for value in getattr(result.model.graph, values)] == [
            value.name for value in getattr(model.graph, values)
        ]
    if step.keeps == "exactly" and name not in WITHOUT_KERNELS:
        check_equal_outputs(model, result.model, 1e-5)


@every_model
@every_conversion
def test_it_is_deterministic(name: str, kind: str) -> None:
    again = converted(name, made(kind))
    assert canonical(again.model) == canonical(once(name, kind).model)
    assert again.steps == once(name, kind).steps


@every_model
@every_conversion
def test_a_second_conversion_changes_no_result(name: str, kind: str) -> None:
    first = once(name, kind).model
    again = converted(name, first)
    if CONVERSIONS[name].keeps != "no":
        assert canonical(again.model) == canonical(first)
    elif name not in WITHOUT_KERNELS:
        check_equal_outputs(
            first, again.model, 0
        )  # what was rounded is rounded to itself


@every_conversion
def test_its_file_is_the_model(name: str, tmp_path: Path) -> None:
    written = converted(name, made("int8"), tmp_path / "out.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["out.onnx"]
    expected = once(name, "int8").model
    assert canonical(written.model) == canonical(expected)
    assert canonical(onnx.load(tmp_path / "out.onnx")) == canonical(expected)


@every_conversion
def test_an_unreadable_file_is_refused_and_nothing_written(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "text.onnx").write_text("no model", encoding="utf-8")
    with pytest.raises(ModelError, match=r"text\.onnx"):
        convert(
            tmp_path / "text.onnx",
            name,
            tmp_path / "out.onnx",
            **SETTINGS.get(name, {}),
        )
    assert [path.name for path in tmp_path.iterdir()] == ["text.onnx"]


@every_conversion
def test_settings_that_it_does_not_read_are_refused(name: str) -> None:
    conversion = CONVERSIONS[name]
    assert set(conversion.reads) <= UNREAD.keys()
    for setting in UNREAD.keys() - set(conversion.reads):
        with pytest.raises(ConfigError, match=f"^{setting} is given, which only "):
            convert(made("shared_weight"), name, **{setting: UNREAD[setting]})


def test_all_are_listed_with_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "conversions", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["conversions"]
    assert [row["name"] for row in listed] == list(CONVERSIONS)
    for conversion in CONVERSIONS.values():
        assert conversion.summary.endswith(".")


def test_an_unknown_name_finds_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown conversion 'flot16'; did you mean"):
        convert(made("shared_weight"), "flot16")
