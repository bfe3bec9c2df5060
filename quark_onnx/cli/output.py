"""What a command answers, and how text and JSON get out, whatever the console can show."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from calibrators.shown import printable
from quark_onnx.errors import QuarkError

#: Version of every JSON document that the command line writes. Keys are added within a version,
#: never renamed.
SCHEMA = 1


@dataclass(frozen=True)
class Table:
    """Rows of text in columns; the first row is the header.

    >>> print(Table((("name", "bits"), ("uint16", "16"))))
      name    bits
      uint16  16
    """

    rows: Sequence[Sequence[str]]

    def __str__(self) -> str:
        return columns(self.rows)


@dataclass(frozen=True)
class Answer:
    """What a command found out.

    Attributes:
        body: for a person: a text, or lines and tables from top to bottom.
        document: the same for a program; anything that JSON has, and infinities.
        failure: the gate that was missed, if the answer is worth showing nevertheless.
    """

    body: str | Sequence[str | Table]
    document: dict[str, Any]
    failure: QuarkError | None = None

    @property
    def blocks(self) -> list[str | Table]:
        """The body as a list."""
        return [self.body] if isinstance(self.body, str) else list(self.body)


def say(text: str, stream: TextIO | None) -> None:
    """Print.

    What the stream's encoding lacks, and what a terminal would act on, becomes an escape such as
    ``\\u0444``.

    A stream that the process was started without is None; for ``print`` that would be stdout.
    """
    if stream is None:
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    text = printable(text, lines=True)
    print(
        text.encode(encoding, "backslashreplace").decode(encoding),
        file=stream,
        flush=True,
    )


def to_json(document: Mapping[str, Any]) -> str:
    """The text of a JSON document, in ASCII.

    Infinities become the strings "inf" and "-inf", NaN null, paths strings.

    >>> print(to_json({"worst_sqnr": math.inf}))
    {
      "schema": 1,
      "worst_sqnr": "inf"
    }
    """
    return json.dumps(_plain({"schema": SCHEMA, **document}), indent=2, allow_nan=False)


def error_document(kind: str, message: str) -> dict[str, Any]:
    """The part of a document that says what went wrong."""
    return {"error": {"kind": kind, "message": message}}


def columns(rows: Iterable[Sequence[str]], indent: str = "  ") -> str:
    """Rows as a table whose columns are as wide as they must be.

    >>> print(columns([["name", "bits"], ["uint16", "16"]]))
      name    bits
      uint16  16
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(indent + line.rstrip() for line in lines)


def entry(title: str, lines: Iterable[str]) -> str:
    """Lines behind a title, as the report has them."""
    return "\n".join(
        f"{title if not i else '':<9} {printable(line)}" for i, line in enumerate(lines)
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, Path) or (
        isinstance(value, float) and not math.isfinite(value)
    ):
        return str(value)
    return value
