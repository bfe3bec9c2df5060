"""Read large arrays in a .npz file row by row: a small archive can hold gigabytes of zeros."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from calibrators.errors import DataError
from calibrators.limits import raise_it, tensor_limit
from calibrators.readers.samples import Sample

_SUFFIX = ".npy"
#: Public functions of numpy that read a header, by the version of the format.
_READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


@dataclass(frozen=True)
class Header:
    """Description of an array in an archive.

    Attributes:
        name: key of the array.
        member: name of its file in the archive.
        shape: its dimensions; empty if unknown.
        dtype: its type; None if its values cannot be read row by row.
        size: its size in bytes, as far as known.
    """

    name: str
    member: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any] | None
    size: int


def read_headers(file: IO[bytes]) -> list[Header]:
    """Read the array headers in a .npz file, without values."""
    with zipfile.ZipFile(file) as archive:
        return [_header(archive, info) for info in archive.infolist()]


def _header(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Header:
    name = info.filename.removesuffix(_SUFFIX)
    with archive.open(info) as member:
        start = member.read(len(npy.magic(1, 0)))
        if start.startswith(npy.MAGIC_PREFIX):
            version = (start[-2], start[-1])
        else:
            version = None
        # Not an array, or an array with field names outside ASCII.
        if version not in _READERS:
            return Header(name, info.filename, (), None, info.file_size)
        shape, fortran, dtype = _READERS[version](member)
        needed = math.prod(shape) * dtype.itemsize
        # A header of a few bytes can claim any shape; pickled objects have a size of their own.
        if needed > info.file_size and not dtype.hasobject:
            raise ValueError(
                f"{name!r} of shape {list(shape)} needs {needed:,} bytes, and has"
                f" {info.file_size:,}",
            )
    # Fortran order stores columns one after another, so that a row is not contiguous.
    by_row = (
        not dtype.hasobject
        and bool(dtype.itemsize)
        and not (fortran and len(shape) > 1)
    )
    return Header(name, info.filename, shape, dtype if by_row else None, info.file_size)


def require_size(path: Path, header: Header, size: int) -> None:
    """Check the size of the part of an array that is read at once.

    Raises:
        DataError: the part is larger than the limit.
    """
    if size > tensor_limit():
        raise DataError(
            f"{path}: {header.name!r} has the shape {list(header.shape)}:"
            f" {raise_it(size)}",
        )


def stream_rows(
    path: Path, headers: Sequence[Header], count: int, *, batch: bool
) -> Iterator[Sample]:
    """Yield the rows of arrays in step.

    The file is open until the last row.

    Args:
        path: the .npz file.
        headers: of arrays that can be read by row.
        count: number of rows of each array.
        batch: yield rows as batches of one, with the first axis.

    Raises:
        DataError: the archive holds less than its headers claim, or a row is larger than the limit.
    """
    with ExitStack() as stack:
        archive = stack.enter_context(zipfile.ZipFile(path))
        members = [
            stack.enter_context(archive.open(header.member)) for header in headers
        ]
        # Each member is left at its first value, behind the header.
        for member in members:
            _READERS[npy.read_magic(member)](member)
        for _ in range(count):
            yield {
                header.name: _row(path, header, member, batch=batch)
                for header, member in zip(headers, members, strict=True)
            }


def _row(
    path: Path, header: Header, member: IO[bytes], *, batch: bool
) -> np.ndarray[Any, Any]:
    assert header.dtype is not None
    shape = header.shape[1:]
    size = math.prod(shape) * header.dtype.itemsize
    require_size(path, header, size)
    data = member.read(size)
    if len(data) < size:
        raise DataError(
            f"{path} cannot be read as a NumPy file: {header.name!r} ends before its"
            " last row",
        )
    # A bytearray makes the array writable, as arrays of np.load are.
    return np.frombuffer(bytearray(data), header.dtype).reshape(
        (1, *shape) if batch else shape,
    )
