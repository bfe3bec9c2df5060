"""A safetensors file that is written tensor by tensor, with low memory use.

The safetensors library writes a file from all tensors at once. The header with the offsets comes
first in the file. The values are therefore collected in a temporary file, which is appended to the
header at the end. For alignment, tensors whose size is no multiple of eight bytes come last, wide
elements before narrow elements.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from quark_onnx.common.errors import ModelError
from quark_onnx.torch.runtime.safetensors_header import header_bytes

#: The names of types in the format.
TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex64: "C64",
    torch.bool: "BOOL",
}
#: Bytes of the widest element.
_ALIGNMENT = 8
#: Bytes that are copied at once behind the header.
_COPIED = 1 << 24


class TensorFile:
    """File of tensors, written tensor by tensor.

    Args:
        path: path of the file after ``close``.
        notes: further metadata of the file.

    Attributes:
        path: path of the file after ``close``.
        size: size of the tensors in bytes.
    """

    def __init__(self, path: Path, notes: Mapping[str, str] | None = None) -> None:
        self.path, self._notes = path, notes or {}
        self.size = 0
        self._values = path.with_name(f"{path.name}.values")
        self._file = self._values.open("wb")
        self._entries: dict[str, Any] = {}
        self._small: list[tuple[str, Any]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor, or keep it for ``close`` if it would break the alignment.

        Raises:
            ModelError: the format does not support the dtype.
        """
        if tensor.dtype not in TYPES:
            raise ModelError(
                f"the tensor {name!r} is {tensor.dtype}, which safetensors files have no place for",
            )
        tensor = tensor.detach().cpu().contiguous()
        size = tensor.numel() * tensor.element_size()
        self.size += size
        if size % _ALIGNMENT:
            # A copy, since a view would keep the memory of its base until ``close``.
            self._small.append((name, tensor.clone()))
        else:
            self._write(name, tensor)

    def _write(self, name: str, tensor: torch.Tensor) -> None:
        """Append the values of a contiguous tensor on the CPU, and keep its entry."""
        start = self._file.tell()
        if tensor.numel():
            # As bytes, since numpy has no bfloat16 and no float8. Not by ``tofile``, whose error
            # lacks the reason of the system.
            self._file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        self._entries[name] = {
            "dtype": TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, self._file.tell()],
        }

    def close(self) -> None:
        """Write the remaining tensors, then the header and the values."""
        for name, tensor in sorted(
            self._small,
            key=lambda entry: -entry[1].element_size(),
        ):
            self._write(name, tensor)
        self._small.clear()
        self._file.close()
        metadata = {"format": "pt", **self._notes}
        with self.path.open("wb") as file, self._values.open("rb") as values:
            file.write(header_bytes({"__metadata__": metadata, **self._entries}))
            shutil.copyfileobj(values, file, _COPIED)
        self._values.unlink()

    def abandon(self) -> None:
        """Close the temporary file without a result."""
        # ``Writer`` removes the folder with the file. A full disk has no place for buffered bytes.
        with contextlib.suppress(OSError):
            self._file.close()
