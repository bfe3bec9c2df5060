"""Read and write a model file with large initializers outside of the protobuf message.

protobuf copies the values whenever a message is parsed, copied, read or serialized. The wire format
is simple enough to find them without it (protobuf.dev/programming-guides/encoding): a field is a
tag, the field's number and one of four kinds of value, followed by the value.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError, EncodeError
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper

from calibrators.onnx_runtime.external_tensors import (
    EXCHANGED,
    copy_values,
    hold,
    is_stored,
    place,
    stored_bytes,
)
from calibrators.onnx_runtime.tensors import loaded, tensor_bytes

#: Smaller initializers (in bytes) stay in the message.
LEAST = 1 << 16
#: Smaller files (in bytes) are read by protobuf alone.
LEAST_FILE = 1 << 20
#: Most bytes of a protobuf message.
MESSAGE = 2**31 - 1

_GRAPH = ModelProto.DESCRIPTOR.fields_by_name["graph"].number
_INITIALIZER = ModelProto().graph.DESCRIPTOR.fields_by_name["initializer"].number
_RAW_DATA = TensorProto.DESCRIPTOR.fields_by_name["raw_data"].number
#: Kinds of values on the wire, and the sizes of those with a fixed size.
_VARINT, _LENGTH = 0, 2
_FIXED = {1: 8, 5: 4}

#: What parsing a damaged message raises: protobuf's implementation in Python raises the second
#: kind where a name is no UTF-8 text.
MALFORMED = DecodeError, UnicodeDecodeError


class _Field(NamedTuple):
    """A field of a message: positions of the tag, of the value and of its end."""

    number: int
    kind: int
    tag: int
    start: int
    end: int


class _Values(NamedTuple):
    """Position of the values of an initializer, given by index, in a file."""

    initializer: int
    start: int
    length: int


def read_model(path: Path) -> tuple[ModelProto, list[NDArray[Any]]] | None:
    """Read a model whose large initializers are held tensors.

    Args:
        path: the model file.

    Returns:
        The model, and the arrays of the held tensors, which last as long as the arrays. None if
        the file is small, names two initializers alike, or can be read by protobuf alone, which
        then reports what is wrong.
    """
    arrays: list[NDArray[Any]] = []
    try:
        with path.open("rb") as file:
            # Only the pages that are looked at are read: tags, lengths and the remaining message.
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                if len(data) < LEAST_FILE:
                    return None
                message, positions = _split(data)
            model = ModelProto()
            model.ParseFromString(message)
            # onnxruntime takes the last of several initializers of one name, and held values are
            # given by name.
            names = {tensor.name for tensor in model.graph.initializer}
            if len(names) < len(model.graph.initializer):
                return None
            for values in positions:
                # The pages are read when the values are needed, and take no memory of the process.
                array = np.asarray(
                    np.memmap(path, np.uint8, "r", values.start, values.length)
                )
                tensor = model.graph.initializer[values.initializer]
                held = hold_raw(tensor, array)
                if held is None:
                    # A type that cannot be held, or a wrong number of values, which
                    # ``check_tensor`` reports.
                    tensor.raw_data = array.tobytes()
                else:
                    arrays.append(held)
    # protobuf reads the file once more, and its errors are reported with the file's name.
    except (OSError, ValueError, *MALFORMED):
        return None
    return model, arrays


def write_model(model: ModelProto, path: Path) -> None:
    """Write a model to one file, with the values of stored tensors in the message.

    The file has the bytes of the loaded model, which is never in memory.

    Args:
        model: the model, which is not changed.
        path: the file.

    Raises:
        EncodeError: the file would be larger than a message can be.
    """
    if not any(is_stored(tensor) for tensor in model.graph.initializer):
        path.write_bytes(loaded(model).SerializeToString())
        return
    light = ModelProto()
    light.CopyFrom(model)
    # Values of initializers by index, moved from the message to the file in their place.
    values: dict[int, TensorProto] = {}
    for index, tensor in enumerate(light.graph.initializer):
        if is_stored(tensor):
            values[index] = model.graph.initializer[index]
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
    message = loaded(light).SerializeToString()
    if len(message) + sum(map(stored_bytes, values.values())) > MESSAGE:
        raise EncodeError("a protobuf message ends at 2 GB")
    with path.open("wb") as file:
        for field in _fields(message, 0, len(message)):
            if field.number != _GRAPH:
                file.write(message[field.tag : field.end])
                continue
            pieces = list(_graph_pieces(message, field, values))
            length = sum(
                stored_bytes(piece) if isinstance(piece, TensorProto) else len(piece)
                for piece in pieces
            )
            file.write(_head(_GRAPH, length))
            for piece in pieces:
                if isinstance(piece, TensorProto):
                    copy_values(piece, file)
                else:
                    file.write(piece)


def _graph_pieces(
    message: bytes, graph: _Field, values: dict[int, TensorProto]
) -> Iterator[bytes | TensorProto]:
    """Yield the contents of a graph: bytes, and the tensors whose values belong between them.

    Args:
        message: the message that the graph is a field of.
        values: tensors with the values of initializers, by index; the message lacks these values.
    """
    count = 0
    for field in _fields(message, graph.start, graph.end):
        if field.number != _INITIALIZER:
            yield message[field.tag : field.end]
            continue
        tensor = values.get(count)
        count += 1
        if tensor is None:
            yield message[field.tag : field.end]
            continue
        # protobuf writes fields in the order of their numbers.
        middle = field.start
        for inner in _fields(message, field.start, field.end):
            if inner.number < _RAW_DATA:
                middle = inner.end
        head = _head(_RAW_DATA, stored_bytes(tensor))
        length = field.end - field.start + len(head) + stored_bytes(tensor)
        yield _head(_INITIALIZER, length) + message[field.start : middle] + head
        yield tensor
        yield message[middle : field.end]


def written_by_reference(path: Path) -> Path:
    """Write a model file next to another one, to whose large initializers it refers.

    Programs that read external data without loading it open the new file in little memory.

    Args:
        path: a model file, to be left where it is while the new file is used.

    Returns:
        The new file; ``path`` itself if it has no large initializers.
    """
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        message, positions = _split(data)
    if not positions:
        return path
    model = ModelProto.FromString(message)
    for values in positions:
        tensor = model.graph.initializer[values.initializer]
        place(tensor, path.name, values.start, values.length)
    beside = path.with_name(f"{path.name}.light")
    beside.write_bytes(model.SerializeToString())
    return beside


def mentions(path: Path, text: bytes) -> bool:
    """Return whether a model file contains a text, apart from the values of large initializers.

    A byte search is much faster than parsing the model. False for a file that cannot be read.

    Args:
        path: the model file, which may not exist or not be a model.
        text: the bytes to look for.
    """
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            try:
                return text in _split(data)[0]
            except ValueError:  # malformed
                return data.find(text) >= 0
    except (OSError, ValueError):  # absent or empty
        return False


def hold_raw(tensor: TensorProto, data: NDArray[np.uint8]) -> NDArray[Any] | None:
    """Hold a tensor by its raw values.

    Args:
        tensor: a tensor without values, changed in place.
        data: the values as bytes, in the layout of ``raw_data``.

    Returns:
        The array that the tensor refers to, as long as it lasts. None if the type cannot be held,
        or the number of values does not fit the shape; the tensor is then unchanged.
    """
    fits = tensor.data_type in EXCHANGED and tensor_bytes(tensor) == data.nbytes
    if not fits or is_stored(tensor) or min(tensor.dims, default=1) < 1:
        return None
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    array = data.view(dtype).reshape(tuple(tensor.dims))
    # Copies of the tensor share the array.
    array.setflags(write=False)
    hold(tensor, array)
    return array


def _split(data: mmap.mmap) -> tuple[bytes, list[_Values]]:
    """Return the message of a model file without large values, and the positions of these values.

    Large initializers lack ``raw_data`` in the message.

    Raises:
        ValueError: the message is malformed.
    """
    message = bytearray()
    positions: list[_Values] = []
    count = 0
    # Several graph fields are valid, as parsers merge them: ``count`` goes on over all of them.
    for field in _fields(data, 0, len(data)):
        if field.number != _GRAPH or field.kind != _LENGTH:
            message += data[field.tag : field.end]
            continue
        graph = bytearray()
        for inner in _fields(data, field.start, field.end):
            if inner.number != _INITIALIZER or inner.kind != _LENGTH:
                graph += data[inner.tag : inner.end]
                continue
            raw = None
            if inner.end - inner.start >= LEAST:
                raw = _raw_field(data, inner)
            if raw is None:
                graph += data[inner.tag : inner.end]
            else:
                tensor = data[inner.start : raw.tag] + data[raw.end : inner.end]
                graph += _message(_INITIALIZER, tensor)
                positions.append(_Values(count, raw.start, raw.end - raw.start))
            count += 1
        message += _message(_GRAPH, graph)
    return bytes(message), positions


def _raw_field(data: mmap.mmap, tensor: _Field) -> _Field | None:
    """Return the field of a tensor's raw values.

    None if the values are few, repeated, or stored in another field.
    """
    fields = [
        field
        for field in _fields(data, tensor.start, tensor.end)
        if field.number == _RAW_DATA
    ]
    # Of repeated values protobuf takes the last; such a tensor stays in the message.
    if len(fields) != 1 or fields[0].end - fields[0].start < LEAST:
        return None
    return fields[0]


def _fields(data: mmap.mmap | bytes, start: int, end: int) -> Iterator[_Field]:
    """Yield the fields of the message between two positions of a file.

    Raises:
        ValueError: a field is malformed, or ends after the message.
    """
    position = start
    while position < end:
        tag = position
        key, position = _varint(data, position)
        # A key is the number of the field, shifted by three bits, and the kind of the value.
        kind = key & 7
        if kind == _VARINT:
            _, stop = _varint(data, position)
        elif kind == _LENGTH:
            length, position = _varint(data, position)
            stop = position + length
        elif kind in _FIXED:
            stop = position + _FIXED[kind]
        else:
            raise ValueError(f"kind {kind} at {tag}")
        if stop > end:
            raise ValueError(f"a field at {tag} ends at {stop}, the message at {end}")
        yield _Field(key >> 3, kind, tag, position, stop)
        position = stop


def _varint(data: mmap.mmap | bytes, position: int) -> tuple[int, int]:
    """Return an integer of seven bits per byte, and the position after it.

    Raises:
        ValueError: the integer has more than 64 bits, or the file ends in it.
    """
    value = shift = 0
    # An integer of 64 bits takes ten bytes at most; a longer one would never end.
    while position < len(data) and shift < 64:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise ValueError(f"no integer ends at {position}")


def _message(number: int, value: bytes | bytearray) -> bytes:
    """Return a field that holds a message."""
    return _head(number, len(value)) + bytes(value)


def _head(number: int, length: int) -> bytes:
    """Return the tag and the length before the value of a field that holds bytes."""
    return bytes([*_encoded(number << 3 | _LENGTH), *_encoded(length)])


def _encoded(value: int) -> list[int]:
    """Return the bytes of an unsigned integer as a varint: seven bits per byte, lowest first."""
    digits = []
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return [*digits, value]
