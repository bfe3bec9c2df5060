"""Declared shapes that contradict the operators, or a run, are corrected with a note.

Runtimes infer shapes themselves and only warn about a wrong declaration, until a rewrite lets them
read it. Inputs are what callers have to feed: their shapes stay, and data that does not fit is
refused with both shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import ModelProto, TensorProto, helper

from quark_onnx import analyze, compare, convert, quantize
from quark_onnx.check.declared_shapes import contradicted_shapes
from quark_onnx.common.errors import DataError, ModelError
from quark_onnx.common.registry import PRESETS
from quark_onnx.config import QConfig
from quark_onnx.files.io import load
from quark_onnx.graph.shapes import sizes_of
from tests.cases import loop_over
from tests.models import MODELS, normal, parse, weight

Shape = Sequence[int | str | None]
DATA = [{"x": normal(2, 4, 32, seed=seed)} for seed in range(4)]
PRESETS_OF_THE_TABLE = [
    "A8W8",
    "A16W8",
    "XINT8",
    "W8",
    "INT4",
    "DYNAMIC",
    "BFP16",
    "BF16",
]
#: Wrong declarations by tensor; the outputs have the shape (N, 4, 32).
WRONG: dict[str, dict[str, Shape]] = {
    "output of rank 0": {"y": []},
    "output of lower rank": {"y": ["N", 4]},
    "output of higher rank": {"y": ["N", 1, 4, 32]},
    "output of other sizes": {"y": ["N", 4, 33]},
    "inner tensor of rank 0": {"h": []},
    "inner tensor of another rank": {"h": ["N", 32]},
    "inner tensor of other sizes": {"r": ["N", 5, 32]},
    "all": {"y": [], "h": [], "r": [7]},
}


def model(declared: dict[str, Shape], opset: int = 17) -> ModelProto:
    """Two layers with wrong declarations."""
    result = parse(
        "g (float[N,4,32] x) => (float[N,4,32] y)"
        " { h = MatMul (x, w) r = Relu (h) y = MatMul (r, v) }",
        opset=opset,
        w=weight(32, 32),
        v=weight(32, 32, seed=1),
    )
    for name, shape in declared.items():
        value = helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        if name == "y":
            result.graph.output[0].CopyFrom(value)
        elif name == "x":
            result.graph.input[0].CopyFrom(value)
        else:
            result.graph.value_info.append(value)
    return result


def shapes(found: ModelProto) -> dict[str, tuple[Any, ...]]:
    return {
        value.name: sizes_of(value)
        for value in (*found.graph.value_info, *found.graph.output)
    }


@pytest.mark.parametrize("preset", PRESETS_OF_THE_TABLE)
@pytest.mark.parametrize("case", WRONG)
def test_every_preset_corrects_the_shape(
    case: str, preset: str, tmp_path: Path
) -> None:
    """At an opset that is raised for some formats, too."""
    config = QConfig.of(preset)
    data = DATA if config.measures else None
    wrong = model(WRONG[case], opset=11)
    before = wrong.SerializeToString()
    result = quantize(wrong, data, config, tmp_path / "o.onnx")
    assert wrong.SerializeToString() == before
    onnx.checker.check_model(onnx.load(tmp_path / "o.onnx"), full_check=True)
    assert shapes(result.model)["y"] == ("N", 4, 32)
    names = [name for name in WRONG[case] if name != "y"]
    notes = [note for note in result.report.notes if "declared" in note]
    assert len(notes) == ("y" in WRONG[case]) + bool(names)
    # The same as without the wrong declaration.
    right = quantize(model({}, opset=11), data, config)
    found, expected = (
        [output.sqnr for output in each.report.outputs] for each in (result, right)
    )
    assert found == expected


@pytest.mark.parametrize("case", WRONG)
def test_other_commands_take_such_a_model(case: str) -> None:
    wrong = model(WRONG[case])
    quantized = quantize(wrong, DATA, "A8W8").model
    assert compare(wrong, quantized, DATA).samples == 4
    assert analyze(wrong, quantized, DATA).samples == 4
    converted = convert(wrong, "fixed-shapes").model
    assert shapes(converted)["y"] == (1, 4, 32)


def test_a_run_decides_where_inference_does_not() -> None:
    """A batch of 1 is declared for an output of an open batch, which inference lets pass."""
    declared = model({"y": [1, 4, 32]})
    result = quantize(declared, DATA, "A8W8")
    assert shapes(result.model)["y"] == (None, 4, 32)
    [note] = [note for note in result.report.notes if "is declared" in note]
    assert (
        "output 'y' is declared with the shape [1, 4, 32], and has [2, 4, 32]" in note
    )


@pytest.mark.parametrize(
    ("shape", "error", "message"),
    [
        ([], ModelError, "input 'x' has the rank 0; it takes 1 or more"),
        (["N", 4, 33], DataError, r"got shape \[2, 4, 32\], expected \[N, 4, 33\]"),
    ],
)
def test_inputs_stay_a_promise(
    shape: Shape, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        quantize(model({"x": shape}), DATA, "A8W8")


@loop_over("name", tuple(MODELS))
def test_right_declarations_stay(name: str) -> None:
    sound = MODELS[name]()
    assert contradicted_shapes(sound) == {}
    assert load(sound) is sound


def test_the_table_has_a_preset_of_each_kind() -> None:
    assert set(PRESETS_OF_THE_TABLE) <= set(PRESETS)
