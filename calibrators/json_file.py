"""Read JSON files: every value knows its place, and a wrong one is an error that names it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

from calibrators.errors import CalibrationError, reading_error
from calibrators.limits import regular_size
from calibrators.shown import short

#: Most bytes of a file of measurements; statistics of a large model take some hundred megabytes.
MOST_BYTES = 1 << 32
#: Most arrays and objects inside of each other; configurations have less than ten levels.
MOST_LEVELS = 100


@dataclass(frozen=True)
class Entry:
    """A value of a JSON document with its place.

    Attributes:
        value: the value.
        file: the file and what it is, for messages.
        place: keys and positions that lead to the value; empty for the whole document.
        remedy: what to do if the value is wrong.
        error: class of the errors.
    """

    value: Any
    file: str
    place: str = ""
    remedy: str = ""
    error: Callable[[str], Exception] = CalibrationError

    def wrong(self, expected: str) -> Exception:
        """Return the error that the value is not as expected.

        Args:
            expected: what the value must be.
        """
        # A whole document would be no help.
        shown = short(self.value)
        if isinstance(self.value, dict | list) and not self.place:
            shown = {dict: "an object", list: "an array"}[type(self.value)]
        return self.invalid(f"{shown}, and must be {expected}")

    def invalid(self, what: str) -> Exception:
        """Return the error that the value is something.

        Args:
            what: what is wrong, after the word "is".
        """
        remedy = f"; {self.remedy}" if self.remedy else ""
        return self.error(
            f"{self.file}: {self.place or 'the document'} is {what}{remedy}"
        )

    def object(self) -> dict[str, Entry]:
        """Return the values of an object by key."""
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        return {
            key: replace(self, value=value, place=self._inner(key))
            for key, value in self.value.items()
        }

    def array(self) -> list[Entry]:
        """Return the values of an array."""
        if not isinstance(self.value, list):
            raise self.wrong("an array")
        return [
            replace(self, value=value, place=f"{self.place}[{index}]")
            for index, value in enumerate(self.value)
        ]

    def __getitem__(self, key: str) -> Entry:
        """Return the value of a key that an object must have."""
        found = self.get(key)
        if found is None:
            keys = ", ".join(short(name) for name in list(self.value)[:8]) or "none"
            raise self.invalid(f"without the key {key!r} (keys: {keys})")
        return found

    def get(self, key: str) -> Entry | None:
        """Return the value of a key; None without it."""
        if not isinstance(self.value, dict):
            raise self.wrong(f"an object with the key {key!r}")
        if key not in self.value:
            return None
        return replace(self, value=self.value[key], place=self._inner(key))

    def text(self) -> str:
        """Return a string."""
        if not isinstance(self.value, str):
            raise self.wrong("a string")
        return self.value

    def boolean(self) -> bool:
        """Return true or false."""
        if not isinstance(self.value, bool):
            raise self.wrong("true or false")
        return self.value

    def integer(self, least: int = 0, most: int = (1 << 63) - 1) -> int:
        """Return a whole number.

        Args:
            least: the least value.
            most: the greatest value.
        """
        # bool is a subclass of int, and JSON has both.
        if type(self.value) is not int or not least <= self.value <= most:
            raise self.wrong(f"a whole number from {least} to {most}")
        return self.value

    def number(self) -> float:
        """Return a finite number."""
        if isinstance(self.value, int | float) and not isinstance(self.value, bool):
            try:
                number = float(self.value)
            # An integer of hundreds of digits.
            except OverflowError:
                number = float("inf")
            if isfinite(number):
                return number
        raise self.wrong("a finite number")

    def one_of(self, choices: Any) -> str:
        """Return the value, which must be one of the given strings."""
        if not isinstance(self.value, str) or self.value not in choices:
            listed = ", ".join(repr(choice) for choice in choices)
            raise self.wrong(f"one of {listed}")
        return self.value

    def _inner(self, key: str) -> str:
        shown = key if key.isidentifier() else f"[{short(key)}]"
        return (
            f"{self.place}.{shown}"
            if self.place and key.isidentifier()
            else (f"{self.place}{shown}")
        )


def parse_json(
    text: str | bytes,
    file: str,
    error: Callable[[str], Exception],
    remedy: str = "",
    *,
    unique: bool = False,
) -> Entry:
    """Return the document of a text.

    Args:
        text: the text.
        file: the file and what it is, for messages.
        error: class of the errors.
        remedy: what to do if the file is damaged.
        unique: refuse an object with equal keys, of which Python keeps the last.

    Raises:
        Exception: ``error``, if the text is no JSON, or has more than ``MOST_LEVELS`` levels.
    """
    whole = Entry(None, file, "", remedy, error)
    deep = (
        f"nested too deeply: more than {MOST_LEVELS} arrays and objects are inside of"
        " each other"
    )
    try:
        value = json.loads(text, object_pairs_hook=_unique if unique else None)
    except json.JSONDecodeError as cause:
        raise whole.error(
            f"{file} is no JSON: line {cause.lineno}, column {cause.colno}: {cause.msg}"
            + (f"; {remedy}" if remedy else ""),
        ) from cause
    except RecursionError as cause:
        raise whole.invalid(deep) from cause
    # Bytes that are no UTF-8, or a number with thousands of digits.
    except ValueError as cause:
        raise whole.invalid(f"no JSON ({short(str(cause))})") from cause
    # The parser's own limit depends on the stack, and writers of JSON have a lower one.
    if _is_deeper(value, MOST_LEVELS):
        raise whole.invalid(deep)
    return replace(whole, value=value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {short(twice)} is there twice")
    return result


def _is_deeper(value: Any, levels: int) -> bool:
    """Return whether a JSON value has more than some levels of arrays and objects."""
    containers = [value]
    for _ in range(levels):
        containers = [
            inner
            for container in containers
            for inner in _values(container)
            if isinstance(inner, dict | list)
        ]
    return bool(containers)


def _values(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def read_json(
    path: str | Path,
    what: str,
    error: Callable[[str], Exception],
    remedy: str = "",
    most: int = MOST_BYTES,
) -> Entry:
    """Return the document of a file in UTF-8, with or without a byte order mark.

    Args:
        path: the file.
        what: what the file is, for messages.
        error: class of the errors.
        remedy: what to do if the file is damaged.
        most: most bytes that are read.

    Raises:
        Exception: ``error``, if the file cannot be read or is no JSON.
    """
    return parse_json(
        read_document(path, what, error, most), f"{what} {path}", error, remedy
    )


def read_document(
    path: str | Path,
    what: str,
    error: Callable[[str], Exception],
    most: int = MOST_BYTES,
) -> str:
    """Return the text of a file in UTF-8, without a byte order mark.

    Args:
        path: the file.
        what: what the file is, for messages.
        error: class of the errors.
        most: most bytes that are read.

    Raises:
        Exception: ``error``, if the file cannot be read.
    """
    try:
        size = regular_size(Path(path))
        if size > most:
            raise error(f"{what} {path} has {size:,} bytes; at most {most:,} are read")
        # Bytes, as reading a text would change ends of lines in names.
        return Path(path).read_bytes().decode("utf-8").removeprefix("\ufeff")
    except OSError as cause:
        reason = cause.strerror or cause
        raise reading_error(
            error, f"{what} {path} cannot be read: {reason}", cause
        ) from cause
    except UnicodeDecodeError as cause:
        raise error(
            f"{what} {path} is no text in UTF-8: byte {cause.start} is"
            f" {cause.object[cause.start]:#04x}",
        ) from cause
    # A path that no file can have.
    except ValueError as cause:
        raise error(f"{what} {path} cannot be read: {cause}") from cause
