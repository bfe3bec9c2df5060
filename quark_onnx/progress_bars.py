"""Bars of a ``Progress``: rich's on a terminal, tqdm's in a file or a pipe."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress as Display
    from rich.progress import TaskID


class Bar(Protocol):
    """A display of progress."""

    def update(self, done: int) -> None:
        """Set the number of finished steps."""

    def close(self) -> None:
        """Remove the bar."""


def open_bar(show: bool | None, total: int | None, name: str, unit: str) -> Bar | None:
    """Return a new bar on stderr; None without an audience.

    Args:
        show: True shows a bar, False none, None shows a bar if stderr is a terminal.
        total: number of steps; None if unknown, which leaves the bar without an ETA.
        name: the work.
        unit: a step.
    """
    stream = sys.stderr
    if stream is None or show is False:  # None where a process starts without a stderr
        return None
    if stream.isatty():
        return TerminalBar(total, name, unit)
    return FileBar(total, name, unit) if show else None


class FileBar:
    """A bar of tqdm, with complete lines on a stream that is no terminal."""

    def __init__(self, total: int | None, name: str, unit: str) -> None:
        from tqdm import tqdm

        self._bar: Any = tqdm(total=total, desc=name, unit=unit, leave=False)

    def update(self, done: int) -> None:
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        self._bar.close()


class TerminalBar:
    """A line in rich's display, at most one display per terminal.

    Nested bars are lines of a common display, which ends with the last bar.
    """

    _display: ClassVar[Display | None] = None
    _lines: ClassVar[int] = 0

    def __init__(self, total: int | None, name: str, unit: str) -> None:
        cls = type(self)
        if cls._display is None:
            cls._display = _new_display()
            cls._display.start()
        cls._lines += 1
        self._line: TaskID = cls._display.add_task(name, total=total, unit=unit)

    def update(self, done: int) -> None:
        display = type(self)._display
        if display is not None:
            display.update(self._line, completed=done)

    def close(self) -> None:
        cls = type(self)
        display = cls._display
        if display is None:
            return
        display.remove_task(self._line)
        cls._lines -= 1
        if cls._lines == 0:
            display.stop()
            cls._display = None


def _new_display() -> Display:
    """Return a self-erasing display without output on stdout."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}"),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
