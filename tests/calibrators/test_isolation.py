"""A session in another process computes what it does in this one, and a crash there is an error
here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from calibrators import CalibrationError
from calibrators.errors import RuntimeCrash
from calibrators.onnx_runtime.isolation import (
    IsolatedSession,
    current,
    ending,
    isolated,
    start,
)
from calibrators.onnx_runtime.session import open_session
from tests.models import normal, parse, run, weight
from tests.native_faults import captured_mover, endless, kill_runs_of

POSIX = pytest.mark.skipif(os.name == "nt", reason="there are no signals to send")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary folder, in which nothing may be left."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    yield folder
    assert [
        path for path in folder.iterdir() if path.name != ".ses"
    ] == []  # which onnxruntime writes


def product() -> onnx.ModelProto:
    return parse(
        "g (float[N, 4] x) => (float[N, 4] y) { y = MatMul (x, w) }", w=weight(4, 4)
    )


def process_id() -> int:
    """The other process."""
    isolation = current()
    assert isolation is not None
    return isolation.process().number


def gone(number: int, seconds: float = 120) -> bool:
    """Whether a process ends within some time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.kill(number, 0)
        except ProcessLookupError:
            return True
        if (
            Path(f"/proc/{number}/stat").exists()
            and Path(f"/proc/{number}/stat").read_text().split()[2] == "Z"
        ):
            return True  # ended, and nobody has asked how
        time.sleep(0.05)
    return False


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor": (
        "g (float[N, 4] x) => (float[N, 4] y) { y = Sigmoid (x) }",
        {"x": normal(3, 4)},
    ),
    "large": (
        "g (float[N] x) => (float[N] y) { y = Neg (x) }",
        {"x": normal(3_000_000)},
    ),
    "empty": (
        "g (float[N, 4] x) => (float[N, 4] y) { y = Neg (x) }",
        {"x": np.zeros((0, 4), np.float32)},
    ),
    "scalar": (
        "g (float x) => (float y) { y = Neg (x) }",
        {"x": np.array(3, np.float32)},
    ),
    "transposed": (
        "g (float[4, 3] x) => (float[4, 3] y) { y = Neg (x) }",
        {"x": normal(3, 4).T},
    ),
    "float16": (
        "g (float16[N] x) => (float16[N] y) { y = Neg (x) }",
        {"x": normal(5).astype(np.float16)},
    ),
    "text": (
        "g (string[N] x) => (string[N] y) { y = Identity (x) }",
        {"x": np.array(["a", "ü"], object)},
    ),
    "sequence": (
        "g (float[4] x) => (seq(float[2]) y) { y = SplitToSequence <axis = 0> (x, two) }",
        {"x": np.arange(4, dtype=np.float32)},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_any_value_travels(kind: str) -> None:
    """Whatever onnxruntime takes and returns arrives with its type, shape and bits, and may be
    written to.
    """
    text, feeds = KINDS[kind]
    model = parse(text, **({"two": np.int64(2)} if kind == "sequence" else {}))
    [expected] = run(model, feeds)
    with isolated():
        # One session, on any processor: the default has a second one where sums saturate.
        session = open_session(model, integers=True)
        assert isinstance(session, IsolatedSession)
        [found] = session.run(None, feeds)
    pairs = (
        zip(found, expected, strict=True) if kind == "sequence" else [(found, expected)]
    )
    for a, b in pairs:
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(a, b)
        assert a.flags.writeable


def test_the_interface_and_errors_are_those_of_onnxruntime() -> None:
    import onnxruntime as ort

    here = ort.InferenceSession(
        product().SerializeToString(), providers=["CPUExecutionProvider"]
    )
    with isolated():
        session = open_session(product())
        for method in ("get_inputs", "get_outputs"):
            pairs = zip(
                getattr(session, method)(), getattr(here, method)(), strict=True
            )
            assert all(
                (a.name, a.type, a.shape) == (b.name, b.type, b.shape) for a, b in pairs
            )
        for feeds in ({}, {"x": normal(3, 5)}):
            with pytest.raises(Exception, match=r".") as expected:
                here.run(None, feeds)
            with pytest.raises(type(expected.value)) as found:
                session.run(None, feeds)
            assert str(found.value) == str(expected.value)
        with pytest.raises(Exception, match="No Op registered for Nothing"):
            open_session(parse("g (float[N] x) => (float[N] y) { y = Nothing (x) }"))


def test_sessions_in_files_and_with_stored_weights(tmp_path: Path) -> None:
    model, feeds = product(), {"x": normal(2, 4)}
    onnx.save(model, tmp_path / "model.onnx")
    with isolated():
        [found] = open_session(tmp_path / "model.onnx").run(None, feeds)
    np.testing.assert_array_equal(found, run(model, feeds)[0])


def test_threads_share_the_process() -> None:
    """Requests of several threads are served side by side, each with its own answer."""
    with isolated():
        session = open_session(product(), threads=1)
        inputs = [normal(2, 4, seed=seed) for seed in range(40)]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda x: session.run(None, {"x": x})[0], inputs))
    for x, y in zip(inputs, found, strict=True):
        np.testing.assert_array_equal(y, run(product(), {"x": x})[0])


