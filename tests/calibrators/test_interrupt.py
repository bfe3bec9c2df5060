"""A signal ends native runs, in the main thread and in threads that it waits for."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from calibrators.errors import RuntimeCrash
from calibrators.onnx_runtime.interrupt import Lanes, interruptible
from calibrators.onnx_runtime.isolation import isolated
from calibrators.onnx_runtime.session import open_session
from tests.models import normal
from tests.native_faults import endless

pytestmark = pytest.mark.skipif(os.name == "nt", reason="there are no signals to send")


class Asked(BaseException):
    """What the handler of the signal raises."""


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    def handle(*_: object) -> None:
        raise Asked

    before = signal.signal(signal.SIGUSR1, handle)
    yield
    signal.signal(signal.SIGUSR1, before)


class Run:
    """A run that sets an event when it begins.

    A timer that starts with the test would fire before the run begins on a machine that is busy.
    """

    def __init__(self, session: Any, sample: NDArray[np.float32]) -> None:
        self.session, self.sample = session, sample
        self.begun = threading.Semaphore(0)

    def __call__(self) -> None:
        self.begun.release()
        self.session.run(None, {"x": self.sample})


def signalled(run: Run, work: Callable[[], Any], count: int = 1) -> None:
    """Send a signal while some work is done: half a second after so many runs have begun.

    The runs have no end of their own: a signal without effect ends at the test's time limit.
    """

    def send() -> None:
        for _ in range(count):
            run.begun.acquire()
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGUSR1)

    threading.Thread(target=send, daemon=True).start()
    with pytest.raises(Asked):
        work()


@pytest.mark.parametrize("isolate", [False, True])
def test_a_run_in_the_main_thread(isolate: bool) -> None:
    with isolated(isolate):
        run = Run(open_session(endless()), normal(1, 4))
        signalled(run, run)


@pytest.mark.parametrize("isolate", [False, True])
def test_runs_in_lanes(isolate: bool) -> None:
    """An interrupt ends the running runs; waiting runs do not begin."""
    failures: list[BaseException] = []
    with isolated(isolate):
        run = Run(open_session(endless(), threads=1), normal(1, 4))

        def record() -> None:
            try:
                run()
            except Exception as error:
                failures.append(error)
                raise

        def wait() -> None:
            with Lanes(2) as lanes:
                futures = [lanes.submit(record) for _ in range(3)]
                futures[0].result()

        signalled(run, wait, count=2)
    assert len(failures) == 2
    assert all(isinstance(error, RuntimeCrash) == isolate for error in failures)


def test_lanes_inside_of_lanes() -> None:
    """An interrupt ends the runs that threads of a pool wait for, too."""
    run = Run(open_session(endless(), threads=1), normal(1, 4))

    def work(_: int) -> None:
        with Lanes(2) as lanes:
            list(lanes.in_order(lambda _: run(), range(2)))

    def wait() -> None:
        with Lanes(2) as lanes:
            lanes.submit(work, 0).result()

    signalled(run, wait, count=2)


def test_a_session_runs_again_after_an_interruption() -> None:
    """What a signal has ended once is not ended for good."""
    session = open_session(endless(conditional=True))
    run = Run(session, -np.ones((1, 4), np.float32))
    signalled(run, run)
    assert np.isfinite(session.run(None, {"x": np.ones((1, 4), np.float32)})[0]).all()


def test_lanes_are_a_pool() -> None:
    """Results, errors and cancelled work are those of an ordinary one."""

    def divide(a: int, b: int = 1) -> float:
        return a / b

    with Lanes(2) as lanes:
        assert list(lanes.map(divide, range(5))) == [0, 1, 2, 3, 4]
        assert lanes.submit(divide, 1, b=4).result() == 0.25
        with pytest.raises(ZeroDivisionError):
            lanes.submit(divide, 1, b=0).result()
    go = threading.Event()
    with pytest.raises(ZeroDivisionError), Lanes(1) as lanes:
        first, second = lanes.submit(go.wait), lanes.submit(divide, 1)
        go.set() if second.cancel() else None
        divide(1, 0)
    assert first.result()
    with pytest.raises(CancelledError):
        second.result()


def test_work_returns_and_raises_what_it_does() -> None:
    assert (
        interruptible(
            lambda: threading.current_thread() is threading.main_thread(), lambda: None
        )
        is False
    )
    with pytest.raises(ZeroDivisionError):
        interruptible(lambda: 1 / 0, lambda: None)


def test_one_lane_works_on_an_item_before_the_next_one_is_made() -> None:
    """Random models compute other numbers in another order."""
    events = list[str]()

    def items() -> Iterator[int]:
        for item in range(3):
            events.append(f"item {item}")
            yield item
            events.append(f"asked again after {item}")

    def work(item: int) -> None:
        time.sleep(0.02)  # the iterable would go on meanwhile
        events.append(f"work {item}")

    with Lanes(1) as lanes:
        assert list(lanes.in_order(work, items())) == [None] * 3
    assert events == [
        f"{what} {item}"
        for item in range(3)
        for what in ("item", "work", "asked again after")
    ]


def test_work_that_nobody_waits_for_is_not_begun() -> None:
    """A consumer that has seen enough ends the iteration."""
    begun = list[int]()
    go = threading.Event()

    def work(item: int) -> int:
        begun.append(item)
        if item:
            go.wait()
        return item

    with Lanes(2) as lanes:
        results = lanes.in_order(work, range(100))
        assert next(results) == 0
        results.close()
        go.set()
    # Item 0, and those that the two lanes had begun.
    assert len(begun) <= 3


def test_a_crash_is_that_of_the_item_that_crashes_alone() -> None:
    """Lanes may share an isolated process, whose end fails the work of both."""
    crashed = threading.Event()
    attempts = list[int]()

    def work(item: int) -> int:
        attempts.append(item)
        if item == 1:
            crashed.set()
            raise RuntimeCrash("ended while running item 1")
        if attempts.count(0) == 1 and crashed.wait(5):
            raise RuntimeCrash("ended while running item 0")
        return item

    with Lanes(2) as lanes:
        results = lanes.in_order(work, range(2))
        assert next(results) == 0
        with pytest.raises(RuntimeCrash, match="item 1"):
            next(results)
    assert sorted(attempts) == [0, 0, 1, 1]
