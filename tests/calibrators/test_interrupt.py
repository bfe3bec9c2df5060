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

from calibrators.errors import RuntimeCrash
from calibrators.onnx_runtime.interrupt import Lanes, interruptible
from calibrators.onnx_runtime.isolation import isolated
from calibrators.onnx_runtime.session import open_session
from tests.models import normal
from tests.native_faults import endless

pytestmark = pytest.mark.skipif(os.name == "nt", reason="there are no signals to send")

#: How long a run may take to end, in seconds, on a machine that is busy.
SOON = 5.0


class Asked(BaseException):
    """What the handler of the signal raises."""


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    def handle(*_: object) -> None:
        raise Asked

    before = signal.signal(signal.SIGUSR1, handle)
    yield
    signal.signal(signal.SIGUSR1, before)


def signalled(work: Callable[[], Any]) -> float:
    """Seconds from a signal, which is sent while some work is done, to the end of the work."""
    sent: list[float] = []

    def send() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGUSR1)

    threading.Timer(0.5, send).start()
    with pytest.raises(Asked):
        work()
    return time.monotonic() - sent[0]


@pytest.mark.parametrize("isolate", [False, True])
def test_a_run_in_the_main_thread(isolate: bool) -> None:
    with isolated(isolate):
        session = open_session(endless())
        assert signalled(lambda: session.run(None, {"x": normal(1, 4)})) < SOON


@pytest.mark.parametrize("isolate", [False, True])
def test_runs_in_lanes(isolate: bool) -> None:
    """Those that have begun are ended, those that wait do not begin."""
    failures: list[BaseException] = []
    with isolated(isolate):
        session = open_session(endless(), threads=1)

        def run() -> None:
            try:
                session.run(None, {"x": normal(1, 4)})
            except Exception as error:
                failures.append(error)
                raise

        def wait() -> None:
            with Lanes(2) as lanes:
                futures = [lanes.submit(run) for _ in range(3)]
                futures[0].result()

        assert signalled(wait) < SOON
    assert len(failures) == 2
    assert all(isinstance(error, RuntimeCrash) == isolate for error in failures)


def test_a_session_runs_again_after_an_interruption() -> None:
    """What a signal has ended once is not ended for good."""
    session = open_session(endless(conditional=True))
    signalled(lambda: session.run(None, {"x": -np.ones((1, 4), np.float32)}))
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
