"""--overwrite: replace the folder of an earlier result."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from calibrators.scratch import followed
from quark_onnx.cli.parsing import UsageError

#: Files that identify a folder as an earlier result.
#: Anything else may be a folder of the user's own files.
_MARKS = ("config.json", "genai_config.json", "model.gguf", "model.onnx")


@contextmanager
def overwriting(folder: Path, *, wanted: bool) -> Iterator[None]:
    """Move an earlier result aside; restore it if no new one is written (context manager).

    Args:
        folder: folder of the result.
        wanted: True if --overwrite was given; otherwise nothing is moved.

    Raises:
        UsageError: the folder holds files other than an earlier result.
    """
    # A link stays: the folder that it leads to is moved.
    folder = followed(folder)
    # An empty folder needs no replacement: the writers accept it.
    if not wanted or not folder.is_dir() or not any(folder.iterdir()):
        yield
        return
    if not any((folder / name).is_file() for name in _MARKS):
        raise UsageError(
            f"--overwrite: {folder} holds no earlier result, as it has none of"
            f" {', '.join(_MARKS)}; name another folder",
        )
    # Beside the folder: a rename does not cross file systems.
    aside = folder.with_name(f".{folder.name}.before")
    if aside.exists():
        raise UsageError(
            f"--overwrite: {aside} holds the result that a killed run has moved aside;"
            " move it back or remove it",
        )
    # A rename: a run that is killed leaves the earlier result whole, aside.
    folder.replace(aside)
    try:
        yield
    # Ctrl-C as well: the earlier result comes back, and a partial one goes.
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        aside.replace(folder)
        raise
    # An action may end without writing, as when a gate is missed.
    if folder.exists():
        shutil.rmtree(aside)
    else:
        aside.replace(folder)
