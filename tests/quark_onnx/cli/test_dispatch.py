"""The frame around the commands: help, usage errors, exit codes, consoles, interruption."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import quark_onnx
from quark_onnx.cli import main

ROOT = Path(quark_onnx.__file__).parents[1]
#: Also where the tests themselves run with signals ignored, as shells start background jobs, and
#: nohup all.
INTERRUPTIBLE = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
for name in ("SIGTERM", "SIGHUP"):
    if hasattr(signal, name):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
"""


def start(*arguments: str, code: str = "", **environment: str) -> subprocess.Popen[str]:
    how = (
        ["-c", code + "runpy.run_module('quark_onnx', run_name='__main__')"]
        if code
        else ["-m", "quark_onnx"]
    )
    return subprocess.Popen(
        [sys.executable, *how, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )


def test_nothing_to_do_prints_the_help(cli: Any) -> None:
    finished = cli()
    assert (finished.code, finished.out) == (2, "")
    assert "quantize" in finished.err


def test_version(cli: Any) -> None:
    finished = cli("--version")
    assert (finished.code, finished.out) == (
        0,
        f"quark-onnx {quark_onnx.__version__}\n",
    )


CONFIG = (
    "--preset --config --calibrator --per-channel --per-tensor --exclude --op-types --nodes"
    " --unsafe --no-prepare"
)
DATA = (
    "--data --random-data --dim --limit --input-layout --image-size --mean --std"
    " --scale --color --layout --resize --resize-to --pad-value --interpolation"
)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("", "quantize calibrate search explain compare analyze list --version"),
        (
            "quantize",
            (
                f"MODEL --output {DATA} {CONFIG} --auto-exclude --auto-mixed --min-sqnr"
                " --workers --json --quiet --verbose"
            ),
        ),
        ("explain", f"MODEL {CONFIG} --json --quiet --verbose"),
        (
            "search",
            (
                f"MODEL --output {DATA} --preset --calibrator --optimize"
                " --granularity --budget --min-sqnr --journal --json --quiet"
                " --verbose"
            ),
        ),
        ("compare", f"FLOAT QUANT {DATA} --min-sqnr --json --quiet --verbose"),
        (
            "convert",
            ("MODEL --output --to --shape --opset --io --json --quiet --verbose"),
        ),
        ("list", "presets operators formats calibrators --json --quiet --verbose"),
    ],
)
def test_help_has_every_option_and_an_example(
    cli: Any, command: str, words: str
) -> None:
    finished = cli(*command.split(), "--help")
    assert (finished.code, finished.err) == (0, "")
    assert set(words.split()) <= set(re.findall(r"[\w-]+", finished.out))
    assert f"\n  quark-onnx {command}" in finished.out.split("\nexample", 1)[1]
    assert finished.out.isascii()


def test_unsafe_says_what_it_means(cli: Any) -> None:
    help_text = " ".join(cli("quantize", "--help").out.split())
    assert "box decoding" in help_text.split("--unsafe", 2)[-1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["quantise"], ["unknown command 'quantise'", "did you mean 'quantize'"]),
        (["--jsn"], ["COMMAND"]),
        (["quantize"], ["MODEL", "-o/--output"]),
        (
            [
                "quantize",
                "--exclude",
                "a",
                "model.onnx",
                "-o",
                "o.onnx",
                "--random-data",
            ],
            ["MODEL", "models come first"],
        ),
        (
            ["quantize", "m.onnx", "-o", "o.onnx", "--random-data", "--calibratr", "x"],
            ["did you mean '--calibrator'"],
        ),
        (
            ["quantize", "m.onnx", "-o", "o.onnx", "--random-data", "--calibratr=x"],
            ["did you mean '--calibrator'"],
        ),
        (
            ["npu", "deploy", "m.onnx"],
            ["-o/--output", "; see quark-onnx npu deploy --help"],
        ),
        (["explain", "model.onnx", "other.onnx"], ["unexpected argument 'other.onnx'"]),
        (["explain", "--conf", "A8W8", "model.onnx"], ["unknown option '--conf'"]),
        # The options of the action, and not those of its command.
        (
            ["llm", "ptq", "m", "-o", "o", "--scheem", "fp8"],
            ["unknown option '--scheem'; did you mean '--scheme'?"],
        ),
        (["llm", "ptq", "m", "-o", "o", "--fx"], ["unknown option '--fx'; known: --"]),
        (["npu", "check", "m.onnx", "-q"], ["'-q'; see quark-onnx npu check --help"]),
    ],
)
def test_usage_errors(cli: Any, arguments: list[str], words: list[str]) -> None:
    finished = cli(*arguments)
    assert (finished.code, finished.out) == (2, "")
    for word in words:
        assert word in finished.error


