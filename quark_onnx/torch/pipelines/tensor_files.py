"""Files of a checkpoint that hold tensors, and their size."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path

from quark_onnx.torch.checkpoints.safetensors_io import Reader


def tensor_files(reader: Reader) -> set[Path]:
    """Return the files of a checkpoint; many tensors share a file."""
    return set(map(attrgetter("path"), reader.tensors.values()))


def size_of_files(reader: Reader) -> int:
    """Return the size of all tensor files of a checkpoint in bytes."""
    return sum(file.stat().st_size for file in tensor_files(reader))
