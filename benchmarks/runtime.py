"""Runtime of the files that presets write: ours, onnxruntime's own, and the float model, on one
thread.

    QUARK_ONNX_DATA=DIR python benchmarks/runtime.py [--tasks squeezenet ...] [--presets A8W8
        DYNAMIC ...] [--nncf-python VENV/bin/python] [--samples 16] [--repeats 48] [--seconds 5]
        [--clock cpu] [--again] [--report]

Each file is written in a process of its own. Then one process for each model and preset opens all
three sessions and runs them in turn. The medians are reported, and the median of the ratios of each
turn, so that what slows the machine for a while slows all three. Default sessions on the CPU with
one thread, the first calibration sample. A large model gets fewer turns, at least 12, to take no
more than `--seconds`; a row that misses its mark is measured once more with three times the turns,
which count.

onnxruntime's file is what its documentation advises for the same types: `quantize_static` after its
pre-processing (a scale for each channel, minmax), `quantize_dynamic`, or `MatMulNBitsQuantizer`,
which leaves convolutions float. NNCF's file is that of its defaults, next to our preset of the same
types, where an environment with NNCF is named.

Rows go to OUT/runtime.json one by one; a later run measures what is missing, or was made by other
code, or all `--again`. Files that other code writes are timed only where a byte of them differs.
The exit code is 1 when a mark is missed or was not measured: ours takes at most 1.02 times as long
as onnxruntime's and as NNCF's.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice, permutations
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from _data import Samples, digest, load
from _results import (
    Row,
    Store,
    add_store_arguments,
    add_turn_arguments,
    due,
    table,
)
from _settings import Setting
from _tools import Nncf, OnnxRuntime, Ours

TASKS = (
    "squeezenet",
    "mobilenetv2",
    "resnet20",
    "resnet44",
    "yolox_nano",
    "ultraface",
    "minilm-stsb",
)
STATIC = ("A8W8", "S8S8", "U8U8", "A16W8", "S16S8", "INT16", "A8W4", "A16W4")
WEIGHTS = {
    "W8": (8, True),
    "INT4": (4, True),
    "UINT4": (4, False),
}  # bits, and whether codes are symmetric
PRESETS = (*STATIC, "XINT8", "DYNAMIC", *WEIGHTS)
MOST = 1.02
LEAST_TURNS = 12  # twice in every order of three files
#: Our preset with the types of NNCF's defaults.
DEFAULTS = "A8W8"
IDLE = 0.9  # of the float model's size: a file that is larger has next to nothing in few bits


def header(first: str, peer: str) -> tuple[str, ...]:
    """Names of the columns of a table beside a peer's files."""
    times = ("float ms", "ours ms", f"{peer} ms")
    return (first, *times, "ours/float", f"ours/{peer}", "verdict")


def write_ours(model: Path, samples: Samples, preset: str, output: Path) -> None:
    """Our file, as README shows it."""
    from quark_onnx import QConfig, quantize

    quantize(model, samples if QConfig.of(preset).measures else None, preset, output)


def write_theirs(model: Path, samples: Samples, preset: str, output: Path) -> None:
    """onnxruntime's file for the same types."""
    if preset in STATIC:
        OnnxRuntime().quantize(
            model, samples, Setting(preset, "minmax", per_channel=True), output
        )
    elif preset == "DYNAMIC":
        from onnxruntime.quantization import QuantType, quantize_dynamic

        quantize_dynamic(
            model, output, weight_type=QuantType.QUInt8
        )  # ConvInteger with int8 has no fast kernel
    else:
        import onnx
        from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

        bits, symmetric = WEIGHTS[preset]
        quantizer = MatMulNBitsQuantizer(
            onnx.load(model), bits=bits, block_size=32, is_symmetric=symmetric
        )
        quantizer.process()
        quantizer.model.save_model_to_file(str(output))


WRITERS: dict[str, Callable[[Path, Samples, str, Path], None]] = {
    "ours": write_ours,
    "onnxruntime": write_theirs,
}