@pytest.mark.parametrize("flag", ["--json", "--json=-", "--json=report.json"])
def test_usage_errors_in_json(cli: Any, folder: Path, flag: str) -> None:
    finished = cli("explain", flag)
    assert finished.code == 2
    error = {"kind": "UsageError", "message": finished.error}
    assert finished.json == {"schema": 1, "command": "explain", "error": error}
    assert not Path("report.json").exists()


def test_errors_go_to_the_json_file(cli: Any) -> None:
    finished = cli("explain", "absent.onnx", "--json", "report.json")
    assert (finished.code, finished.out) == (2, "")
    document = json.loads(Path("report.json").read_text(encoding="utf-8"))
    error = {"kind": "ModelNotFoundError", "message": finished.error}
    assert document == {"schema": 1, "command": "explain", "error": error}


def test_a_file_that_the_system_refuses_is_bad_input(
    cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "secret.onnx")

    monkeypatch.setattr("quark_onnx.api.plan_for", refuse)
    finished = cli("explain", "model.onnx")
    assert (finished.code, finished.error) == (2, "secret.onnx: Permission denied")


def test_a_warning_that_a_command_repeats_is_printed_once(
    cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the trials of a search would; the next command prints it again."""
    import logging

    def warn(*_: object) -> None:
        for _ in range(3):
            logging.getLogger("quark_onnx.api").warning("the scales are not searched")
        raise PermissionError(13, "Permission denied", "secret.onnx")

    monkeypatch.setattr("quark_onnx.api.plan_for", warn)
    for _ in range(2):
        finished = cli("explain", "model.onnx")
        assert finished.err.count("the scales are not searched") == 1


def test_nothing_is_left_behind_in_the_process(cli: Any) -> None:
    import logging
    import warnings

    handlers, show = (
        list(logging.getLogger("quark_onnx").handlers),
        warnings.showwarning,
    )
    cli("quantize", "model.onnx", "-o", "out.onnx", "--random-data")
    cli("explain", "absent.onnx")
    assert (logging.getLogger("quark_onnx").handlers, warnings.showwarning) == (
        handlers,
        show,
    )
    assert logging.getLogger("quark_onnx").level == logging.NOTSET


def test_default_arguments_are_those_of_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["quark-onnx", "list", "presets"])
    assert main() == 0
    assert "A8W8" in capsys.readouterr().out


def test_as_a_module() -> None:
    process = start("explain", "absent.onnx", "--json")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 2
    assert err.startswith("quark-onnx: error: model file absent.onnx")
    assert err.count("\n") == 1
    assert json.loads(out)["error"]["kind"] == "ModelNotFoundError"


@pytest.mark.parametrize(
    "arguments", [["модель.onnx"], ["модель.onnx", "--json"], ["нет.onnx"]]
)
def test_console_without_unicode(arguments: list[str]) -> None:
    Path("model.onnx").rename("модель.onnx")
    process = start("explain", *arguments, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    out, err = process.communicate(timeout=300)
    assert process.returncode == (2 if arguments == ["нет.onnx"] else 0)
    assert "Traceback" not in err
    assert (
        "\\u043e\\u0434\\u0435\\u043b\\u044c.onnx" in out
        or "\\u043d\\u0435\\u0442.onnx" in err
    )
    assert (out + err).isascii()


@pytest.mark.skipif(os.name == "nt", reason="pipes end otherwise there")
def test_closed_pipe() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        [sys.executable, "-m", "quark_onnx", "list"],
        stdout=writer,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    os.close(writer)
    assert (process.returncode, process.stderr) == (141, b"")


@pytest.mark.skipif(os.name == "nt", reason="there are no signals to send")
@pytest.mark.parametrize(
    ("sent", "workers", "code", "word"),
    [
        ("SIGINT", "1", 130, "interrupted"),
        ("SIGINT", "2", 130, "interrupted"),
        ("SIGTERM", "2", 143, "ended by SIGTERM"),
        ("SIGHUP", "1", 129, "ended by SIGHUP"),
    ],
)
def test_a_signal_leaves_nothing(
    folder: Path, sent: str, workers: str, code: int, word: str
) -> None:
    files = sorted(folder.iterdir())
    command = (
        "quantize",
        "model.onnx",
        "-o",
        "out.onnx",
        "--random-data",
        "100000000",
        "--workers",
        workers,
    )
    process = start(*command, code=INTERRUPTIBLE)
    assert process.stderr is not None
    warning = process.stderr.readline()
    assert "random data" in warning
    time.sleep(0.5)
    process.send_signal(getattr(signal, sent))
    try:
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()  # which does nothing to what has ended
    assert (process.returncode, out, err) == (code, "", f"quark-onnx: {word}\n")
    assert sorted(folder.iterdir()) == files


@pytest.mark.skipif(os.name == "nt", reason="there are no signals to send")
def test_a_signal_while_writing_leaves_nothing(
    cli: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = sorted(folder.iterdir())

    def die(gate: object, path: Path) -> None:
        assert path.exists() and sorted(folder.iterdir()) != files
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(sys.modules["quark_onnx.writing.finish"].Gate, "passed", die)
    finished = cli("quantize", "model.onnx", "-o", "out.onnx", "--data", "data")
    assert (finished.code, finished.err) == (143, "quark-onnx: ended by SIGTERM\n")
    assert sorted(folder.iterdir()) == files
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_signals_that_are_ignored_stay_so(
    cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after nohup."""
    name = "SIGHUP" if hasattr(signal, "SIGHUP") else "SIGTERM"
    number, found = getattr(signal, name), []
    monkeypatch.setattr(
        "quark_onnx.api.plan_for", lambda *_: found.append(signal.getsignal(number))
    )
    before = signal.signal(number, signal.SIG_IGN)
    try:
        cli("explain", "model.onnx")
    finally:
        signal.signal(number, before)
    assert found == [signal.SIG_IGN]


@pytest.mark.skipif(
    not Path("/proc/self/stat").exists(),
    reason="looks at processes as Linux shows them",
)
def test_workers_do_not_outlive_what_they_work_for() -> None:
    command = (
        "quantize",
        "model.onnx",
        "-o",
        "out.onnx",
        "--random-data",
        "10000000",
        "--workers",
        "2",
    )
    process = start(*command)
    deadline = time.monotonic() + 300
    while len(workers := workers_of(process.pid)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(1)  # the workers are amid their work
    process.kill()
    process.communicate(timeout=300)
    deadline = time.monotonic() + 120
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline, "a worker goes on alone"
        time.sleep(0.1)


def workers_of(parent: int) -> list[int]:
    """The process ids of the spawned workers."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            ours = process.name.isdecimal() and (
                process / "stat"
            ).read_text().rpartition(")")[2].split()[1] == str(parent)
            if ours and b"spawn_main" in (process / "cmdline").read_bytes():
                found.append(int(process.name))
        except OSError:  # it has ended meanwhile
            continue
    return found


@pytest.mark.skipif(os.name == "nt", reason="streams are closed otherwise there")
@pytest.mark.parametrize(("model", "code"), [("model.onnx", 0), ("absent.onnx", 2)])
def test_without_a_stderr(model: str, code: int) -> None:
    finished = subprocess.run(
        [
            "sh",
            "-c",
            '"$0" -m quark_onnx quantize "$1" -o out.onnx --random-data --quiet 2>&-',
            sys.executable,
            model,
        ],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert (finished.returncode, finished.stdout) == (code, b"")
    assert Path("out.onnx").exists() == (code == 0)


def test_memory_that_does_not_suffice_is_bad_input(
    cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("quark_onnx.api.plan_for", refuse)
    finished = cli("explain", "model.onnx")
    assert (finished.code, finished.error) == (2, "the memory does not suffice")


@pytest.mark.skipif(os.name == "nt", reason="there are no signals to send")
@pytest.mark.parametrize(("sent", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_that_native_code_makes_another_error_of(
    cli: Any, monkeypatch: pytest.MonkeyPatch, sent: str, code: int
) -> None:
    def convert(*_: object) -> None:
        try:
            os.kill(os.getpid(), getattr(signal, sent))
            time.sleep(10)
        except BaseException:
            raise RuntimeError("conversion failed") from None

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr("quark_onnx.api.plan_for", convert)
    try:
        assert cli("explain", "model.onnx").code == code
    finally:
        signal.signal(signal.SIGINT, before)
