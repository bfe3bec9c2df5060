"""Conversion of a float checkpoint to another element type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from quark_onnx.common.errors import ConfigError
from quark_onnx.common.wording import counted
from quark_onnx.config.checks import require_known
from quark_onnx.torch.checkpoints.decoded import DecodedTensor
from quark_onnx.torch.checkpoints.parameter_sources import Sources
from quark_onnx.torch.checkpoints.safetensors_io import (
    CheckpointReader,
    Writer,
    other_files,
    read_json,
)
from quark_onnx.torch.checkpoints.safetensors_writer import TYPES as FILE_TYPES
from quark_onnx.torch.runtime.checkpoint_folder import check_apart
from quark_onnx.torch.runtime.safetensors_header import StoredTensor

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
    check_apart(output, source)
    content = read_json(source / "config.json")
    if content.get(dtype_key(content)) == dtype:
        return source
    reader = CheckpointReader(source)
    with Writer(output) as writer:
        for name in reader:
            writer.add(name, _cast(reader.get(name), TYPES[dtype], name))
        writer.write_json("config.json", with_type(content, dtype))
        for file in other_files(source):
            writer.copy(file)
    return output


def dtype_key(content: Mapping[str, Any]) -> str:
    """Return the key of a config.json that has the element type."""
    # transformers wrote torch_dtype before release 4.56.
    return "torch_dtype" if "torch_dtype" in content else "dtype"


def with_type(content: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return a config.json whose model has another element type."""
    key = dtype_key(content)
    # Configurations of several modalities have the type in each part.
    parts = {
        name: part | {key: dtype}
        for name, part in content.items()
        if isinstance(part, dict) and isinstance(part.get(key), str)
    }
    return {**content, **parts, key: dtype}


def narrow_doubles(
    reader: CheckpointReader, dtype: torch.dtype, model: Callable[[], Any]
) -> None:
    """Let a reader return a model's float64 tensors in another type.

    Reading raises ConfigError if a finite value becomes infinite.

    Args:
        reader: the reader, whose ``tensors`` and ``notes`` are changed.
        dtype: the type.
        model: function that returns the model with empty parameters.
    """
    doubles = [name for name, tensor in reader.tensors.items() if tensor.dtype == "F64"]
    if not doubles:
        return
    sources = Sources(reader, model())
    for name, _ in model().named_parameters(remove_duplicate=False):
        sources.mark(name)
    for name, _ in model().named_buffers():
        sources.mark(name)
    # Tensors that the model does not know are copied as they are.
    narrowed = {
        name: _narrowed(reader.tensors[name], dtype)
        for name in doubles
        if name in sources.used
    }
    if narrowed:
        reader.tensors = reader.tensors | narrowed
        reader.notes.append(
            f"{counted(len(narrowed), 'tensor is', 'tensors are')} float64 in"
            f" {reader.folder}; they are cast to {str(dtype).removeprefix('torch.')}"
        )


def _narrowed(tensor: StoredTensor, dtype: torch.dtype) -> DecodedTensor:
    return DecodedTensor(
        tensor.name,
        tensor.shape,
        FILE_TYPES[dtype],
        tensor.path,
        decode=lambda: _cast(tensor.read(), dtype, tensor.name),
        stored=tensor.parts,
    )


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
