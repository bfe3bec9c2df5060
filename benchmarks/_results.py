"""Results that outlive a run: rows in one JSON file, and Markdown tables made from them."""

from __future__ import annotations

import fcntl
import json
import math
import os
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Store:
    """Rows by key in a JSON file, rewritten whole at each `put`.

    Several runs may share one file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def rows(self) -> dict[str, Row]:
        """All rows as they are in the file now."""
        rows: dict[str, Row] = (
            json.loads(self.path.read_text()) if self.path.exists() else {}
        )
        return rows

    def put(self, key: str, row: Row) -> None:
        """Add or replace one row."""
        with _locked(self.path.parent):
            rows = dict(sorted((self.rows() | {key: row}).items()))
            part = self.path.with_suffix(".part")
            part.write_text(json.dumps(_finite(rows), indent=1, allow_nan=False) + "\n")
            part.replace(self.path)


#: Options that several benchmarks have, by name without dashes.
_OPTIONS: dict[str, dict[str, Any]] = {
    "again": {"action": "store_true", "help": "measure also what is known"},
    "stale": {
        "action": "store_true",
        "help": "measure again what an older version of our source made",
    },
    "report": {"action": "store_true", "help": "measure nothing, print what is known"},
    "busy": {
        "action": "store_true",
        "help": "the machine does other work, too: keep no seconds",
    },
    "amd-quark-python": {
        "type": Path,
        "help": "the Python of an environment with amd-quark",
    },
    "out": {
        "type": Path,
        "default": Path(__file__).parent / "results",
        "metavar": "DIR",
        "help": "where results are kept",
    },
}


def add_arguments(parser: ArgumentParser, *names: str) -> None:
    """Add options that several benchmarks have, by the keys of `_OPTIONS`."""
    for name in names:
        parser.add_argument(f"--{name}", **_OPTIONS[name])


def add_store_arguments(parser: ArgumentParser, tasks: Sequence[str]) -> None:
    """Add the options of a benchmark that keeps its rows: tasks, what is measured, the folder."""
    parser.add_argument(
        "--tasks", nargs="+", choices=tasks, default=list(tasks), metavar="TASK"
    )
    add_arguments(parser, "again", "report", "out")


def add_turn_arguments(parser: ArgumentParser, repeats: int) -> None:
    """Add the options of a benchmark that times models in turns."""
    parser.add_argument(
        "--repeats", type=int, default=repeats, help="most turns of a row"
    )
    parser.add_argument(
        "--seconds", type=float, default=5, help="of the turns of a row"
    )
    parser.add_argument("--clock", choices=["cpu", "wall"], default="cpu")


def due(
    kept: Row | None, tag: Row, *, again: bool = False, stale: bool = False
) -> bool:
    """Whether to measure: what is not known, failed, or is of another model; all of it `again`; or
    what an older version of the source made.

    >>> due(None, {}), due({"model": "a", "source": "1"}, {"model": "a", "source": "2"})
    (True, False)
    >>> due({"model": "a", "source": "1"}, {"model": "a", "source": "2"}, stale=True)
    True
    """
    if not kept or again or "error" in kept or kept.get("model") != tag["model"]:
        return True
    return stale and kept.get("source") != tag["source"]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _finite(value: Any) -> Any:
    """The same with None for each number that JSON cannot write."""
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table with aligned columns; floats get two decimals, None an empty cell.

    >>> print(table(["tool", "top-1"], [["ours", 82.5], ["float", None]]))
    | tool  | top-1 |
    | ----- | ----- |
    | ours  | 82.50 |
    | float |       |
    """
    cells = [list(header), *([_text(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        + " |"
        for row in cells
    ]
    return "\n".join(
        [
            lines[0],
            "| " + " | ".join("-" * width for width in widths) + " |",
            *lines[1:],
        ]
    )


def _text(cell: object) -> str:
    return (
        "" if cell is None else f"{cell:.2f}" if isinstance(cell, float) else str(cell)
    )
