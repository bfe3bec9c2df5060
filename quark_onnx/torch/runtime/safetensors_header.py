"""Headers of safetensors files: names, types, shapes and offsets of tensors.

The format: eight bytes with the length of a JSON header, the header, then the values without gaps
(https://github.com/huggingface/safetensors, README, "Format").
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from calibrators.json_file import parse_json
from calibrators.shown import short
from quark_onnx.common.errors import ModelError

if TYPE_CHECKING:
    import torch

#: Bits of an element, by its type's name.
BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(
        ("U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8
    ),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
#: Types of float weights and of scales in the layouts.
FLOATS = ("F32", "BF16", "F16")

#: Beginning of a pointer (https://github.com/git-lfs/git-lfs, docs/spec.md).
_POINTER = b"version https://git-lfs"
#: Bytes of the values that are read at once.
_PART = 2**26
#: The library refuses longer headers, too.
_LONGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class StoredTensor:
    """Tensor in a file.

    Attributes:
        name: name in the checkpoint.
        shape: shape of the tensor.
        dtype: type name in safetensors files: "BF16", "I32".
        path: the file.
        start: offset of the values, in bytes from the start of the file; 0 if they have no place of
            their own in a file, or none yet.
        size: size of the values in the file, in bytes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    path: Path
    start: int = 0
    size: int = 0

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"

    @property
    def count(self) -> int:
        """Number of values."""
        return prod(self.shape)

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """The tensors in files from which this tensor is read."""
        return (self,)

    def read(self) -> torch.Tensor:
        """Read the tensor, in its stored type.

        Raises:
            ModelError: the file cannot be read.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(self.path), framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(self.name)
                return tensor
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"{self.path}: the tensor {self.name!r} cannot be read: {error}",
            ) from error


@dataclass(frozen=True)
class Header:
    """Header of a safetensors file.

    Attributes:
        tensors: tensors by name, in the order of the file.
        metadata: pairs of strings.
        start: offset of the values, in bytes from the start of the file.
    """

    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]
    start: int


def read_header(file: Path) -> Header:
    """Read a header without the values, and check the header against the file.

    Args:
        file: a safetensors file.

    Returns:
        The header, with offsets of tensors from the start of the file.

    Raises:
        ModelError: the file is truncated, damaged, or not a safetensors file; the message gives the
            reason without the file name.
    """
    # the length is not trusted: a damaged file could ask for gigabytes of header
    size = file.stat().st_size
    refuse_pointer(file)
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _LONGEST_HEADER):
            raise ModelError(
                f"{size} bytes, of which the header should take {length}: truncated, or"
                " no safetensors"
            )
        text = stream.read(length)
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"the header is no text in UTF-8: {error}") from None
    document = parse_json(decoded, "the header", ModelError, unique=True)
    if not isinstance(document.value, dict):
        raise document.wrong("an object")
    entries = document.value
    # the only entry that is no tensor
    metadata = _metadata(entries.pop("__metadata__", None))
    tensors = {
        name: _tensor(name, entry, file, 8 + length) for name, entry in entries.items()
    }
    _check_places(tensors, 8 + length, size)
    return Header(tensors, metadata, 8 + length)


def header_bytes(entries: Mapping[str, Any]) -> bytes:
    """Return the beginning of a file: the length of the header, and the header.

    Args:
        entries: entries of the tensors by name, with offsets from the end of the header, and of the
            metadata.
    """
    text = json.dumps(entries, separators=(",", ":")).encode()
    # The specification allows spaces after the JSON; values are aligned to 8 bytes.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def refuse_pointer(file: Path) -> None:
    """Raise a ModelError for a file that Git LFS has not replaced by its content.

    Raises:
        ModelError: the file is such a pointer, as in a repository that was cloned without Git LFS.
    """
    with file.open("rb") as stream:
        if stream.read(len(_POINTER)) == _POINTER:
            raise ModelError("it is a pointer of Git LFS: run git lfs pull")


def _bytes_of(tensor: StoredTensor) -> bytes:
    """Return the values of a small tensor as they are stored."""
    with tensor.path.open("rb") as stream:
        stream.seek(tensor.start)
        return stream.read(tensor.size)


def values_of(tensor: StoredTensor) -> npt.NDArray[np.float64]:
    """Return the values of a small float tensor, of shape (count,).

    Args:
        tensor: a tensor of type F16, BF16, F32 or F64. The values of a tensor that is not written
            yet are ones.

    Returns:
        The values in float64.

    Raises:
        ModelError: the tensor has another type.
    """
    if not tensor.start:
        # checks before a run know shapes alone; ones are finite and positive, and break no rule
        return np.ones(tensor.count)
    data = _bytes_of(tensor)
    if tensor.dtype == "BF16":
        # a bfloat16 is the upper half of a float32; numpy has no such type
        upper = np.frombuffer(data, "<u2").astype("<u4") << 16
        return upper.view("<f4").astype(np.float64)
    if tensor.dtype not in ("F16", "F32", "F64"):
        raise ModelError(
            f"{tensor.name}: {tensor.dtype} is no float whose values can be read"
        )
    return np.frombuffer(data, f"<f{BITS[tensor.dtype] // 8}").astype(np.float64)


def raw_values_of(tensor: StoredTensor) -> Iterator[npt.NDArray[np.unsignedinteger]]:
    """Yield the bits of the values of a tensor, as unsigned integers, in parts of 64 MiB at most.

    Args:
        tensor: a tensor whose values have 8, 16 or 32 bits.
    """
    dtype = np.dtype(f"<u{BITS[tensor.dtype] // 8}")
    with tensor.path.open("rb") as stream:
        stream.seek(tensor.start)
        for place in range(0, tensor.size, _PART):
            data = stream.read(min(_PART, tensor.size - place))
            yield np.frombuffer(data, dtype)


def integers_of(tensor: StoredTensor) -> tuple[int, ...]:
    """Return the values of a small integer tensor.

    Args:
        tensor: a tensor of any type.

    Returns:
        The values in the order of the file; empty for a tensor that is not written yet, and for a
        type other than I32 and I64.
    """
    if not tensor.start or tensor.dtype not in ("I32", "I64"):
        return ()
    data = _bytes_of(tensor)
    values = np.frombuffer(data, f"<i{BITS[tensor.dtype] // 8}")
    return tuple(map(int, values))


def single_value(tensor: StoredTensor) -> float | None:
    """Return the value of a float tensor, if it has one element."""
    if tensor.count != 1 or tensor.dtype not in FLOATS:
        return None
    return float(values_of(tensor)[0])


def _metadata(entry: Any) -> dict[str, str]:
    """Return the metadata of a header, empty if there are none.

    Raises:
        ModelError: they are no strings by name, for which the library refuses the file.
    """
    if entry is None:
        return {}
    if not isinstance(entry, dict) or not all(
        isinstance(value, str) for value in entry.values()
    ):
        raise ModelError(
            f"the header's __metadata__ is {short(entry)}, and must be an object of strings"
        )
    return entry


def _tensor(name: str, entry: Any, file: Path, start: int) -> StoredTensor:
    """Return the tensor of an entry of a header, whose values begin at a byte of the file.

    Raises:
        ModelError: the entry is malformed, or its type and shape do not fill its bytes.
    """
    try:
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        # offsets count from the end of the header
        first, last = entry["data_offsets"]
        is_whole = all(map(_is_size, (*shape, first, last)))
    except (TypeError, KeyError, ValueError):
        is_whole = False
    if not is_whole:
        raise ModelError(
            f"the header's entry of {name!r} is {short(entry)}; it lacks a dtype, a shape of"
            " sizes, or two data_offsets of 0 or more"
        )
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ModelError(f"{name!r} has the unknown type {short(dtype)}")
    # in bits, as a tensor of F4 may have an odd number of values, of which no bytes can be made
    if prod(shape) * BITS[dtype] != (last - first) * 8:
        raise ModelError(
            f"{name!r} is {dtype} {list(shape)}, which does not fill the {last - first}"
            " bytes it takes"
        )
    return StoredTensor(name, shape, dtype, file, start + first, last - first)


def _is_size(value: object) -> bool:
    """Return whether a value is an integer of 0 or more; true is not."""
    # bool is a subclass of int
    return type(value) is int and value >= 0


def _check_places(tensors: dict[str, StoredTensor], start: int, size: int) -> None:
    """Raise a ModelError if tensors overlap, leave gaps, or do not end with the file."""
    place = start
    # the size decides among equal starts, so that an empty tensor comes before its neighbour
    for tensor in sorted(tensors.values(), key=attrgetter("start", "size")):
        if tensor.start != place:
            raise ModelError(
                f"{tensor.name!r} begins at byte {tensor.start} instead of {place}: a"
                " gap or an overlap"
            )
        place += tensor.size
    if place == size:
        return
    what = "something follows"
    if size < place:
        ends = (tensor.start + tensor.size for tensor in tensors.values())
        cut = [name for name, end in zip(tensors, ends, strict=True) if end > size]
        what = f"truncated, {len(cut)} of {len(tensors)} tensors are cut, as {cut[0]!r}"
    raise ModelError(f"{size} bytes instead of {place}: {what}")