def test_a_crash_is_an_error_and_other_sessions_go_on() -> None:
    """The error names the model and the signal.

    Sessions of before are opened again where they are needed.
    """
    model, feeds = product(), {"x": normal(2, 4)}
    with isolated():
        session = open_session(model)
        first = process_id()
        with pytest.raises(
            RuntimeCrash,
            match=r"ended by SIGABRT \(signal 6\) while loading the captured one; it printed",
        ):
            open_session(captured_mover(quantized=True), what="the captured one")
        [found] = session.run(None, feeds)
        assert process_id() != first
        assert gone(first)
    np.testing.assert_array_equal(found, run(model, feeds)[0])


@POSIX
def test_a_process_that_is_killed_while_it_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kill_runs_of("the endless one", monkeypatch)
    with isolated():
        session = open_session(endless(), what="the endless one")
        with pytest.raises(
            RuntimeCrash, match=r"ended by SIGKILL .* while running the endless one"
        ) as crash:
            session.run(None, {"x": normal(1, 4)})
        assert crash.value.killed
        np.testing.assert_array_equal(
            open_session(product()).run(None, {"x": normal(2, 4)})[0],
            run(product(), {"x": normal(2, 4)})[0],
        )


def test_work_after_a_kill_runs_in_another_process() -> None:
    """The system ends a killed process later; until then it must get no request."""
    feeds = {"x": normal(2, 4)}
    with isolated():
        isolation = current()
        assert isolation is not None
        session = open_session(product())
        expected = session.run(None, feeds)[0]
        for _ in range(5):
            isolation.process().kill()
            np.testing.assert_array_equal(session.run(None, feeds)[0], expected)


def test_models_go_with_their_sessions(temporary: Path) -> None:
    """One session's model lies on disk as long as the session lives, and the process holds no more
    of it afterwards.
    """
    with isolated():
        session = open_session(product())
        [folder] = temporary.glob("quark_onnx_*")
        assert len(list(folder.iterdir())) == 1
        del session
        assert list(folder.iterdir()) == []


def test_nothing_is_started_that_nobody_needs(temporary: Path) -> None:
    with isolated():
        assert not list(temporary.iterdir())
        before = current()
        with isolated():
            assert current() is before
    with isolated(wanted=False):
        assert current() is None
        open_session(product())


def test_it_may_be_started_before_there_is_a_model() -> None:
    start()  # outside of a block there is nothing to start
    with isolated():
        isolation = current()
        assert isolation is not None
        start()
        first = isolation.process()
        start()
        session = open_session(product())
        assert isolation.process() is first and session.open() is first


def test_a_session_does_not_outlive_its_block() -> None:
    with isolated():
        session = open_session(product())
    with pytest.raises(CalibrationError, match="ended with its isolated"):
        session.run(None, {"x": normal(2, 4)})


PARENT = """
import os, signal, sys, time
import numpy as np
from calibrators.onnx_runtime.isolation import current, isolated, start
from calibrators.onnx_runtime.session import open_session
from tests.models import normal
from tests.native_faults import endless
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
with isolated():
    session = open_session(endless())
    print(current().process()._popen.pid, flush=True)
    session.run(None, {"x": normal(1, 4)})
"""


@POSIX
@pytest.mark.parametrize("sent", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_the_process_does_not_outlive_the_one_that_it_works_for(
    sent: str, temporary: Path
) -> None:
    """A worker ends with its parent, however the parent ends, and its model files are removed."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert parent.stdout is not None
        number = int(parent.stdout.readline())
        time.sleep(0.3)
        assert len(list(temporary.glob("quark_onnx_*"))) == 1
        parent.send_signal(getattr(signal, sent))
        assert parent.wait(120) != 0
        assert gone(number)
        assert not list(temporary.glob("quark_onnx_*"))
    finally:
        parent.kill()
        parent.communicate()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_fork_leaves_the_process_alone() -> None:
    """It opens sessions of its own, writes nothing into the pipes that it inherits, and keeps none
    of them open.
    """
    feeds = {"x": normal(2, 4)}
    [expected] = run(product(), feeds)
    ended, end = os.pipe()
    with isolated():
        session = open_session(product())
        child = os.fork()
        if not child:
            same = current() is None and np.array_equal(
                open_session(product(), threads=1).run(None, feeds)[0], expected
            )
            os.close(end)
            os.read(ended, 1)  # outlives the block
            os._exit(0 if same else 1)
        np.testing.assert_array_equal(session.run(None, feeds)[0], expected)
        number = process_id()
    assert gone(number)
    os.close(end)
    os.close(ended)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_ends_in_words() -> None:
    assert ending(-9) == "was ended by SIGKILL (signal 9)"
    assert ending(1) == "ended with exit code 1"
    assert ending(-99) == "was ended by a signal (signal 99)"
