"""Let signals end native runs, in the main thread and in thread pools.

Python runs a signal handler in the main thread, between two bytecode instructions. While the main
thread is inside onnxruntime, Ctrl-C has no effect until the run ends, which a Loop without a
condition never does. So another thread does the native work while the main thread waits; if a
handler raises, the work is stopped.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar, copy_context
from types import TracebackType
from typing import Any, TypeVar

from calibrators.errors import RuntimeCrash
from calibrators.onnx_runtime.cpu_features import available_cores

T = TypeVar("T")
R = TypeVar("R")

#: Seconds between two checks for signals: on Windows a wait without a timeout is uninterruptible.
_LOOK = 0.1
#: Seconds until stopped work has to end: onnxruntime checks RunOptions.terminate between operators.
_GRACE = 3.0


class _Stops:
    """Callbacks to stop the native work of threads."""

    def __init__(self) -> None:
        self._running: set[Callable[[], object]] = set()
        self.stopped = False

    def add(self, stop: Callable[[], object]) -> None:
        """Register the callback of starting work; after ``stop``, call the callback at once."""
        self._running.add(stop)
        # ``stop`` may have come between the decision to start and this registration.
        if self.stopped:
            stop()

    def remove(self, stop: Callable[[], object]) -> None:
        """Forget the callback of ended work."""
        self._running.discard(stop)

    def stop(self) -> None:
        """Stop running and future work."""
        self.stopped = True
        # A copy: threads that end meanwhile remove their callbacks.
        for stop in list(self._running):
            stop()


#: Callbacks of threads outside of pools.
_outside = _Stops()
#: Callbacks of the threads of a pool.
_stops: ContextVar[_Stops] = ContextVar("stops", default=_outside)


def stop_all() -> None:
    """Stop running and future native work, except in ``Lanes``."""
    _outside.stop()


def interruptible(work: Callable[[], T], stop: Callable[[], object]) -> T:
    """Run native work interruptibly, by signal handlers and the thread pool.

    Args:
        work: called once; in the main thread, by another thread instead.
        stop: makes ``work`` raise soon; called from any thread, perhaps before ``work`` begins.

    Returns:
        The result of ``work``.
    """
    if threading.current_thread() is threading.main_thread():
        future: Future[T] = Future()
        # A daemon, so that an operator that takes hours does not keep the process alive.
        thread = threading.Thread(
            target=copy_context().run, args=(_fulfil, future, work), daemon=True
        )
        try:
            thread.start()
            return waited(future, stop)
        except BaseException:
            # A signal before the wait began. After an error of ``work`` this has no effect.
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

    If a signal handler raises meanwhile, stop the work, wait for its end, and raise that error.

    Args:
        future: the result.
        stop: stops the work.
    """
    finished = threading.Event()
    stops = _stops.get()
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
    # Also SystemExit and KeyboardInterrupt: the waiting thread raises whatever ended the work.
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


#: Samples that a model is run on at the same time.
AT_ONCE = 2


def lane_threads() -> int:
    """Return the number of threads of a session that runs ``AT_ONCE`` samples at the same time.

    Two runs on half of the cores each take less time than one after the other on all cores, and
    less processor time: threads of one run wait for each other at every operator.
    """
    return max(1, available_cores() // AT_ONCE)


class Lanes(ThreadPoolExecutor):
    """Threads for sessions; an interruption of the ``with`` block stops their runs.

    The threads see the context variables of the submitter. An ordinary pool would wait for the end
    of each run.
    """

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._count = count
        self._stops = _Stops()

    def submit(
        self, function: Callable[..., T], /, *arguments: Any, **options: Any
    ) -> Future[T]:
        """Call a function in a thread."""
        context = copy_context()
        context.run(_stops.set, self._stops)
        return super().submit(context.run, function, *arguments, **options)

    def in_order(
        self, work: Callable[[T], R], items: Iterable[T]
    ) -> Generator[R, None, None]:
        """Yield the results of work on items in order, with few items in memory.

        A single lane works on an item before the next one is made, and yields its result first.
        """
        if self._count == 1:
            yield from map(work, items)
            return
        ahead = deque[tuple[T, Future[R]]]()
        try:
            for item in items:
                ahead.append((item, self.submit(work, item)))
                if len(ahead) == 2 * self._count:
                    yield self._next(work, ahead)
            while ahead:
                yield self._next(work, ahead)
        finally:
            # Of a consumer that has seen enough.
            for _, future in ahead:
                future.cancel()

    def _next(self, work: Callable[[T], R], ahead: deque[tuple[T, Future[R]]]) -> R:
        """Remove the first item, and wait for its result.

        Whatever stops the waiting thread stops the lanes, too.
        """
        item, future = ahead.popleft()
        try:
            return waited(future, self._stops.stop)
        except RuntimeCrash:
            if self._stops.stopped:
                raise
        # A crash of the isolated process fails all work in it: alone, the work shows whose it is.
        for _, other in ahead:
            with suppress(Exception):
                waited(other, self._stops.stop)
        return work(item)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # KeyboardInterrupt and SystemExit stop runs; after an ordinary error the short remainder is
        # awaited.
        if kind is not None and not issubclass(kind, Exception):
            self._stops.stop()
        try:
            self.shutdown(cancel_futures=kind is not None)
        except BaseException:  # a signal while it waits
            self._stops.stop()
            raise
