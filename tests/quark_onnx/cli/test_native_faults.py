"""The command line survives crashes of onnxruntime, and signals end it whatever onnxruntime is
running.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests.models import normal
from tests.native_faults import captured_mover, endless

#: Says so once the main thread has waited for a second, as it does for a run without an end; and
#: takes signals also where the tests themselves run with signals ignored.
START = """
import signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)

def watch():
    waits = 0
    while waits < 10:
        time.sleep(0.1)
        frame = sys._current_frames()[threading.main_thread().ident]
        waiting = frame.f_code.co_name == "wait" and frame.f_code.co_filename == threading.__file__
        waits = waits + 1 if waiting else 0
    print("busy", flush=True)

threading.Thread(target=watch, daemon=True).start()
"""
PROGRAM = (
    START
    + """
import runpy
if __name__ == "__main__":
    runpy.run_module("quark_onnx", run_name="__main__")
"""
)
#: What a user of Python writes.
PYTHON = (
    START
    + """
from quark_onnx import compare, quantize
try:
    {call}
except KeyboardInterrupt:
    print("interrupted")
"""
)
#: Seconds in which a command has to end, on a machine that is busy; without the signal it never
#: ends.
SOON = 300.0


@pytest.fixture
def models(folder: Path) -> Path:
    """Models, data/ for the one that crashes, and one/ for the one without an end."""
    onnx.save(captured_mover(quantized=False), folder / "float.onnx")
    onnx.save(captured_mover(quantized=True), folder / "crash.onnx")
    onnx.save(endless(), folder / "endless.onnx")
    onnx.save(endless(conditional=True), folder / "late.onnx")
    (folder / "crash").mkdir()
    np.savez(folder / "crash" / "0.npz", x=normal(1, 3, 8, 8), cond=np.array(True))
    for name, signs in ("one", [1]), ("late", [1, *[-1] * 24]):
        (folder / name).mkdir()
        for index, sign in enumerate(signs):
            np.savez(
                folder / name / f"{index}.npz", x=np.full((1, 4), sign, np.float32)
            )
    (folder / "temporary").mkdir()
    return folder


def test_a_crash_is_one_line(cli: Any, models: Path) -> None:
    """With exit code 2, the models and the signal.

    Nothing of onnxruntime's own reaches the terminal.
    """
    done = cli("compare", "float.onnx", "crash.onnx", "--data", "crash")
    assert (done.code, done.out) == (2, "")
    assert all(
        word in done.error
        for word in ("float.onnx, crash.onnx: ", "SIGABRT", "loading the other model")
    )
    done = cli("compare", "float.onnx", "crash.onnx", "--data", "crash", "--json")
    assert done.json["error"]["kind"] == "RuntimeCrashError"


def test_without_isolation_a_crash_ends_the_command(models: Path) -> None:
    """The model of the other tests does crash onnxruntime."""
    command = [
        sys.executable,
        "-m",
        "quark_onnx",
        "compare",
        "float.onnx",
        "crash.onnx",
        "--data",
        "crash",
    ]
    done = subprocess.run(
        [*command, "--no-isolation"], capture_output=True, check=False
    )
    assert done.returncode == -signal.SIGABRT


def test_every_command_that_opens_sessions_has_the_option(cli: Any) -> None:
    for command in ("quantize", "search", "explain", "compare", "analyze", "convert"):
        assert "--no-isolation" in cli(command, "--help").out
    for action in ("check", "legalize", "preflight", "cut", "deploy"):
        assert "--no-isolation" in cli("npu", action, "--help").out


def ended(
    folder: Path, arguments: list[str], sent: str
) -> subprocess.CompletedProcess[str]:
    """A program that a signal is sent to once onnxruntime is busy.

    It has to end soon, and to leave nothing.
    """
    before = sorted(folder.rglob("*"))
    environment = {**os.environ, "TMPDIR": str(folder / "temporary")}
    process = subprocess.Popen(
        [sys.executable, "-c", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "busy\n", process.communicate()
        process.send_signal(getattr(signal, sent))
        out, err = process.communicate(timeout=SOON)
    finally:
        process.kill()
        process.communicate()
    left = [
        path for path in sorted(folder.rglob("*")) if path.name != ".ses"
    ]  # which onnxruntime writes
    assert left == before
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


@pytest.mark.skipif(os.name == "nt", reason="there are no signals to send")
@pytest.mark.parametrize(
    "command",
    [
        "quantize endless.onnx -o out.onnx --data one",
        "compare endless.onnx endless.onnx --data one --no-isolation",
        "quantize late.onnx -o out.onnx --data late --no-isolation",
        "quantize late.onnx -o out.onnx --data late --workers 2",
    ],
)
@pytest.mark.parametrize("sent, code", [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_ends_a_command(
    models: Path, command: str, sent: str, code: int
) -> None:
    """In the main thread and in threads and processes that calibrate, with its exit code and
    without a trace.
    """
    done = ended(models, [PROGRAM, *command.split()], sent)
    word = "interrupted" if sent == "SIGINT" else "ended by SIGTERM"
    assert (done.returncode, done.stdout, done.stderr) == (
        code,
        "",
        f"quark-onnx: {word}\n",
    )


@pytest.mark.skipif(os.name == "nt", reason="there are no signals to send")
@pytest.mark.parametrize(
    "call",
    [
        "quantize('endless.onnx', 'one', output='out.onnx')",
        "quantize('late.onnx', 'late', output='out.onnx', isolate=True)",
        "compare('endless.onnx', 'endless.onnx', 'one', isolate=True)",
    ],
)
def test_control_c_ends_a_call_in_python(models: Path, call: str) -> None:
    """The call raises KeyboardInterrupt, as any Python code does."""
    done = ended(models, [PYTHON.format(call=call)], "SIGINT")
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")
