"""Displays of a ``Progress``: rich's bars on a terminal, lines in a file or a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from importlib.util import find_spec
from time import monotonic
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress as Display
    from rich.progress import TaskID

#: Seconds between two lines.
INTERVAL = 10.0
#: A function of the name of the work, the finished steps, and their number if it is known.
ProgressCallback = Callable[[str, float, int | None], None]
#: Receives the progress in place of bars; None for bars.
_CALLBACK: ContextVar[ProgressCallback | None] = ContextVar("callback", default=None)
#: Whether lines are shown without being asked for.
_PLAIN: ContextVar[bool] = ContextVar("plain", default=False)


class Bar(Protocol):
    """A display of progress."""

    def update(self, done: float, *, skipped: bool = False) -> None:
        """Set the number of finished steps."""

    def close(self) -> None:
        """Remove the bar."""


def open_bar(show: bool | None, total: int | None, name: str, unit: str) -> Bar | None:
    """Return a new bar on stderr; None without an audience.

    Args:
        show: True shows a bar, False none, None shows a bar if stderr is a terminal, and lines
            after a while within ``plain_progress``.
        total: number of steps; None if unknown, which leaves the bar without an ETA.
        name: the work.
        unit: a step.
    """
    callback = _CALLBACK.get()
    if callback is not None:
        return CallbackBar(callback, total, name)
    stream = sys.stderr
    if show is not False and _in_notebook():
        return NotebookBar(total, name, unit)
    if stream is None or show is False:  # None where a process starts without a stderr
        return None
    # rich redraws lines, which needs a terminal.
    if stream.isatty():
        return TerminalBar(total, name, unit)
    if show is None and not _PLAIN.get():
        return None
    return LineBar(total, name, unit, at_once=show is True)


@contextmanager
def plain_progress() -> Iterator[None]:
    """Show the progress of the enclosed work as lines where stderr is no terminal."""
    token = _PLAIN.set(True)
    try:
        yield
    finally:
        _PLAIN.reset(token)


@contextmanager
def progress_callback(callback: ProgressCallback) -> Iterator[None]:
    """Report the progress of the enclosed work to a function, in place of bars."""
    token = _CALLBACK.set(callback)
    try:
        yield
    finally:
        _CALLBACK.reset(token)


def _in_notebook() -> bool:
    """Return whether this is the process of a notebook that tqdm can show bars in."""
    # IPython is not imported to find out: a notebook has.
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return (
        type(shell).__name__ == "ZMQInteractiveShell" and find_spec("tqdm") is not None
    )


class CallbackBar:
    """Calls of a function with the name of the work, the finished steps and their number.

    Args:
        callback: the function.
        total: number of steps; None if unknown.
        name: the work.
    """

    def __init__(
        self, callback: ProgressCallback, total: int | None, name: str
    ) -> None:
        self._callback, self._total, self._name = callback, total, name
        callback(name, 0, total)

    def update(self, done: float, *, skipped: bool = False) -> None:
        self._callback(self._name, done, self._total)

    def close(self) -> None:
        """Do nothing: the next work calls with its own name."""


class NotebookBar:
    """A bar of tqdm, which chooses the display of the notebook.

    Args:
        total: number of steps; None if unknown.
        name: the work.
        unit: a step.
    """

    def __init__(self, total: int | None, name: str, unit: str) -> None:
        from tqdm.auto import tqdm

        self._bar = tqdm(total=total, desc=name, unit=unit, leave=False)

    def update(self, done: float, *, skipped: bool = False) -> None:
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        self._bar.close()


class Pace:
    """Remaining time of a loop, by the complete steps.

    Parts of a step say little: a block's forward pass is faster than the algorithm that follows it.

    Args:
        total: number of steps; None if unknown.
    """

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._start = self._timed_from = self._complete_at = monotonic()
        #: steps that an earlier run has done; they have no part in the speed
        self._skipped = 0
        #: number of complete steps
        self.complete = 0

    def update(self, done: float, *, skipped: bool = False) -> None:
        """Set the number of finished steps, with the finished part of the current step."""
        if int(done) <= self.complete:
            return
        self.complete = int(done)
        self._complete_at = monotonic()
        if skipped:
            self._skipped = self.complete
            self._timed_from = self._complete_at

    @property
    def elapsed(self) -> float:
        """Seconds since the begin of the loop."""
        return monotonic() - self._start

    @property
    def remaining(self) -> float | None:
        """Seconds until the end of the loop; None before the end of the first step."""
        steps = self.complete - self._skipped
        if self._total is None or not steps:
            return None
        total = self._total - self._skipped
        elapsed = monotonic() - self._timed_from
        seconds = (self._complete_at - self._timed_from) * total / steps
        if steps < total:
            # The current step may take longer than those before.
            seconds = max(seconds, elapsed * total / (steps + 1))
        return max(seconds - elapsed, 0.0)


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
        at_once: whether the first line comes at once; short work has no line otherwise.
    """

    def __init__(
        self, total: int | None, name: str, unit: str, *, at_once: bool
    ) -> None:
        self._total = total
        self._name = name
        self._unit = unit
        self._pace = Pace(total)
        #: time of the last line, in seconds after the begin
        self._shown = 0.0
        if at_once:
            self._show()

    def update(self, done: float, *, skipped: bool = False) -> None:
        self._pace.update(done, skipped=skipped)
        if self._pace.elapsed - self._shown >= INTERVAL:
            self._show()

    def close(self) -> None:
        """Do nothing: lines stay."""

    def _show(self) -> None:
        self._shown = self._pace.elapsed
        steps = f"{self._unit} {self._pace.complete}"
        if self._total is not None:
            steps = f"{steps} of {self._total}"
        text = f"quark-onnx: {self._name}: {steps}, {clock(self._shown)} elapsed"
        remaining = self._pace.remaining
        if remaining is not None:
            text = f"{text}, about {clock(remaining)} remaining"
        with suppress(OSError, ValueError):  # nobody reads stderr any more
            print(text, file=sys.stderr, flush=True)


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
        self._pace = Pace(total)
        self._line: TaskID = cls._display.add_task(
            name, total=total, unit=unit, pace=self._pace
        )

    def update(self, done: float, *, skipped: bool = False) -> None:
        self._pace.update(done, skipped=skipped)
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
        ProgressColumn,
        Task,
        TextColumn,
        TimeElapsedColumn,
    )
    from rich.text import Text

    class RemainingColumn(ProgressColumn):
        """Remaining time by complete steps; rich's own counts parts of steps."""

        def render(self, task: Task) -> Text:
            remaining = task.fields["pace"].remaining
            text = "-:--" if remaining is None else clock(remaining)
            return Text(text, style="progress.remaining")

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}"),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        RemainingColumn(),
        console=Console(stderr=True),
        # Erased at the end, so that only results stay on the terminal.
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
