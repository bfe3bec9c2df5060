"""Progress with an ETA on stderr, and a time limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from inspect import signature
from time import monotonic
from types import TracebackType
from typing import Any

from calibrators.shown import short
from quark_onnx.common.errors import ConfigError, TimeLimitError
from quark_onnx.common.progress_bars import (
    Bar,
    ProgressCallback,
    open_bar,
    progress_callback,
)

#: Whether to show progress, or a function that receives it; see ``open_bar``.
Show = bool | ProgressCallback | None

#: Deadline on the ``monotonic`` clock; None for no limit.
_DEADLINE: ContextVar[float | None] = ContextVar("deadline", default=None)


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise an error in the enclosed work once the time is over.

    Loops with progress end at their next step; work without progress is finished. Of nested
    limits, the earliest counts.

    Args:
        seconds: the limit; None for no limit.

    Raises:
        TimeLimitError: the time is over.
    """
    # Context variables, so that threads and nested calls have limits of their own.
    outer = _DEADLINE.get()
    deadline = outer
    if seconds is not None:
        deadline = monotonic() + seconds
        if outer is not None:
            deadline = min(outer, deadline)
    token = _DEADLINE.set(deadline)
    try:
        yield
    finally:
        _DEADLINE.reset(token)


def check_time() -> None:
    """Raise TimeLimitError if an enclosing ``time_limit`` is over."""
    deadline = _DEADLINE.get()
    if deadline is not None and monotonic() > deadline:
        raise TimeLimitError("its time is over")


@contextmanager
def showing(progress: object) -> Iterator[bool | None]:
    """Send progress to a function within the context; otherwise check the argument.

    Returns:
        The argument for a ``Progress``.
    """
    if callable(progress):
        _check_parameters(progress)
        with progress_callback(progress):
            yield None
        return
    if progress not in (True, False, None):
        raise ConfigError(
            f"progress is {short(progress)}; it must be True, False, None for a terminal only, or"
            " a function"
        )
    yield None if progress is None else bool(progress)


def _check_parameters(function: Callable[..., Any]) -> None:
    """Raise ConfigError for a function that cannot take what is reported."""
    try:
        parameters = signature(function)
    # Of functions in C, the parameters may be unknown.
    except (TypeError, ValueError):
        return
    try:
        parameters.bind("", 0, None)
    except TypeError as error:
        raise ConfigError(
            f"progress is called as function(name, done, total), and takes {parameters}: {error}"
        ) from error


class Progress:
    """A context manager around a progress bar, or lines where stderr is no terminal.

    Args:
        show: True shows progress, False hides it, None shows it if stderr is a terminal, and in
            the command line after some seconds. Without a stderr, nothing is shown.
        total: number of steps; None if unknown, which leaves out the ETA.
        name: the work.
        unit: a step.
    """

    def __init__(
        self, show: bool | None, total: int | None, name: str, unit: str
    ) -> None:
        self._show = show
        self._total = total
        self._name = name
        self._unit = unit
        self._bar: Bar | None = None
        #: What ended the work: an exception of the user's progress function, or the time limit.
        self.ended_by: BaseException | None = None

    def __enter__(self) -> Progress:
        try:
            self._bar = open_bar(self._show, self._total, self._name, self._unit)
        except BaseException as error:
            self.ended_by = error
            raise
        return self

    def update(self, done: float, *, skipped: bool = False) -> None:
        """Set the number of finished steps.

        Args:
            done: the number of finished steps, and the finished part of the current step.
            skipped: whether an earlier run has done the steps so far; the ETA does not count them.

        Raises:
            TimeLimitError: an enclosing ``time_limit`` is over.
        """
        try:
            # Before the bar: a loop without a display ends as well.
            check_time()
            if self._bar is not None:
                self._bar.update(done, skipped=skipped)
        except BaseException as error:
            self.ended_by = error
            raise

    def __exit__(
        self, *error: type[BaseException] | BaseException | TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        # What handlers made of it, such as an error about a model, would hide the cause.
        if self.ended_by is not None and error[1] not in (None, self.ended_by):
            raise self.ended_by