def run_in_turn(
    files: dict[str, Path], feeds: Any, repeats: int, seconds: float, clock: str
) -> dict[str, list[float]]:
    """Milliseconds of each turn of each file, in a default session with one thread.

    There are `repeats` turns, or fewer if `seconds` are over.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    sessions = {
        name: onnxruntime.InferenceSession(
            str(file), options, providers=["CPUExecutionProvider"]
        )
        for name, file in files.items()
    }
    now = time.process_time if clock == "cpu" else time.perf_counter
    taken: dict[str, list[float]] = {name: [] for name in sessions}
    for session in sessions.values():  # the first run makes room
        session.run(None, feeds)
    end = time.perf_counter() + seconds
    # each after each other: caches hold what ran before
    for turn, order in enumerate(islice(cycle(permutations(sessions)), repeats)):
        if turn >= LEAST_TURNS and time.perf_counter() > end:
            break
        for name in order:
            start = now()
            sessions[name].run(None, feeds)
            taken[name].append(1000 * (now() - start))
    return taken


def figures(taken: dict[str, list[float]]) -> Row:
    """Medians, and the medians of the ratios of each turn.

    >>> figures({"float": [4.0, 8.0, 4.0], "ours": [2.0, 4.0, 3.0]})
    {'turns': 3, 'float': 4.0, 'ours': 3.0, 'ours/float': 0.5}
    """
    row: Row = {"turns": min(map(len, taken.values()))}
    row |= {name: median(times) for name, times in taken.items()}
    for other in taken:
        if "ours" in taken and other != "ours":
            pairs = zip(taken["ours"], taken[other], strict=True)
            row[f"ours/{other}"] = median(ours / theirs for ours, theirs in pairs)
    return row


def apart(*arguments: object) -> tuple[str, str]:
    """What this program prints in a process of its own, or why it failed."""
    command = [sys.executable, __file__, *map(str, arguments)]
    done = subprocess.run(
        command,
        text=True,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return "", lines[-1][:200]
    return done.stdout.strip().splitlines()[-1], ""


def write(
    tool: str,
    model: Path,
    samples: Path,
    preset: str,
    output: Path,
    nncf: Nncf | None,
) -> Row:
    """The size and the digest of one tool's file, or why it failed."""
    error = ""
    if tool == Nncf.name and nncf is not None:
        try:
            nncf.quantize(model, Samples(samples), Setting(preset), output)
        except RuntimeError as failure:
            error = str(failure)
    else:
        _, error = apart("--write", tool, model, samples, preset, output)
    if error:
        return {f"{tool} failed": error}
    return {f"{tool} bytes": output.stat().st_size, f"{tool} file": digest(output)}


def measure(
    model: Path,
    samples: Path,
    preset: str,
    repeats: int,
    seconds: float,
    clock: str,
    known: Row,
    nncf: Nncf | None = None,
) -> Row:
    """One cell: both files, written side by side, then all three in turn.

    Beside ours stands NNCF's file where it is given, and onnxruntime's otherwise. The times of a
    `known` row hold where its files, its onnxruntime and its clock are the same.
    """
    import onnxruntime

    tools = ["ours"]
    if nncf is not None:
        tools.append(Nncf.name)
    elif preset != "XINT8":  # onnxruntime has no scales that are powers of two
        tools.append("onnxruntime")
    with TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        outputs = {tool: Path(folder) / f"{tool}.onnx" for tool in tools}
        row = Row(
            {
                "float bytes": model.stat().st_size,
                "float file": digest(model),
                "runtime": onnxruntime.__version__,
                "clock": clock,
            }
        )
        jobs = [
            pool.submit(write, tool, model, samples, preset, output, nncf)
            for tool, output in outputs.items()
        ]
        for job in jobs:
            row |= job.result()
        if "turns" in known and row.items() <= known.items():
            return known
        files = {"float": model}
        files |= {tool: file for tool, file in outputs.items() if file.exists()}
        named = [f"{name}={file}" for name, file in files.items()]
        for times in (1, 3):
            turns = (times * repeats, times * seconds)
            text, error = apart("--run", samples, *turns, clock, *named)
            if error:
                return row | {"error": error}
            row |= json.loads(text)
            if verdict(preset, row, tools[-1])[1]:
                break
        return row


def verdict(preset: str, row: Row, peer: str = "onnxruntime") -> tuple[str, bool]:
    """What a row says, and whether the mark is met.

    Without a quantized file of the peer's there is none.

    >>> verdict("A8W8", {"ours/float": 0.5, "ours/onnxruntime": 1.03})
    ('MISSED', False)
    >>> verdict("DYNAMIC", {"ours/float": 1.6, "ours/onnxruntime": 1.0})
    ('met, slower than float', True)
    >>> verdict("INT4", {"ours/float": 0.9, "ours/onnxruntime": 2, "onnxruntime bytes": 99, "float bytes": 100})
    ("onnxruntime's is float", True)
    """  # noqa: E501
    if "ours/float" not in row:
        return row.get("error") or row.get("ours failed") or "not measured", False
    ratio, words = row.get(f"ours/{peer}"), list[str]()
    idle = row.get(f"{peer} bytes", 0) > IDLE * row.get("float bytes", math.inf)
    met = ratio is None or idle or ratio <= MOST
    if idle:
        words.append(f"{peer}'s is float")
    elif ratio is not None:
        words.append("met" if met else "MISSED")
    elif preset != "XINT8":
        words.append(f"{peer}'s fails")
    if row["ours/float"] > 1:
        words.append("slower than float")
    return ", ".join(words), met


def cells(preset: str, row: Row, peer: str) -> list[object]:
    """Return what stands behind the first column of `header`."""
    names = ("float", "ours", peer, "ours/float", f"ours/{peer}")
    return [*(row.get(name) for name in names), verdict(preset, row, peer)[0]]


