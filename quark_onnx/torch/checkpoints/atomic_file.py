"""Atomic storage of the state of a long computation, which can be resumed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from quark_onnx.torch.runtime.checkpoint_folder import write_errors


class State:
    """Tensors by name, stored in a file.

    Args:
        file: path; None to store nothing.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file

    def read(self) -> dict[str, Any]:
        """Return the tensors of the last write; empty without a readable file."""
        if self._file is None:
            return {}
        try:
            return dict(load_file(str(self._file)))
        # Without a state, or with a damaged one, the computation begins anew.
        except (OSError, SafetensorError):
            return {}

    def write(self, tensors: Mapping[str, Any]) -> None:
        """Replace the stored tensors."""
        if self._file is not None:
            save(self._file, tensors)


def save(
    path: Path,
    tensors: Mapping[str, Any],
    notes: Mapping[str, str] | None = None,
) -> None:
    """Write tensors to a file atomically.

    Args:
        path: the file.
        tensors: tensors by name.
        notes: metadata of the file.
    """
    # safetensors refuses tensors that share memory, and tensors that are not contiguous.
    copies = {
        name: tensor.detach().cpu().contiguous().clone()
        for name, tensor in tensors.items()
    }
    metadata = None if notes is None else dict(notes)
    put_in_place(path, lambda file: save_file(copies, str(file), metadata))


def put_in_place(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file atomically, through a temporary file.

    Args:
        path: the file.
        write: function that writes the file of a given path.

    Raises:
        ConfigError: the system does not write it, for instance to a full disk.
    """
    # In the folder of the file, so that the replacement stays on one file system.
    temporary = path.with_suffix(".tmp")
    with write_errors(path):
        try:
            write(temporary)
        # safetensors' own writer has no other error for the system's, such as a full disk.
        except SafetensorError as error:
            raise OSError(None, str(error), str(path)) from error
        temporary.replace(path)
