"""Let signals end native runs: in the main thread, and in threads that the main thread waits for.

Python runs a signal handler in the main thread, between two of its own instructions. While that
thread is inside onnxruntime there are none, and Ctrl-C has no effect until the run ends, which a
Loop without a condition never does. So the main thread lets another thread do native work and waits
for it; if a handler raises, the work is stopped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")

#: Seconds between two looks for signals; a wait without an end cannot be interrupted on Windows.
_LOOK = 0.1
#: Seconds that work gets to end after it was stopped: onnxruntime looks at RunOptions.terminate
#: between two operators.
_GRACE = 3.0


class _Stops:
    """What stops the native work of some threads."""

    def __init__(self) -> None:
        self._running: set[Callable[[], object]] = set()
        self._stopped = False

    def add(self, stop: Callable[[], object]) -> None:
        """Take in what has begun; if all was stopped before, stop it at once."""
        self._running.add(stop)
        if self._stopped:
            stop()

    def remove(self, stop: Callable[[], object]) -> None:
        self._running.discard(stop)

    def stop(self) -> None:
        """Stop everything that runs or will begin."""
        self._stopped = True
        for stop in list(self._running):
            stop()


#: Of threads outside of pools.
_outside = _Stops()
#: Of the threads of a pool.
_stops: ContextVar[_Stops] = ContextVar("stops", default=_outside)


def stop_all() -> None:
    """Stop all native work of this process that is not that of ``Lanes``, and all that will begin."""  # noqa: E501
    _outside.stop()


def interruptible(work: Callable[[], T], stop: Callable[[], object]) -> T:
    """Return the result of native work, which a signal handler that raises, or the pool of this
    thread, can stop.

    Args:
        work: called once, in the main thread's place by another thread.
        stop: makes ``work`` raise soon; called from any thread, perhaps before ``work`` begins.
    """
    if threading.current_thread() is threading.main_thread():
        future: Future[T] = Future()
        # A daemon, so that an operator that takes hours does not keep the process alive.
        thread = threading.Thread(
            target=copy_context().run,
            args=(_fulfil, future, work),
            daemon=True,
        )
        try:
            thread.start()
            return waited(future, stop)
        except (
            BaseException
        ):  # a signal before the wait; what work has raised has ended it
            stop()
            raise
    stops = _stops.get()
    stops.add(stop)
    try:
        return work()
    finally:
        stops.remove(stop)


def waited(future: Future[T], stop: Callable[[], object]) -> T:
    """Wait for a result.

    If a signal handler raises meanwhile, ``stop`` the work, wait for its end, and raise that.
    """
    finished, stops = threading.Event(), _stops.get()
    future.add_done_callback(lambda _: finished.set())
    stops.add(stop)
    try:
        while not finished.wait(_LOOK):
            pass
    except BaseException:
        stop()
        finished.wait(_GRACE)
        raise
    finally:
        stops.remove(stop)
    return future.result()


def _fulfil(future: Future[T], work: Callable[[], T]) -> None:
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


class Lanes(ThreadPoolExecutor):
    """Threads that run sessions; leaving the ``with`` block by an interruption stops what they run.

    They see the context variables of whoever submits. An ordinary pool would wait for the end of
    each run.
    """

    def __init__(self, count: int | None = None) -> None:
        super().__init__(count)
        self._stops = _Stops()

    def submit(
        self,
        function: Callable[..., T],
        /,
        *arguments: Any,
        **options: Any,
    ) -> Future[T]:
        """Call a function in one of the threads."""
        context = copy_context()
        context.run(_stops.set, self._stops)
        return super().submit(context.run, function, *arguments, **options)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None and not issubclass(kind, Exception):
            self._stops.stop()
        try:
            self.shutdown(cancel_futures=kind is not None)
        except BaseException:  # a signal while it waits
            self._stops.stop()
            raise
