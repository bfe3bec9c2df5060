"""Tensors of torch's own files (.bin), which are pickles.

``torch.load`` with ``weights_only`` builds tensors and plain containers alone, and runs no code of
the file. Values are mapped into memory, and read when they are used.
"""

from __future__ import annotations

import pickle
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch

from quark_onnx.common.errors import ModelError
from quark_onnx.torch.checkpoints.safetensors_writer import TYPES
from quark_onnx.torch.runtime.safetensors_header import StoredTensor


@dataclass(frozen=True)
class PickledTensor(StoredTensor):
    """Tensor of a pickled file.

    Attributes:
        values: the tensor, mapped into memory.
    """

    values: Any = field(default=None, repr=False)

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """No tensors: the file has no header by which values could be read ahead."""
        return ()

    def read(self) -> torch.Tensor:
        """Return a copy of the tensor, in its stored type."""
        tensor: torch.Tensor = self.values.clone(memory_format=torch.contiguous_format)
        return tensor


def pickled_heads(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a pickled file by name.

    Raises:
        ModelError: the file is damaged, or holds other objects than tensors by name.
    """
    try:
        # The format of torch before release 1.6 is no archive, and cannot be mapped.
        loaded = torch.load(
            path, map_location="cpu", weights_only=True, mmap=is_zipfile(path)
        )
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise ModelError(
            f"{path} is damaged, or no file of tensors: {error}; download it again"
        ) from error
    except pickle.UnpicklingError as error:
        # torch's text advises to load it without ``weights_only``, which would run the code
        raise ModelError(
            f"{path} is a pickle with more than tensors in it, which may run code:"
            f" {_refused_name(error)}; have the model saved as safetensors"
        ) from error
    if not isinstance(loaded, dict):
        raise ModelError(
            f"{path} holds a {type(loaded).__name__}; tensors by name are needed"
        )
    tensors = dict[str, StoredTensor]()
    for name, value in loaded.items():
        is_tensor = isinstance(value, torch.Tensor) and value.layout == torch.strided
        if not is_tensor or value.dtype not in TYPES:
            kind = type(value).__name__
            if isinstance(value, torch.Tensor):
                kind = f"tensor of {value.dtype} and {value.layout}"
            raise ModelError(
                f"{path}: {name!r} is a {kind}; save the model as safetensors"
            )
        shape, dtype = tuple(value.shape), TYPES[value.dtype]
        tensors[str(name)] = PickledTensor(str(name), shape, dtype, path, values=value)
    return tensors


def _refused_name(error: pickle.UnpicklingError) -> str:
    """Return which function or class a pickle names, out of torch's message."""
    match = re.search(r"(?:GLOBAL|Unsupported \w+:?|class) ([\w.]+\w)", str(error))
    return f"it names {match[1]}" if match else "an object of another kind"
