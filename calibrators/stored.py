"""stored: statistics as plain values that JSON holds, exactly, and back."""

from __future__ import annotations

import base64
import binascii
import zlib
from dataclasses import fields
from typing import Any

import numpy as np

from calibrators.base import Statistic
from calibrators.errors import CalibrationError
from calibrators.extremes import Extremes, MeanExtremes, MovingExtremes
from calibrators.grouped import GROUPS, GroupedHistogram
from calibrators.histogram import BINS, Histogram

_KINDS: dict[str, type[Any]] = {
    "extremes": Extremes,
    "mean_extremes": MeanExtremes,
    "moving_extremes": MovingExtremes,
    "histogram": Histogram,
    "grouped_histogram": GroupedHistogram,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}
#: No statistic of a tensor takes more bytes than this; a file that claims so is damaged.
_MOST_BYTES = 1 << 31


def kind_of(statistic: Statistic) -> str:
    """Return the name of a statistic's kind; empty for one that cannot be stored."""
    return _NAMES.get(type(statistic), "")


def to_plain(statistic: Statistic) -> dict[str, Any]:
    """Return a statistic as plain values.

    >>> statistic = Extremes(np.array([-1.5]), np.array([2.0]))
    >>> from_plain(to_plain(statistic)) == statistic
    True
    """
    values = {
        field.name: _to_plain(getattr(statistic, field.name))
        for field in fields(statistic)  # type: ignore[arg-type]
    }
    return {"kind": kind_of(statistic), **values}


def from_plain(values: Any) -> Statistic:
    """Return the statistic that ``to_plain`` was given.

    Raises:
        CalibrationError: the values are none of a statistic.
    """
    try:
        kind = _KINDS[values["kind"]]
        found = {field.name: _from_plain(values[field.name]) for field in fields(kind)}
        statistic: Statistic = kind(**found)
        _check_shapes(statistic)
    except (KeyError, TypeError, ValueError, OverflowError, zlib.error) as error:
        raise CalibrationError(f"a stored statistic is damaged: {error}") from error
    return statistic


def _check_shapes(statistic: Any) -> None:
    """Raise ValueError unless all arrays belong to the same number of rows."""
    rows = len(statistic.lo)
    # bool is a subclass of int, and JSON has both.
    if statistic.hi.shape != (rows,) or type(statistic.nonfinite) is not int:
        raise ValueError("ends of different lengths")
    counts: list[Any] = []
    if isinstance(statistic, Histogram):
        counts = [statistic.positive, statistic.negative]
    if isinstance(statistic, GroupedHistogram):
        if statistic.samples.shape != (GROUPS, rows):
            raise ValueError("numbers of samples of another shape")
        if len(statistic.positive) != GROUPS or len(statistic.negative) != GROUPS:
            raise ValueError("another number of groups")
        counts = [*statistic.positive, *statistic.negative]
    for count in counts:
        if count is not None and count.shape != (rows, BINS):
            raise ValueError("counts of another shape")


def _to_plain(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype == np.object_:
        # Exact integers of any size; as text, since many JSON readers use doubles.
        return {
            "shape": list(value.shape),
            "integers": [str(x) for x in value.flat],
        }
    if isinstance(value, np.ndarray):
        # The type of the text is little-endian, on every machine.
        little = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
        data = zlib.compress(little.tobytes(), 6)
        return {
            "shape": list(value.shape),
            "dtype": little.dtype.str,
            "data": base64.b64encode(data).decode("ascii"),
        }
    if isinstance(value, list | tuple):
        return [_to_plain(each) for each in value]
    return value


def _from_plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_plain(each) for each in value]
    if not isinstance(value, dict):
        return value
    shape = tuple(map(int, value["shape"]))
    if "integers" in value:
        # np.array of Python integers would choose int64, and overflow.
        numbers = np.empty(len(value["integers"]), np.object_)
        numbers[:] = [int(text) for text in value["integers"]]
        return numbers.reshape(shape)
    dtype = np.dtype(value["dtype"])
    # Objects and structures do not come from ``_to_plain``.
    if dtype.kind not in "iuf":
        raise ValueError(f"numbers of the type {dtype}")
    try:
        packed = base64.b64decode(value["data"], validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from error
    unpacker = zlib.decompressobj()
    # The limit keeps a small malicious file from expanding to the whole memory.
    data = unpacker.decompress(packed, _MOST_BYTES)
    array = np.frombuffer(data, dtype).reshape(shape)
    # A copy in native order: the array of frombuffer is read-only, and merging writes to counts.
    return array.astype(dtype.newbyteorder("="))
