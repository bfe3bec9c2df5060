"""--overwrite: an earlier result is replaced by a new one, and comes back where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quark_onnx.cli.dispatch import build_parser
from quark_onnx.cli.overwrite import overwriting
from quark_onnx.cli.parsing import UsageError


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A folder with an earlier result."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "config.json").write_text("earlier")
    return folder


def test_a_new_result_replaces_an_earlier_one(earlier: Path, tmp_path: Path) -> None:
    with overwriting(earlier, wanted=True):
        assert not earlier.exists(), "there is room for the new one"
        earlier.mkdir()
        (earlier / "model.gguf").write_text("new")
    assert not (tmp_path / ".out.before").exists()
    assert [path.name for path in earlier.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_brings_the_earlier_one_back(
    earlier: Path, tmp_path: Path, error: type[BaseException]
) -> None:
    with pytest.raises(error), overwriting(earlier, wanted=True):
        earlier.mkdir()
        (earlier / "half").write_text("")
        raise error
    assert not (tmp_path / ".out.before").exists()
    assert (earlier / "config.json").read_text() == "earlier"
    assert not (earlier / "half").exists()


def test_nothing_moves_without_the_option(earlier: Path) -> None:
    with overwriting(earlier, wanted=False):
        assert (earlier / "config.json").is_file()


def test_what_is_no_result_is_never_replaced(earlier: Path, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "cat.jpg").write_text("")
    with (
        pytest.raises(UsageError, match="photos holds no earlier result"),
        overwriting(photos, wanted=True),
    ):
        pass
    (tmp_path / ".out.before").mkdir()
    with (
        pytest.raises(UsageError, match="a killed run has moved aside"),
        overwriting(earlier, wanted=True),
    ):
        pass
    assert (photos / "cat.jpg").is_file() and (earlier / "config.json").is_file()


def test_a_run_that_writes_nothing_leaves_the_earlier_one(
    earlier: Path, tmp_path: Path
) -> None:
    with overwriting(earlier, wanted=True):
        pass
    assert (earlier / "config.json").read_text() == "earlier"
    assert not (tmp_path / ".out.before").exists()


@pytest.mark.parametrize(
    "command",
    [
        "quantize model.onnx -o out.onnx --dynamic",
        "calibrate model.onnx -o ranges.json --data data",
        "convert model.onnx -o out.onnx --to float16",
        "explain model.onnx",
        "npu legalize model.onnx -o out.onnx",
        "npu cut model.onnx -o out.onnx second.onnx --at c",
        "npu deploy model.onnx -o bundle --random-data 4 --min-sqnr 0",
        "list presets",
    ],
)
def test_every_command_takes_the_option(cli: Any, command: str) -> None:
    """Files and bundles are replaced with it as without it."""
    words = [word for word in command.split() if word.endswith((".onnx", ".json"))]
    for name in words[1:]:
        Path(name).write_text("earlier")
    assert cli(*command.split(), "--overwrite").code == 0
    assert all(Path(name).read_bytes() != b"earlier" for name in words[1:])
    assert cli(*command.split(), "--overwrite").code == 0


def test_help_says_what_happens_to_an_earlier_output() -> None:
    """The help of -o of each command names replacement, or the option that asks for it."""
    every: dict[str, Any] = dict(build_parser()[1])
    for name in ("npu", "llm"):
        (actions,) = [each for each in every[name]._actions if each.dest == "action"]
        every |= {f"{name} {action}": each for action, each in actions.choices.items()}
    outputs = {
        name: parser.options["-o"].help or ""
        for name, parser in every.items()
        if "-o" in parser.options
    }
    assert len(outputs) == 12
    for name, text in outputs.items():
        assert "replace" in text or "--overwrite" in text, name
