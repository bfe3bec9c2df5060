"""Displays of a ``Progress``: rich's bars on a terminal, lines in a file or a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress as Display
    from rich.progress import TaskID

#: Seconds between two lines.
INTERVAL = 10.0
#: Whether lines are shown without being asked for.
_PLAIN: ContextVar[bool] = ContextVar("plain", default=False)


class Bar(Protocol):
    """A display of progress."""

    def update(self, done: float) -> None:
        """Set the number of finished steps."""

    def close(self) -> None:
        """Remove the bar."""


def open_bar(
    show: bool | None,
    total: int | None,
    name: str,
    unit: str,
    forecast: Forecast | None = None,
) -> Bar | None:
    """Return a new bar on stderr; None without an audience.

    Args:
        show: True shows a bar, False none, None shows a bar if stderr is a terminal, and lines
            after a while within ``plain_progress``.
        total: number of steps; None if unknown, which leaves the bar without an ETA.
        name: the work.
        unit: a step.
        forecast: runtime of the work as estimated before.
    """
    stream = sys.stderr
    if stream is None or show is False:  # None where a process starts without a stderr
        return None
    # rich redraws lines, which needs a terminal.
    if stream.isatty():
        return TerminalBar(total, name, unit)
    if show is None and not _PLAIN.get():
        return None
    return LineBar(total, name, unit, forecast, at_once=show is True)


@contextmanager
def plain_progress() -> Iterator[None]:
    """Show the progress of the enclosed work as lines where stderr is no terminal."""
    token = _PLAIN.set(True)
    try:
        yield
    finally:
        _PLAIN.reset(token)


@dataclass(frozen=True)
class Forecast:
    """Runtime of a loop as estimated before it starts.

    Attributes:
        seconds: runtime of the loop.
        later: runtime of the work after the loop.
    """

    seconds: float
    later: float = 0.0

    def remaining(
        self, elapsed: float, total: int, complete: int, completed: float
    ) -> float:
        """Return the seconds until all work is done, by the speed measured so far.

        The work after the loop is expected to deviate from its estimate by as much as the loop.

        Args:
            elapsed: seconds since the loop began.
            total: number of steps.
            complete: number of complete steps.
            completed: seconds from the begin of the loop to the end of the last of them.

        >>> Forecast(60, 10).remaining(6, 6, 0, 0), Forecast(60, 10).remaining(20, 6, 1, 20)
        (64.0, 120.0)
        """
        seconds = completed * total / complete if complete else self.seconds
        if complete < total:  # the current step may take longer than those before
            seconds = max(seconds, elapsed * total / (complete + 1))
        # Without an estimate, the work after the loop has none either (0).
        slowdown = seconds / self.seconds if self.seconds else 1.0
        return max(seconds - elapsed, 0.0) + self.later * slowdown


def clock(seconds: float) -> str:
    """Format a time in minutes and seconds, or in hours, minutes and seconds.

    >>> clock(75), clock(3725)
    ('1:15', '1:02:05')
    """
    # Rounded first, so that 59.6 seconds are 1:00 and not 0:60.
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}"


class LineBar:
    """Lines on a stream that is no terminal, such as a log file.

    Args:
        total: number of steps; None if unknown.
        name: the work.
        unit: a step.
        forecast: runtime of the work as estimated before.
        at_once: whether the first line comes at once; short work has no line otherwise.
    """

    def __init__(
        self,
        total: int | None,
        name: str,
        unit: str,
        forecast: Forecast | None,
        *,
        at_once: bool,
    ) -> None:
        self._total = total
        self._name = name
        self._unit = unit
        self._forecast = forecast
        self._start = monotonic()
        self._shown = self._start
        #: Complete steps, and the time at which the last of them was complete. Parts of a step
        #: say little: a block's forward pass is faster than the algorithm that follows it.
        self._complete = 0
        self._completed = self._start
        if at_once:
            self._show(self._start)

    def update(self, done: float) -> None:
        now = monotonic()
        # ``done`` may include a part of the current step.
        if int(done) > self._complete:
            self._complete = int(done)
            self._completed = now
        if now - self._shown >= INTERVAL:
            self._show(now)

    def close(self) -> None:
        """Do nothing: lines stay."""

    def _show(self, now: float) -> None:
        steps = f"{self._unit} {self._complete}"
        if self._total is not None:
            steps = f"{steps} of {self._total}"
        text = f"quark-onnx: {self._name}: {steps}, {clock(now - self._start)} elapsed"
        remaining = self._remaining(now)
        if remaining is not None:
            text = f"{text}, about {clock(remaining)} remaining"
        with suppress(OSError, ValueError):  # nobody reads stderr any more
            print(text, file=sys.stderr, flush=True)
        self._shown = now

    def _remaining(self, now: float) -> float | None:
        """Return the seconds until the work ends; None if unknown."""
        if self._total is None or (self._forecast is None and not self._complete):
            return None
        # Without a forecast at least one step is complete, whose speed counts.
        forecast = self._forecast or Forecast(0.0)
        elapsed, completed = now - self._start, self._completed - self._start
        return forecast.remaining(elapsed, self._total, self._complete, completed)


class TerminalBar:
    """A line in rich's display, at most one display per terminal.

    Nested bars are lines of a common display, which ends with the last bar.
    """

    _display: ClassVar[Display | None] = None
    _lines: ClassVar[int] = 0

    def __init__(self, total: int | None, name: str, unit: str) -> None:
        cls = type(self)
        # rich allows one live display per console.
        if cls._display is None:
            cls._display = _new_display()
            cls._display.start()
        cls._lines += 1
        self._line: TaskID = cls._display.add_task(name, total=total, unit=unit)

    def update(self, done: float) -> None:
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
    # rich is imported where a bar is shown; scripts without one do not wait for it.
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
        # Erased at the end, so that only results stay on the terminal.
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
