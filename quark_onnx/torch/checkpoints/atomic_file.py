"""Store the state of a long computation in a file atomically, so that it can be resumed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file


class State:
    """Tensors by name.

    Args:
        file: where; None keeps nothing.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file

    def read(self) -> dict[str, Any]:
        """What was written last; nothing where there is no whole file."""
        if self._file is None:
            return {}
        try:
            return dict(load_file(str(self._file)))
        except (OSError, SafetensorError):
            return {}

    def write(self, tensors: Mapping[str, Any]) -> None:
        """In place of what was written before."""
        if self._file is not None:
            save(self._file, tensors)


def save(
    path: Path,
    tensors: Mapping[str, Any],
    notes: Mapping[str, str] | None = None,
) -> None:
    """Tensors in a file that is there whole, or as it was before.

    Args:
        notes: beside them.
    """
    own = {
        name: tensor.detach().cpu().contiguous().clone()
        for name, tensor in tensors.items()
    }
    put_in_place(
        path,
        lambda temporary: save_file(
            own,
            str(temporary),
            None if notes is None else dict(notes),
        ),
    )


def put_in_place(path: Path, write: Callable[[Path], object]) -> None:
    """A file that is there whole, or as it was before."""
    temporary = path.with_suffix(".tmp")
    write(temporary)
    temporary.replace(path)
