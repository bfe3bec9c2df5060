"""Folders for onnxruntime-genai."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from quark_onnx.common.errors import ModelError
from quark_onnx.torch.validate import validate
from quark_onnx.torch.validate.finding import Validation
from tests.models import conv_relu

CONFIG = {"model": {"decoder": {"filename": "model.onnx"}}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration, and a model with external data."""
    model = conv_relu()
    weight = numpy_helper.from_array(np.ones((64, 64), np.float32), "unused")
    model.graph.initializer.append(weight)
    onnx.save(
        model,
        tmp_path / "model.onnx",
        save_as_external_data=True,
        location="model.onnx.data",
        size_threshold=0,
    )
    (tmp_path / "genai_config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return tmp_path


def checked(folder: Path) -> Validation:
    return validate(folder, "onnxruntime-genai")


def test_a_whole_folder(folder: Path) -> None:
    verdict = checked(folder)
    assert verdict.right and not verdict.findings
    assert "passes all rules of onnxruntime-genai" in verdict.text()


@pytest.mark.parametrize(
    ("name", "content", "rule"),
    [
        ("genai_config.json", None, "genai-none"),
        ("genai_config.json", "{", "genai-config"),
        ("genai_config.json", "[]", "genai-config"),
        ("genai_config.json", '{"model": {"decoder": []}}', "genai-config"),
        ("model.onnx", None, "genai-file"),
        ("model.onnx", "no model", "genai-file"),
        ("model.onnx.data", None, "genai-file"),
    ],
)
def test_what_is_missing_or_damaged(
    folder: Path, name: str, content: str | None, rule: str
) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content, encoding="utf-8")
    verdict = checked(folder)
    assert [finding.rule for finding in verdict.findings] == [rule]
    assert verdict.word == "refused"


@pytest.mark.parametrize(
    "config",
    [
        {"decoder": {"filename": "../../base/m.onnx"}},
        {"decoder": {"filename": "/base/m.onnx"}},
        {
            "decoder": {"filename": "model.onnx"},
            "vision": {"filename": "../vision.onnx"},
        },
        {
            "decoder": {
                "filename": "model.onnx",
                "pipeline": [{"embeddings": {"filename": "a/../../e.onnx"}}],
            }
        },
    ],
)
def test_files_outside_of_the_folder(folder: Path, config: object) -> None:
    """Every file that the configuration names is in the folder."""
    text = json.dumps({"model": config})
    (folder / "genai_config.json").write_text(text, encoding="utf-8")
    verdict = checked(folder)
    (finding,) = verdict.findings
    assert finding.rule == "genai-file" and "outside of the folder" in finding.found
    assert verdict.word == "refused"


def test_external_data_outside_of_the_folder(folder: Path) -> None:
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    for entry in model.graph.initializer[0].external_data:
        if entry.key == "location":
            entry.value = "../model.onnx.data"
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    (finding,) = checked(folder).findings
    assert finding.rule == "genai-file" and "outside of the folder" in finding.found


def test_a_library_is_named(folder: Path) -> None:
    options = {"session_options": {"custom_ops_library": "ops.so"}}
    text = json.dumps({"model": {"decoder": {"filename": "model.onnx", **options}}})
    (folder / "genai_config.json").write_text(text, encoding="utf-8")
    (finding,) = checked(folder).findings
    assert (finding.rule, finding.severity) == ("genai-library", "warning")


def test_deep_configurations(folder: Path) -> None:
    (folder / "genai_config.json").write_text("[" * 100_000, encoding="utf-8")
    (finding,) = checked(folder).findings
    assert finding.rule == "genai-config" and "inside of each other" in finding.found


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is no folder"):
        checked(tmp_path / "none")


def test_a_folder_in_place_of_the_configuration(folder: Path) -> None:
    (folder / "genai_config.json").unlink()
    (folder / "genai_config.json").mkdir()
    (finding,) = checked(folder).findings
    assert finding.rule == "genai-config" and "regular file" in finding.found
