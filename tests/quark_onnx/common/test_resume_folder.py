"""A folder of results keeps what was finished, and nothing that is half, foreign or of another run.

Runs that are killed are in the tests of the two journals that use it.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from pathlib import Path

import pytest

from quark_onnx.common.errors import ConfigError
from quark_onnx.common.resume_folder import ResumeFolder

NAMES = re.compile(r"part-\d\.txt")
MARKS = {"model": "a", "data": "b"}


def opened(path: Path) -> ResumeFolder:
    folder = ResumeFolder(path)
    folder.open()
    return folder


def content(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_a_result_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "folder"
    assert opened(path).keep("part-1.txt", lambda file: file.write_text("one"))
    folder = opened(path)
    assert folder.read("part-1.txt", content) == "one"
    assert folder.names("*.txt") == ["part-1.txt"]
    folder.remove("part-1.txt")
    folder.remove("part-1.txt")
    assert folder.read("part-1.txt", content) is None and not list(path.iterdir())


def test_without_a_folder_nothing_is_stored() -> None:
    folder = ResumeFolder()
    folder.open()
    assert not folder.keep("part-1.txt", lambda file: file.write_text("one"))
    assert folder.read("part-1.txt", content) is None and folder.names("*") == []
    assert not folder.claim(MARKS, NAMES)


def test_an_error_amid_a_write_leaves_the_earlier_result(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, tries = opened(tmp_path), list[str]()
    folder.keep("part-1.txt", lambda file: file.write_text("one"))

    def full(file: Path) -> None:
        tries.append(file.name)
        file.write_text("ha")
        raise OSError(28, "No space left on device", str(file))

    for name in ("part-1.txt", "part-2.txt"):
        assert not folder.keep(name, full)
    assert tries == ["part-1.txt"], "after an error nothing more is stored"
    assert caplog.text.count("part-1.txt could not be kept") == 1
    assert "No space left on device; this run keeps no further results" in caplog.text
    assert opened(tmp_path).read("part-1.txt", content) == "one"
    assert not (tmp_path / "part-2.txt").exists()
    assert opened(tmp_path).keep("part-2.txt", lambda file: file.write_text("two"))


def test_damage_is_logged_and_computed_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = opened(tmp_path)
    (tmp_path / "part-1.txt").write_bytes(b"\xff")
    (tmp_path / "part-2.txt").mkdir()
    with caplog.at_level(logging.WARNING):
        for name in ("part-1.txt", "part-2.txt"):
            assert folder.read(name, content) is None
            assert f"{name} is damaged" in caplog.text


def test_a_single_flipped_bit_is_damage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Formats of files notice damage in their headers alone."""
    folder = opened(tmp_path)
    for text in ("one", "two"):  # each write replaces the file and its checksum
        folder.keep("part-1.txt", lambda file, text=text: file.write_text(text))
        assert folder.read("part-1.txt", content) == text
    (tmp_path / "part-1.txt").write_text("twn")
    assert folder.read("part-1.txt", content) is None
    assert "its content does not have its checksum" in caplog.text


def test_a_run_that_is_killed_between_checksum_and_result_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = opened(tmp_path)
    folder.keep("part-1.txt", lambda file: file.write_text("one"))
    replace = Path.replace

    def killed(path: Path, target: Path) -> Path:
        if target.name == "part-1.txt":
            raise KeyboardInterrupt
        return replace(path, target)

    for _ in range(3):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Path, "replace", killed)
            folder.keep("part-1.txt", lambda file: file.write_text("two"))
        assert opened(tmp_path).read("part-1.txt", content) == "one"


def test_a_folder_belongs_to_one_run(tmp_path: Path) -> None:
    assert not opened(tmp_path).claim(MARKS, NAMES)
    folder = opened(tmp_path)
    assert folder.claim(MARKS, NAMES)
    folder.keep("part-1.txt", lambda file: file.write_text("one"))
    with pytest.raises(ConfigError, match="work of another run: its data differs"):
        opened(tmp_path).claim(MARKS | {"data": "c"}, NAMES)
    assert folder.read("part-1.txt", content) == "one"
    # Without marks, results are those of a run that had stopped before it claimed the folder.
    (tmp_path / "state.json").unlink()
    assert not folder.claim(MARKS, NAMES)
    assert folder.read("part-1.txt", content) is None
    (tmp_path / "state.json").write_text("[", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"no JSON.*remove the folder to start anew"):
        folder.claim(MARKS, NAMES)


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    for name in ("mine.txt", "part-1.txt"):
        (tmp_path / name).write_text(name, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"holds other files, as mine\.txt; name an"):
        opened(tmp_path).claim(MARKS, NAMES)
    assert {path.name: content(path) for path in tmp_path.iterdir()} == {
        "mine.txt": "mine.txt",
        "part-1.txt": "part-1.txt",
    }


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("here", encoding="utf-8")
    for path in (file, file / "below"):
        with pytest.raises(ConfigError, match=r"resume folder .*file.* cannot be read"):
            opened(path)
    assert content(file) == "here"


@pytest.mark.skipif(
    sys.platform == "win32" or os.geteuid() == 0,
    reason="root, and Windows, may write there",
)
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(ConfigError, match="Permission denied"):
            opened(tmp_path)
    finally:
        tmp_path.chmod(0o700)
