"""Read external tensors: values in a file with an absolute path, or in an array of this process.

A model file names its data files relative to itself; ``locate`` makes the path absolute, so that a
tensor can be used without the model that it comes from. ``hold`` keeps values in memory, but out of
the protobuf message: models that share an array can be copied, and opened in a session, without
another copy of the values.
"""

from __future__ import annotations

import math
import secrets
from itertools import count
from pathlib import Path
from typing import IO, Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import set_external_data

#: Bytes copied at a time.
_PART = 1 << 22
#: Arrays of held tensors by location. The random part keeps model files from naming them.
_HELD = f"*/held/{secrets.token_hex(8)}/"
_arrays: WeakValueDictionary[str, NDArray[Any]] = WeakValueDictionary()
_numbers = count()
#: Types that onnxruntime exchanges with numpy, and that both lay out like ``raw_data``.
EXCHANGED = frozenset(
    {
        TensorProto.FLOAT,
        TensorProto.DOUBLE,
        TensorProto.FLOAT16,
        TensorProto.INT8,
        TensorProto.UINT8,
        TensorProto.INT16,
        TensorProto.UINT16,
        TensorProto.INT32,
        TensorProto.UINT32,
        TensorProto.INT64,
        TensorProto.UINT64,
        TensorProto.BOOL,
    },
)


def is_stored(tensor: TensorProto) -> bool:
    """Return whether the values are external: in a file, or in an array of this process."""
    return bool(tensor.data_location == TensorProto.EXTERNAL)


def is_held(tensor: TensorProto) -> bool:
    """Return whether the values are in an array of this process."""
    return is_stored(tensor) and _location(tensor).startswith(_HELD)


def is_on_disk(tensor: TensorProto) -> bool:
    """Return whether the values are in a file."""
    return is_stored(tensor) and not _location(tensor).startswith(_HELD)


def hold(tensor: TensorProto, array: NDArray[Any]) -> None:
    """Let a tensor, and copies of it, refer to an array.

    The values last as long as the array, to which a tensor has no reference of its own.

    Args:
        tensor: a tensor of a type in ``EXCHANGED``, without values.
        array: the values in C order, of the tensor's type and shape. They must not change.
    """
    name = f"{_HELD}{next(_numbers)}"
    _arrays[name] = array
    place(tensor, name, 0, array.nbytes)


def held_key(tensor: TensorProto) -> str:
    """Return a key that is unique to the array in this process."""
    return _location(tensor)


def held_values(tensor: TensorProto) -> NDArray[Any]:
    """Return the array of a held tensor."""
    return _arrays[_location(tensor)]


def file_of(array: NDArray[Any]) -> tuple[Path, int, int] | None:
    """Return file, offset and length in bytes of an array that is mapped from a file.

    None for other arrays, and if the file is gone: a mapping outlasts the name.
    """
    mapped: Any = array
    while mapped is not None and not isinstance(mapped, np.memmap):
        mapped = getattr(mapped, "base", None)
    if mapped is None or mapped.filename is None or not Path(mapped.filename).is_file():
        return None
    # The mapping may be larger than the array, which is a part of it.
    inside = (
        array.__array_interface__["data"][0] - mapped.__array_interface__["data"][0]
    )
    return Path(mapped.filename), mapped.offset + inside, array.nbytes


def _location(tensor: TensorProto) -> str:
    for entry in tensor.external_data:
        if entry.key == "location":
            return str(entry.value)
    return ""


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
    """Return file, offset and length in bytes of the values of a tensor in a file."""
    # Offset and length are always there: ``place`` has written them.
    info = {entry.key: entry.value for entry in tensor.external_data}
    return Path(info["location"]), int(info["offset"]), int(info["length"])


def stored_bytes(tensor: TensorProto) -> int:
    """Return the size of the values of an external tensor."""
    if is_held(tensor):
        return held_values(tensor).nbytes
    return location(tensor)[2]


def values(tensor: TensorProto) -> NDArray[Any]:
    """Return the values of a tensor, read-only.

    Values in a file are mapped into memory, not loaded.
    """
    if not is_stored(tensor):
        return numpy_helper.to_array(tensor)
    if is_held(tensor):
        return held_values(tensor)
    path, offset, length = location(tensor)
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))
    # Packed types (several values to a byte) and empty tensors cannot be mapped.
    if length != math.prod(tensor.dims) * dtype.itemsize or not length:
        copy = TensorProto()
        copy.CopyFrom(tensor)
        load_values(copy)
        return numpy_helper.to_array(copy)
    mapped = np.memmap(path, dtype, "r", offset, math.prod(tensor.dims))
    # np.asarray drops the subclass, which later operations would carry along.
    return np.asarray(mapped).reshape(tuple(tensor.dims))


def copy_values(tensor: TensorProto, file: IO[bytes]) -> int:
    """Copy the bytes of an external tensor to a file, and return their number."""
    if is_held(tensor):
        return file.write(raw_bytes(held_values(tensor)))
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
    """Load the values of an external tensor into the message."""
    if is_held(tensor):
        tensor.raw_data = bytes(raw_bytes(held_values(tensor)))
    else:
        path, offset, length = location(tensor)
        with path.open("rb") as file:
            file.seek(offset)
            tensor.raw_data = file.read(length)
    # A tensor with values and a reference would be ambiguous.
    del tensor.external_data[:]
    tensor.ClearField("data_location")


def raw_bytes(array: NDArray[Any]) -> memoryview:
    """Return the bytes of an array in C order, uncopied if they lie so."""
    return array.reshape(-1).view(np.uint8).data