def report(rows: dict[str, Row], tasks: list[str], presets: list[str]) -> Iterator[str]:
    """A table for each model, and one of the defaults beside NNCF's."""
    for task in tasks:
        lines: list[list[object]] = []
        for preset in presets:
            row = rows.get(f"{task}/{preset}", {})
            lines.append([preset, *cells(preset, row, "onnxruntime")])
        yield f"## {task}\n\n{table(header('preset', 'onnxruntime'), lines)}"
    lines = []
    for task in tasks:
        if nncf_key(task) in rows:
            lines.append([task, *cells(DEFAULTS, rows[nncf_key(task)], Nncf.name)])
    if lines:
        title = f"## `{DEFAULTS}` beside NNCF's defaults"
        yield f"{title}\n\n{table(header('model', Nncf.name), lines)}"


def nncf_key(task: str) -> str:
    """Return the name of the row of the defaults beside NNCF's.

    >>> nncf_key("resnet20")
    'resnet20/A8W8 beside nncf'
    """
    return f"{task}/{DEFAULTS} beside {Nncf.name}"


def inner(arguments: list[str]) -> int:
    """What runs in processes of their own: write one file, or time several."""
    if arguments[0] == "--write":
        tool, model, samples, preset, output = arguments[1:]
        WRITERS[tool](Path(model), Samples(Path(samples)), preset, Path(output))
        print("written")
        return 0
    samples, repeats, seconds, clock, *named = arguments[1:]
    files = {
        name: Path(file) for name, _, file in (each.partition("=") for each in named)
    }
    feeds = next(iter(Samples(Path(samples))))
    taken = run_in_turn(files, feeds, int(repeats), float(seconds), clock)
    print(json.dumps(figures(taken)))
    return 0


def main() -> int:
    if sys.argv[1:2] in (["--write"], ["--run"]):
        return inner(sys.argv[1:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_store_arguments(parser, TASKS)
    parser.add_argument(
        "--presets", nargs="+", choices=PRESETS, default=list(PRESETS), metavar="PRESET"
    )
    parser.add_argument(
        "--samples", type=int, default=16, help="that files are calibrated on"
    )
    add_turn_arguments(parser, repeats=48)
    parser.add_argument(
        "--nncf-python", type=Path, help="the Python of an environment with NNCF"
    )
    arguments = parser.parse_args()
    store, source = Store(arguments.out / "runtime.json"), Ours().source
    nncf = Nncf(arguments.nncf_python) if arguments.nncf_python else None
    for name in [] if arguments.report else arguments.tasks:
        task = load(name)
        # The key of a row, its preset, and NNCF where its file stands beside ours.
        wanted: list[tuple[str, str, Nncf | None]] = []
        for preset in arguments.presets:
            wanted.append((f"{name}/{preset}", preset, None))
        if nncf is not None and DEFAULTS in arguments.presets:
            wanted.append((nncf_key(name), DEFAULTS, nncf))
        with TemporaryDirectory() as folder:
            Samples.write(task.calibration(arguments.samples), Path(folder))
            tag = {"model": digest(task.path), "source": source}
            how = {"samples": arguments.samples}
            for key, preset, beside in wanted:
                kept = store.rows().get(key)
                if due(kept, tag, again=arguments.again, stale=True):
                    row = measure(
                        task.path,
                        Path(folder),
                        preset,
                        arguments.repeats,
                        arguments.seconds,
                        arguments.clock,
                        {} if arguments.again else kept or {},
                        beside,
                    )
                    store.put(key, row | tag | how)
                    peer = Nncf.name if beside else "onnxruntime"
                    print(f"{key}: {verdict(preset, row, peer)[0]}", file=sys.stderr)
    rows = store.rows()
    text = "\n\n".join(report(rows, arguments.tasks, arguments.presets))
    print(text)
    if (tuple(arguments.tasks), tuple(arguments.presets)) == (TASKS, PRESETS):
        turns = {row["turns"] for row in rows.values() if "turns" in row} or {0}
        intro = (
            "Milliseconds of one run on one thread, medians of"
            f" {min(turns)} to {max(turns)} turns."
        )
        intro += " A ratio is the median over the ratios of all turns."
        (arguments.out / "runtime.md").write_text(
            f"# Runtime of what is written\n\n{intro}\n\n{text}\n"
        )
    judged = [
        verdict(preset, rows.get(f"{task}/{preset}", {}))[1]
        for task in arguments.tasks
        for preset in arguments.presets
    ]
    for task in arguments.tasks:
        if nncf_key(task) in rows:
            judged.append(verdict(DEFAULTS, rows[nncf_key(task)], Nncf.name)[1])
    return 0 if all(judged) else 1


if __name__ == "__main__":
    sys.exit(main())
