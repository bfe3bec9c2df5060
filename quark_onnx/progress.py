"""A progress bar with an ETA on stderr, where a person is looking, and a limit on the time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from time import monotonic
from types import TracebackType

from quark_onnx.errors import TimeLimitError
from quark_onnx.progress_bars import Bar, open_bar

#: The time, by ``monotonic``, at which the next step ends the work; None for no limit.
_DEADLINE: ContextVar[float | None] = ContextVar("deadline", default=None)


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """End the work inside with an error once it has taken so long.

    Every loop that shows its progress ends with its next step; what shows none is finished. Of
    limits within each other the one that ends first counts.

    Args:
        seconds: None for no limit.

    Raises:
        TimeLimitError: the time is over.
    """
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
    """Raise TimeLimitError if the time of a ``time_limit`` around this is over."""
    deadline = _DEADLINE.get()
    if deadline is not None and monotonic() > deadline:
        raise TimeLimitError("its time is over")


class Progress:
    """Context manager around a progress bar.

    Args:
        show: True shows it, False does not, None shows it if stderr is a terminal. Without a stderr
            there is no bar.
        total: number of steps if it is known; without it the bar has no ETA.
    """

    def __init__(
        self,
        show: bool | None,
        total: int | None,
        name: str,
        unit: str,
    ) -> None:
        self._show = show
        self._total = total
        self._name = name
        self._unit = unit
        self._bar: Bar | None = None

    def __enter__(self) -> Progress:
        self._bar = open_bar(self._show, self._total, self._name, self._unit)
        return self

    def update(self, done: int) -> None:
        """Set the number of steps that are done.

        Raises:
            TimeLimitError: the time of a ``time_limit`` around it is over.
        """
        check_time()
        if self._bar is not None:
            self._bar.update(done)

    def __exit__(
        self,
        *error: type[BaseException] | BaseException | TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
