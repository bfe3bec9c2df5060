"""Run the command line on malformed models: python -m tests.endtoend.fuzz --count 10000 --seed 0

Each mutant is a damaged copy of a small model, given to one command. The commands run in a worker
process with a limit of memory; one that dies or does not return is replaced. A run counts as a
failure if it

- ends with exit code 3, an internal error of this package;
- kills the worker (a native crash), or does not end in time;
- takes more than a gigabyte;
- leaves a file behind, beside the output of a run that ended well.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

from tests.endtoend.mutations import mutant
from tests.endtoend.random_graphs import draw
from tests.models import MODELS, samples

ROOT = Path(__file__).parents[2]
#: Bytes that a run may take, beyond what the process has when it begins.
MEMORY = 1 << 30
#: Bytes of addresses that a worker may have: far more, as libraries reserve more than they use.
ADDRESSES = 12 << 30
#: Seconds that a run may take, on a machine that is busy.
SECONDS = 120.0
#: Seconds until a new worker answers.
START = 300.0

_DATA = ("--data", "data")
_OUTPUT = ("-o", "out.onnx")
#: The command lines that mutants are given to.
COMMANDS: dict[str, tuple[str, ...]] = {
    "A8W8": ("quantize", "m.onnx", *_OUTPUT, *_DATA),
    "XINT8": ("quantize", "m.onnx", *_OUTPUT, *_DATA, "--config", "fast.yaml"),
    "random": (
        "quantize",
        "m.onnx",
        *_OUTPUT,
        "--random-data",
        "2",
        "--preset",
        "A16W8",
    ),
    "DYNAMIC": ("quantize", "m.onnx", *_OUTPUT, "--dynamic"),
    "INT4": ("quantize", "m.onnx", *_OUTPUT, "--preset", "INT4"),
    "BF16": ("quantize", "m.onnx", *_OUTPUT, "--preset", "BF16"),
    "compare": ("compare", "m.onnx", "sound.onnx", *_DATA),
    "compared": ("compare", "sound.onnx", "m.onnx", *_DATA),
    "analyze": (
        "analyze",
        "m.onnx",
        "m.onnx",
        "--random-data",
        "1",
        "--html",
        "page.html",
    ),
    "explain": ("explain", "m.onnx"),
    "convert": ("convert", "m.onnx", *_OUTPUT, "--to", "opset", "--opset", "21"),
    "float16": ("convert", "m.onnx", *_OUTPUT, "--to", "float16"),
    "check": ("npu", "check", "m.onnx"),
    "preflight": ("npu", "preflight", "m.onnx"),
    "legalize": ("npu", "legalize", "m.onnx", *_OUTPUT),
}
#: What runs may write.
WRITTEN = {"out.onnx", "out.onnx.data", "page.html"}


@dataclass
class Outcome:
    """The outcome of a command on one mutant.

    Attributes:
        code: the exit code; None where the process died or did not return.
        text: what was printed to stderr.
        failure: what is wrong with that; empty if nothing is.
    """

    index: int
    model: str
    command: str
    mutations: list[str]
    code: int | None = None
    seconds: float = 0.0
    memory: int = 0
    text: str = ""
    failure: str = ""
    left: list[str] = field(default_factory=list)


def sound(index: int) -> tuple[str, ModelProto, list[dict[str, Any]]]:
    """The model that a mutant is made of, and data for it."""
    names = sorted(MODELS)
    place = index % (len(names) + 10)
    if place < len(names):
        model = MODELS[names[place]]()
        return names[place], model, samples(model, 2)
    seed = place - len(names)
    model, data = draw(seed)
    return f"random {seed}", model, data


def made(
    index: int, seed: int
) -> tuple[Outcome, bytes, ModelProto, list[dict[str, Any]]]:
    """A mutant, and the command that gets it."""
    name, model, data = sound(index)
    changed, mutations = mutant(model, seed * 1_000_003 + index)
    command = list(COMMANDS)[(index * 7 + index // len(COMMANDS)) % len(COMMANDS)]
    return Outcome(index, name, command, mutations), changed, model, data


def attempt(index: int, seed: int) -> Outcome:
    """Give one mutant to one command, in this process."""
    from quark_onnx.cli import main

    outcome, changed, model, data = made(index, seed)
    with (
        tempfile.TemporaryDirectory(prefix="fuzz-") as name,
        pytest.MonkeyPatch.context() as process,
    ):
        process.chdir(name)
        folder, temporary = Path(name), Path(name) / "tmp"
        _write(folder, changed, model, data)
        tempfile.tempdir = str(temporary)
        before = _listing(folder)
        captured, start, base = io.StringIO(), time.monotonic(), _reset_peak()
        try:
            with (
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(captured),
            ):
                outcome.code = main([*COMMANDS[outcome.command], "--verbose"])
        finally:
            tempfile.tempdir = None
        outcome.seconds, outcome.memory = (
            time.monotonic() - start,
            max(0, _peak() - base),
        )
        outcome.text = captured.getvalue()
        outcome.left = sorted(
            _listing(folder) - before - (WRITTEN if outcome.code in (0, 1) else set())
        )
    outcome.failure = _judged(outcome)
    return outcome


def _write(
    folder: Path, changed: bytes, model: ModelProto, data: list[dict[str, Any]]
) -> None:
    (folder / "m.onnx").write_bytes(changed)
    (folder / "sound.onnx").write_bytes(model.SerializeToString())
    (folder / "data.bin").write_bytes(bytes(64))
    (folder / "fast.yaml").write_text("preset: XINT8\nsearch: 0\n", encoding="utf-8")
    (folder / "data").mkdir()
    (folder / "tmp").mkdir()
    for place, sample in enumerate(data):
        np.savez(folder / "data" / f"{place}.npz", allow_pickle=False, **sample)


def _listing(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


#: How onnxruntime, numpy and Python say that there is no memory left.
_EXHAUSTED = re.compile(
    r"bad_alloc|Failed to allocate memory|MemoryError|Unable to allocate|memory does"
    r" not suffice"
)


def _judged(outcome: Outcome) -> str:
    if outcome.code not in (0, 1, 2):
        return "internal error"
    if outcome.memory > MEMORY or _EXHAUSTED.search(outcome.text):
        return "memory"
    if outcome.left:
        return "files left"
    return ""


def _reset_peak() -> int:
    """The memory of this process, in bytes, from where its peak is counted anew.

    0 where the system cannot tell.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return 0
    return _peak()


