"""stored: statistics as plain values that JSON holds, exactly, and back."""

from __future__ import annotations

import base64
import math
import re
import zlib
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibrators.base import Statistic
from calibrators.extremes import Extremes, MeanExtremes, MovingExtremes
from calibrators.grouped import GROUPS, GroupedHistogram
from calibrators.histogram import BINS, LEAST_EXPONENT, Histogram
from calibrators.json_file import Entry

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
_FLOAT32 = float(np.finfo(np.float32).max)


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
    return read_statistic(Entry(values, "a stored statistic"))


def read_statistic(entry: Entry) -> Statistic:
    """Return the statistic of an entry in a file.

    Args:
        entry: values that ``to_plain`` has returned.

    Raises:
        Exception: the error of the entry, if a value is missing, or none of a statistic.
    """
    kind = _KINDS[entry["kind"].one_of(_KINDS)]
    read = {name: parse(entry[name]) for name, parse in _FIELDS[kind].items()}
    rows = len(read["lo"])
    for name, values in read.items():
        _check(entry[name], name, values, rows)
    if (read["lo"] > read["hi"]).any():
        raise entry["lo"].invalid("above hi")
    for name in ("positive", "negative") if kind is GroupedHistogram else ():
        empty = [each is None for each in read[name]]
        if empty != [each is None for each in read["positive"]]:
            raise entry[name].invalid("null for other groups than positive")
    if "sums" in read:
        # Each sum is one of float32 numbers, in units of 2**-149.
        bounds = [int(count) << 278 for count in read["batches"]]
        for sums in read["sums"]:
            if any(abs(total) > most for total, most in zip(sums, bounds, strict=True)):
                raise entry["sums"].invalid("above the sums of so many batches")
    statistic: Statistic = kind(**read)
    return statistic


def _check(entry: Entry, name: str, values: Any, rows: int) -> None:
    """Check the shape and the range of a field's arrays."""
    shape = {
        "sums": (2, rows),
        "samples": (GROUPS, rows),
        "positive": (rows, BINS),
        "negative": (rows, BINS),
    }.get(name, (rows,))
    least, most = {
        "lo": (-_FLOAT32, _FLOAT32),
        "hi": (-_FLOAT32, _FLOAT32),
        "first": (-_FLOAT32, _FLOAT32),
        "exponent": (LEAST_EXPONENT, 128),
        "sums": (-math.inf, math.inf),
    }.get(name, (0, math.inf))
    for array in values if isinstance(values, list | tuple) else [values]:
        if not isinstance(array, np.ndarray):
            continue
        if array.shape != shape:
            raise entry.invalid(f"of the shape {array.shape}, and must have {shape}")
        # NaN fails the comparison, too.
        if array.dtype != np.object_ and not ((array >= least) & (array <= most)).all():
            raise entry.invalid(f"not from {least:g} to {most:g}")


def _to_plain(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype == np.object_:
        # Exact integers of any size; as text, since many JSON readers use doubles.
        return {"shape": list(value.shape), "integers": [str(x) for x in value.flat]}
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
        return [_to_plain(item) for item in value]
    return value


def _floats(entry: Entry) -> NDArray[np.float64]:
    return _array(entry, "<f8")


def _integers(entry: Entry) -> NDArray[np.int64]:
    return _array(entry, "<i8")


def _array(entry: Entry, dtype: str) -> NDArray[Any]:
    """Return the array of an entry, which must be of a type."""
    shape = tuple(size.integer(most=_MOST_BYTES) for size in entry["shape"].array())
    entry["dtype"].one_of([dtype])
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size > _MOST_BYTES:
        raise entry["shape"].invalid(f"of {size:,} bytes; no statistic has as many")
    try:
        packed = base64.b64decode(entry["data"].text(), validate=True)
        # The limit keeps a small malicious file from expanding to the whole memory.
        data = zlib.decompressobj().decompress(packed, size + 1)
    # Text outside of ASCII is a ValueError.
    except (ValueError, zlib.error) as error:
        raise entry["data"].invalid(f"damaged ({error})") from error
    if len(data) != size:
        raise entry["data"].invalid(f"not of {size:,} bytes, as its shape")
    array = np.frombuffer(data, dtype).reshape(shape)
    # A copy in native order: the array of frombuffer is read-only, and merging writes to counts.
    return array.astype(array.dtype.newbyteorder("="))


def _exact(entry: Entry) -> NDArray[np.object_]:
    """Return an array of integers of any size."""
    shape = tuple(size.integer(most=_MOST_BYTES) for size in entry["shape"].array())
    texts = entry["integers"].array()
    if math.prod(shape) != len(texts):
        raise entry["integers"].invalid(
            f"of {len(texts)} numbers; its shape is {shape}"
        )
    # np.array of Python integers would choose int64, and overflow.
    numbers = np.empty(len(texts), np.object_)
    for index, number in enumerate(texts):
        text = number.text()
        if not re.fullmatch(r"-?[0-9]{1,200}", text):
            raise number.wrong("the digits of a whole number")
        numbers[index] = int(text)
    return numbers.reshape(shape)


def _pair(entry: Entry) -> tuple[NDArray[np.float64], ...]:
    arrays = tuple(_floats(item) for item in entry.array())
    if len(arrays) != 2:
        raise entry.wrong("two arrays")
    return arrays


def _groups(entry: Entry) -> list[NDArray[np.int64] | None]:
    groups = [None if item.value is None else _integers(item) for item in entry.array()]
    if len(groups) != GROUPS:
        raise entry.wrong(f"{GROUPS} arrays or nulls")
    return groups


def _constant(entry: Entry) -> float:
    number = entry.number()
    if not 0 < number <= 1:
        raise entry.wrong("a number above 0, and at most 1")
    return number


_EXTREMES: dict[str, Callable[[Entry], Any]] = {
    "lo": _floats,
    "hi": _floats,
    "nonfinite": Entry.integer,
}
_MEANS = {**_EXTREMES, "sums": _exact, "batches": _integers}
#: The fields of each kind of statistic, with the functions that read them.
_FIELDS: dict[type[Any], dict[str, Callable[[Entry], Any]]] = {
    Extremes: _EXTREMES,
    MeanExtremes: _MEANS,
    MovingExtremes: {
        "constant": _constant,
        **_EXTREMES,
        "first": _pair,
        "batches": _integers,
    },
    Histogram: {
        **_EXTREMES,
        "exponent": _integers,
        "positive": _integers,
        "negative": _integers,
    },
    GroupedHistogram: {
        **_MEANS,
        "exponent": _integers,
        "positive": _groups,
        "negative": _groups,
        "samples": _integers,
    },
}
