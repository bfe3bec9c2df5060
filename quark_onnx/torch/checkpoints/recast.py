"""Conversion of a float checkpoint to another element type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from quark_onnx.config.checks import require_known
from quark_onnx.errors import ConfigError
from quark_onnx.torch.checkpoints.safetensors_io import (
    Reader,
    Writer,
    other_files,
    read_json,
)

#: Element types by their names in configurations.
TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def recast(source: Path, output: Path, dtype: str) -> Path:
    """Write a checkpoint whose float tensors have another element type.

    The function holds a single tensor in memory.

    Args:
        source: Hugging Face folder.
        output: new folder; may exist if it is empty.
        dtype: "float16", "bfloat16" or "float32".

    Returns:
        The new folder; the source folder if it has the type already.

    Raises:
        ConfigError: the type is unknown, the folder is not empty, or a value exceeds the range of
            the type.
        ModelError: a file is missing or damaged.
    """
    require_known(dtype, TYPES, "dtype is")
    content = read_json(source / "config.json")
    # transformers wrote torch_dtype before release 4.56.
    key = "torch_dtype" if "torch_dtype" in content else "dtype"
    if content.get(key) == dtype:
        return source
    reader = Reader(source)
    with Writer(output) as writer:
        for name in reader:
            writer.add(name, _cast(reader.get(name), TYPES[dtype], name))
        # Configurations of several modalities have the type in each part.
        for part, value in content.items():
            if _has_type(value, key):
                content[part] = value | {key: dtype}
        writer.write_json("config.json", content | {key: dtype})
        for file in other_files(source):
            writer.copy(file)
    return output


def _has_type(part: Any, key: str) -> bool:
    """Return whether a part of a configuration has an element type of its own."""
    return isinstance(part, dict) and isinstance(part.get(key), str)


def _cast(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> Any:
    """Return a tensor in another type; integers are returned unchanged.

    Raises:
        ConfigError: a finite value becomes infinite.
    """
    if not tensor.is_floating_point():
        return tensor
    cast = tensor.to(dtype)
    # Infinities of the source stay.
    if tensor.numel() and bool((cast.isinf() & ~tensor.isinf()).any()):
        raise ConfigError(
            f"{name} has values of {float(tensor.abs().max()):.3g}, which {dtype} cannot hold",
        )
    return cast