def _peak() -> int:
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return 0
    return (
        int(
            next(
                line for line in status.splitlines() if line.startswith("VmHWM")
            ).split()[1]
        )
        * 1024
    )


# Workers


def work() -> None:
    """Read the numbers of mutants from stdin, and write what became of each as a line of JSON."""
    if hasattr(os, "setrlimit") or sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what C++ prints must not come between the answers
    for line in sys.stdin:
        index, seed = json.loads(line)
        print(json.dumps(asdict(attempt(index, seed))), file=answers, flush=True)


class Worker:
    """A process that runs one mutant after another."""

    def __init__(self, folder: Path) -> None:
        self.alive = True
        self._log = folder / f"worker-{time.monotonic_ns()}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.endtoend.fuzz", "--worker"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)},
            )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self._limit = START

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def run(self, index: int, seed: int) -> Outcome:
        """What became of a mutant; the worker is gone where it has neither died nor answered."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps([index, seed]) + "\n")
            self._process.stdin.flush()
        limit, self._limit = self._limit, SECONDS
        try:
            line = self._lines.get(timeout=limit)
        except queue.Empty:
            return self._lost(index, seed, f"no end after {limit:.0f} s")
        if line:
            return Outcome(**json.loads(line))
        return self._lost(index, seed, f"crash ({self._process.wait()})")

    def _lost(self, index: int, seed: int, failure: str) -> Outcome:
        self.close()
        outcome = made(index, seed)[0]
        outcome.failure = failure
        outcome.text = self._log.read_bytes()[-4000:].decode(errors="replace")
        return outcome

    def close(self) -> None:
        """End the process."""
        self.alive = False
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                if stream is not None:
                    stream.close()


def outcomes(indices: range, seed: int) -> Iterator[Outcome]:
    """Yield the outcomes of some mutants in their order."""
    with tempfile.TemporaryDirectory(prefix="fuzz-run-") as folder:
        worker = Worker(Path(folder))
        try:
            for index in indices:
                if not worker.alive:
                    worker.close()
                    worker = Worker(Path(folder))
                yield worker.run(index, seed)
        finally:
            worker.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=500, help="how many mutants")
    parser.add_argument(
        "--first", type=int, default=0, help="the number of the first one"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only",
        type=int,
        help="run a single mutant in this process, with what it prints",
    )
    parser.add_argument(
        "--keep",
        type=Path,
        help="with --only: a folder to write the mutant and its data to",
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work()
        return
    if options.only is not None:
        if options.keep:
            options.keep.mkdir(parents=True)
            _write(options.keep, *made(options.only, options.seed)[1:])
        outcome = attempt(options.only, options.seed)
        print(outcome.text)
        print(outcome)
        return
    codes, failures, start = Counter[str](), Counter[str](), time.monotonic()
    most, longest = 0, 0.0
    for outcome in outcomes(
        range(options.first, options.first + options.count), options.seed
    ):
        codes[f"{outcome.command}: {outcome.code}"] += 1
        most, longest = max(most, outcome.memory), max(longest, outcome.seconds)
        if outcome.failure:
            failures[outcome.failure] += 1
            last = outcome.text.strip().splitlines()[-1:] or [""]
            print(
                f"{outcome.index}: {outcome.failure}: {outcome.model},"
                f" {outcome.command}, {outcome.mutations}, {outcome.memory >> 20} MB,"
                f" {outcome.left}, {last[0][:300]}",
                flush=True,
            )
    totals = Counter[str]()
    for name, number in codes.items():
        totals[name.rpartition(" ")[2]] += number
    print(
        f"{options.count} mutants in {time.monotonic() - start:.0f} s; exit codes"
        f" {dict(sorted(totals.items()))}; at most {most >> 20} MB and {longest:.1f} s;"
        f" failures: {dict(failures) or 'none'}"
    )


if __name__ == "__main__":
    main()
