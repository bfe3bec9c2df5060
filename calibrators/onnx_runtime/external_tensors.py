"""Read external tensors: values in a file with an absolute path, loaded on demand.

A model file names its data files relative to itself; ``locate`` makes the path absolute, so that a
tensor can be used without the model that it comes from.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import set_external_data

#: Bytes copied at a time.
_PART = 1 << 22


def is_stored(tensor: TensorProto) -> bool:
    """Return whether the values are external, in a file."""
    return bool(tensor.data_location == TensorProto.EXTERNAL)


def locate(tensor: TensorProto, path: Path, offset: int, length: int) -> None:
    """Let a tensor refer to ``length`` bytes of a file by its absolute path."""
    place(tensor, str(path.absolute()), offset, length)


def place(tensor: TensorProto, name: str, offset: int, length: int) -> None:
    """Let a tensor refer to ``length`` bytes of a file called ``name``."""
    # onnx refuses tensors that have no raw_data.
    tensor.raw_data = b""
    set_external_data(tensor, name, offset, length)
    tensor.ClearField("raw_data")


def location(tensor: TensorProto) -> tuple[Path, int, int]:
    """Return file, offset and length in bytes of an external tensor's values."""
    info = {entry.key: entry.value for entry in tensor.external_data}
    return Path(info["location"]), int(info["offset"]), int(info["length"])


def values(tensor: TensorProto) -> NDArray[Any]:
    """Return the values of a tensor, read-only.

    External values are mapped into memory, not loaded.
    """
    if not is_stored(tensor):
        return numpy_helper.to_array(tensor)
    path, offset, length = location(tensor)
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))
    # Packed types (several values to a byte) and empty tensors cannot be mapped.
    if length != math.prod(tensor.dims) * dtype.itemsize or not length:
        with path.open("rb") as file:
            file.seek(offset)
            return numpy_helper.to_array(
                TensorProto(
                    data_type=tensor.data_type,
                    dims=tensor.dims,
                    raw_data=file.read(length),
                ),
            )
    mapped = np.memmap(path, dtype, "r", offset, math.prod(tensor.dims))
    return np.asarray(mapped).reshape(tuple(tensor.dims))


def copy_values(tensor: TensorProto, file: IO[bytes]) -> int:
    """Copy the bytes of an external tensor to a file, and return their number."""
    path, offset, length = location(tensor)
    with path.open("rb") as source:
        source.seek(offset)
        remaining = length
        while remaining:
            chunk = source.read(min(remaining, _PART))
            if not chunk:
                raise OSError(f"{path} has become shorter than it was")
            file.write(chunk)
            remaining -= len(chunk)
    return length


def load_values(tensor: TensorProto) -> None:
    """Load the values of an external tensor into memory."""
    path, offset, length = location(tensor)
    with path.open("rb") as file:
        file.seek(offset)
        tensor.raw_data = file.read(length)
    del tensor.external_data[:]
    tensor.ClearField("data_location")
