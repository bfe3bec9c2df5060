"""Atomic storage of the state of a long computation, which can be resumed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from quark_onnx.common.resume_folder import ResumeFolder


class State:
    """Tensors by name, stored in a file.

    Args:
        folder: the folder; None to store nothing.
        name: name of the file.
    """

    def __init__(self, folder: ResumeFolder | None = None, name: str = "") -> None:
        self._folder = folder or ResumeFolder()
        self._name = name

    def read(self) -> dict[str, Any]:
        """Return the tensors of the last write; empty without a readable file."""
        # Without a state, or with a damaged one, the computation begins anew.
        return self._folder.read(self._name, load_file) or {}

    def write(self, tensors: Mapping[str, Any]) -> None:
        """Replace the stored tensors."""
        self._folder.keep(self._name, lambda path: save(path, tensors))


def save(
    path: Path,
    tensors: Mapping[str, Any],
    notes: Mapping[str, str] | None = None,
) -> None:
    """Write tensors to a file.

    Args:
        path: the file.
        tensors: tensors by name.
        notes: metadata of the file.

    Raises:
        OSError: the system does not write the file, for instance to a full disk.
    """
    # safetensors refuses tensors that share memory, and tensors that are not contiguous.
    copies = {
        name: tensor.detach().cpu().contiguous().clone()
        for name, tensor in tensors.items()
    }
    try:
        save_file(copies, str(path), None if notes is None else dict(notes))
    # safetensors' own writer has no other error for the system's.
    except SafetensorError as error:
        raise OSError(None, str(error), str(path)) from error
