"""Read samples from NumPy files: .npz, .npy, a folder of them, or a sub-folder per input."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from calibrators.errors import DataError, SampleMismatch
from calibrators.names import names_of
from calibrators.readers.archives import Header, read_headers, require_size, stream_rows
from calibrators.readers.samples import Array, InputSpec, Sample, is_empty, splittable

ARRAY_SUFFIXES = frozenset({".npz", ".npy"})
#: Size in bytes up to which an archive is loaded at once.
LOADED_AT_ONCE = 1 << 26
#: First bytes of the files. "PK" begins any zip archive, also an empty one.
_NPY = b"\x93NUMPY"
_ZIP = b"PK"
#: Number of files whose lengths are compared.
_LOOKED_AT = 8


def find_files(path: Path, suffixes: frozenset[str]) -> list[Path]:
    """Return the files with given suffixes in a folder, sorted by name.

    Args:
        path: a folder, which is not searched recursively, or a single file.
        suffixes: lower-case suffixes; files may have them in any case.
    """
    # is_file skips a folder whose name ends like a file.
    files: Iterable[Path] = path.iterdir() if path.is_dir() else [path]
    return sorted(
        file for file in files if file.suffix.lower() in suffixes and file.is_file()
    )


def read_arrays(
    path: Path, inputs: Sequence[InputSpec], *, axis: int | None = 0
) -> Iterator[Sample]:
    """Yield the samples; only a large .npz stays open between two of them.

    A file is one batch, which `open_reader` splits into samples, unless each array in it has one
    dimension more than its input: then the first axis counts batches. A .npy, and a large .npz, is
    read row by row if it is a stack of batches, or a batch that is split.

    Args:
        path: a .npz, whose keys are the input names; a .npy, if the model has one input; a folder
            of either; or a folder with one sub-folder per input, named after it, whose .npy files
            pair up by name.
        inputs: the model's inputs.
        axis: axis of the inputs that counts samples; None for none.

    Raises:
        DataError: no file can be read.
        SampleMismatch: the files or the rows of different inputs do not pair up.
    """
    for files in _files_by_sample(path, inputs):
        yield from (
            _read_npz(files, inputs, axis)
            if isinstance(files, Path)
            else _read_npy(files, inputs, axis)
        )


def row_counts(files: Sequence[Path], inputs: Sequence[InputSpec]) -> dict[Path, int]:
    """Return the number of rows of the first files that are batches, not stacks of samples."""
    counts = dict[Path, int]()
    for file in files[:_LOOKED_AT]:
        if _is_npy(file):
            shapes = {inputs[0].name: _map(file).shape}
        else:
            with _reading(file), file.open("rb") as opened:
                _check_magic(file, opened.read(len(_NPY)))
                shapes = {header.name: header.shape for header in read_headers(opened)}
        rows = _split(shapes, inputs, file, axis=0)
        if rows is not None and rows[1]:
            counts[file] = rows[0]
    return counts


def _files_by_sample(
    path: Path, inputs: Sequence[InputSpec]
) -> Sequence[Path | dict[str, Path]]:
    """Return the file of each sample: a .npz, or a .npy per input."""
    files = find_files(path, ARRAY_SUFFIXES)
    if not files:
        return _pair(path, inputs)
    # A .npy file has no name for its array: which input it belongs to is clear for one input alone.
    single = [file for file in files if _is_npy(file)]
    if single and len(inputs) > 1:
        raise SampleMismatch(
            f"{single[0]} holds one array, the model has {len(inputs)} inputs; "
            "use .npz files, or one sub-folder of .npy files per input",
        )
    return [{inputs[0].name: file} if _is_npy(file) else file for file in files]


def _is_npy(file: Path) -> bool:
    """Return whether a file has the suffix of a single array."""
    return file.suffix.lower() == ".npy"


def _pair(path: Path, inputs: Sequence[InputSpec]) -> list[dict[str, Path]]:
    """Pair up the .npy files of one sub-folder per input, by name."""
    columns = {
        spec.name: find_files(path / spec.name, frozenset({".npy"})) for spec in inputs
    }
    for name, column in columns.items():
        if not column:
            raise DataError(
                f"{path} has no .npz or .npy file, nor a sub-folder {name!r} with .npy files",
            )
        # Every column is compared with the first: equal names in all of them make the sorted lists
        # pair up.
        expected = names_of(columns[inputs[0].name])
        unpaired = set(names_of(column)).symmetric_difference(expected)
        if unpaired:
            counts = [f"{len(files)} for {name!r}" for name, files in columns.items()]
            raise SampleMismatch(
                f"{path}: {min(unpaired)} is not there for every input"
                f" ({', '.join(counts)})",
            )
    return [
        dict(zip(columns, files, strict=True))
        for files in zip(*columns.values(), strict=True)
    ]


def _read_npz(
    path: Path, inputs: Sequence[InputSpec], axis: int | None
) -> Iterator[Sample]:
    # Opened by Path, because np.load leaves a broken archive open.
    with _reading(path), path.open("rb") as file:
        _check_magic(path, file.read(len(_NPY)))
        headers = read_headers(file)
    # Row by row costs a read per row and array, which pays for large archives alone.
    shapes = {header.name: header.shape for header in headers}
    rows = None
    if _is_streamed(headers):
        rows = _split(shapes, inputs, path, axis=axis)
    if rows is not None:
        count, batch = rows
        with _reading(path):
            yield from stream_rows(path, headers, count, batch=batch)
        return
    # A compressed array of zeros is a thousand times as large in memory as in the file.
    for header in headers:
        require_size(path, header, header.size)
    with (
        _reading(path),
        path.open("rb") as file,
        np.load(file, allow_pickle=False) as archive,
    ):
        arrays: Sample = dict(archive)
    for name, array in arrays.items():
        # np.load returns the bytes of members that are no .npy files.
        if not isinstance(array, np.ndarray):
            raise DataError(f"{path}: what it holds as {name!r} is no array")
    shapes = {name: array.shape for name, array in arrays.items()}
    for row in _rows(shapes, inputs, path):
        yield {name: array[row] for name, array in arrays.items()}


def _is_streamed(headers: Sequence[Header]) -> bool:
    """Return whether an archive is read row by row: it is large, and all types are plain."""
    size = 0
    for header in headers:
        size += header.size
        if header.dtype is None:
            return False
    return size > LOADED_AT_ONCE


def _split(
    shapes: Mapping[str, tuple[int, ...]],
    inputs: Sequence[InputSpec],
    path: Path,
    *,
    axis: int | None,
) -> tuple[int, bool] | None:
    """Return the number of samples in arrays, and whether samples are batches.

    None for arrays that are not split.

    Args:
        shapes: shapes of the arrays by name.
        path: the file, for messages.
        axis: axis of the inputs that counts samples; batches are split along the first alone.

    Raises:
        SampleMismatch: the arrays are stacks of different lengths.
    """
    rows = _rows(shapes, inputs, path)
    # A stack of batches: each row is a complete sample.
    if isinstance(rows, range):
        return len(rows), False
    counts = {shape[0] for shape in shapes.values() if shape}
    if not rows or len(counts) != 1 or axis != 0:
        return None
    if not splittable(inputs, stacked=True):
        return None
    if _ranks(inputs) != {name: len(shape) for name, shape in shapes.items()}:
        return None
    return counts.pop(), True


def _ranks(inputs: Sequence[InputSpec]) -> dict[str, int]:
    """Return the ranks of inputs by name; inputs of open rank are left out."""
    return {spec.name: len(spec.shape) for spec in inputs if spec.shape is not None}


def _read_npy(
    files: Mapping[str, Path], inputs: Sequence[InputSpec], axis: int | None
) -> Iterator[Sample]:
    # The maps live no longer than the expressions they stand in: Windows cannot delete a file that
    # is mapped.
    # Mapped files cost no memory: the shapes are known before any value is read.
    shapes = {name: _map(file).shape for name, file in files.items()}
    path = next(iter(files.values()))
    rows = _rows(shapes, inputs, path)
    split = _split(shapes, inputs, path, axis=axis)
    if split is not None and split[1]:
        rows = [slice(row, row + 1) for row in range(split[0])]
    for row in rows:
        yield {name: np.array(_map(file)[row]) for name, file in files.items()}


def _map(path: Path) -> Array:
    """Map the array in a .npy file into memory."""
    with _reading(path):
        with path.open("rb") as file:
            _check_magic(path, file.read(len(_NPY)))
        mapped: Array = np.load(path, mmap_mode="r", allow_pickle=False)
        return mapped


def _check_magic(path: Path, start: bytes) -> None:
    """Refuse a file with a misleading suffix.

    np.load would follow the content instead, and return another type.
    """
    archive = path.suffix.lower() == ".npz"
    if start.startswith(_NPY if archive else _ZIP):
        content, suffix = (".npy", ".npz") if archive else (".npz", ".npy")
        raise DataError(f"{path} is a {content} file that is named {suffix}; rename it")


def _rows(
    shapes: Mapping[str, tuple[int, ...]], inputs: Sequence[InputSpec], path: Path
) -> Sequence[Any]:
    """Return the indices of the samples in arrays.

    One index per row of a stack; otherwise ``...``, which selects the full array.

    Args:
        shapes: shapes of the arrays by name.
        path: the file, for messages.

    Raises:
        SampleMismatch: the arrays are stacks of different lengths.
    """
    if _are_empty(shapes, inputs):
        return ()
    ranks = _ranks(inputs)
    if ranks.keys() != shapes.keys():
        # Open ranks, or wrong names, which the check of the sample reports.
        return (...,)
    # None stands for an array that is no stack; equal counts of all arrays leave one element.
    counts = {
        shape[0] if len(shape) == ranks[name] + 1 else None
        for name, shape in shapes.items()
    }
    if len(counts) > 1:
        raise SampleMismatch(
            f"{path}: the arrays are not stacks of equally many samples: {dict(shapes)}",
        )
    count = counts.pop()
    if count is None:
        return (...,)
    return range(count)


def _are_empty(
    shapes: Mapping[str, tuple[int, ...]], inputs: Sequence[InputSpec]
) -> bool:
    """Return whether a file has an empty batch of each input: no sample, and nothing to report."""
    if shapes.keys() != set(names_of(inputs)):
        return False
    return all(is_empty(shapes[spec.name], spec) for spec in inputs)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        # NumPy and zipfile raise many unrelated types over a damaged file.
        reason = str(error) or type(error).__name__
        raise DataError(f"{path} cannot be read as a NumPy file: {reason}") from error
