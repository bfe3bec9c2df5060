"""Tensors whose values lie in a file, by an absolute path, and are read as they are needed.

What a model file says of its data files is relative to it; ``locate`` makes it absolute, so that a
tensor can be handed on without the model that it comes from.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import set_external_data

#: Bytes that are copied at a time.
_PART = 1 << 22


def is_stored(tensor: TensorProto) -> bool:
    """Whether the values lie in a file."""
    return bool(tensor.data_location == TensorProto.EXTERNAL)


def locate(tensor: TensorProto, path: Path, offset: int, length: int) -> None:
    """Let the values of a tensor be those bytes of a file."""
    place(tensor, str(path.absolute()), offset, length)


def place(tensor: TensorProto, name: str, offset: int, length: int) -> None:
    """Say that the values of a tensor are those bytes of a file, whatever ``name`` is relative to."""  # noqa: E501
    tensor.raw_data = b""  # which onnx wants to see first
    set_external_data(tensor, name, offset, length)
    tensor.ClearField("raw_data")


def location(tensor: TensorProto) -> tuple[Path, int, int]:
    """File, offset and length in bytes of a stored tensor's values."""
    info = {entry.key: entry.value for entry in tensor.external_data}
    return Path(info["location"]), int(info["offset"]), int(info["length"])


def values(tensor: TensorProto) -> NDArray[Any]:
    """The values of a tensor, read-only.

    Those of a stored one are mapped into memory, not loaded.
    """
    if not is_stored(tensor):
        return numpy_helper.to_array(tensor)
    path, offset, length = location(tensor)
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))
    if (
        length != math.prod(tensor.dims) * dtype.itemsize or not length
    ):  # several to a byte, or none
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
    """Write the bytes of a stored tensor to a file, a part at a time; how many."""
    path, offset, length = location(tensor)
    with path.open("rb") as source:
        source.seek(offset)
        rest = length
        while rest:
            part = source.read(min(rest, _PART))
            if not part:
                raise OSError(f"{path} has become shorter than it was")
            file.write(part)
            rest -= len(part)
    return length


def load_values(tensor: TensorProto) -> None:
    """Bring the values of a stored tensor into memory."""
    path, offset, length = location(tensor)
    with path.open("rb") as file:
        file.seek(offset)
        tensor.raw_data = file.read(length)
    del tensor.external_data[:]
    tensor.ClearField("data_location")
