"""--overwrite: an earlier result is replaced by a new one, and comes back where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

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
    with overwriting(earlier, tmp_path / "model", wanted=True):
        assert not earlier.exists(), "there is room for the new one"
        earlier.mkdir()
        (earlier / "model.gguf").write_text("new")
    assert not (tmp_path / ".out.before").exists()
    assert [path.name for path in earlier.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_brings_the_earlier_one_back(
    earlier: Path, tmp_path: Path, error: type[BaseException]
) -> None:
    with pytest.raises(error), overwriting(earlier, tmp_path, wanted=True):
        earlier.mkdir()
        (earlier / "half").write_text("")
        raise error
    assert not (tmp_path / ".out.before").exists()
    assert (earlier / "config.json").read_text() == "earlier"
    assert not (earlier / "half").exists()


def test_nothing_moves_without_the_option(earlier: Path, tmp_path: Path) -> None:
    with overwriting(earlier, tmp_path, wanted=False):
        assert (earlier / "config.json").is_file()


def test_what_is_no_result_is_never_replaced(earlier: Path, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "cat.jpg").write_text("")
    with (
        pytest.raises(UsageError, match="photos holds no earlier result"),
        overwriting(photos, earlier, wanted=True),
    ):
        pass
    with (
        pytest.raises(UsageError, match="is the model that is quantized"),
        overwriting(earlier, earlier, wanted=True),
    ):
        pass
    (tmp_path / ".out.before").mkdir()
    with (
        pytest.raises(UsageError, match="a killed run has moved aside"),
        overwriting(earlier, photos, wanted=True),
    ):
        pass
    assert (photos / "cat.jpg").is_file() and (earlier / "config.json").is_file()
