"""Quantization of large language models file to file: time, memory and disk, the latter two
measured and estimated.

    python benchmarks/llm_large.py [--runs 1B/fp8 8B/uint4_wo_128 ...] [--plans 70B 1T]
        [--shape BLOCKS HIDDEN] [--folder DIR] [--clock cpu] [--report] [--estimate-again]

Models have the shapes of TinyLlama 1.1B, of Llama 3 8B and 70B, and of Kimi K2 with a trillion
parameters, and random weights in bfloat16. A run is SIZE[:BLOCKS[:EXPERTS]]/SCHEME[+ALGORITHM],
or SIZE/gguf-KIND for a GGUF file: a model with all its blocks, or with as many as stand there, is
written to a temporary folder and quantized by a process of its own; no data is needed besides disk
space, about twice the size of the model. Activations and algorithms are calibrated on 1,024 random
tokens. The models of 70B and 1T get a vocabulary of 8,192 tokens.

A plan is an estimate for the whole model of a size and 128 windows of 512 tokens, from files that
hold the headers of the tensors and no values. --estimate-again replaces the estimates of all runs
by estimates for such files, after a change of the estimator. --shape runs a small model of other
sizes, with both schemes that need no algorithm.

The floor of a run is the time in which this machine reads what the run reads and writes what the
run writes, one file after the other; and, where activations are calibrated, one pass of each token
through the blocks at the rate of its matrix product. On a busy machine, --clock cpu counts the time
on processors, of the run and of the floor; waiting for the disk is not counted then. Results stand
in results/llm_large.json; the exit code is 1 where a run takes more than twice, or less than half
of the estimated memory or disk space.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from _llm_shapes import SIZES, Size, small_llama, write, write_headers
from _memory import PrivatePeak, peak_mb
from _results import Row, Store, add_arguments, table

SCHEMES = ("uint4_wo_128", "fp8", "gguf-q4_1")
RUNS = (
    "1B/uint4_wo_128",
    "1B/fp8",
    "1B/gguf-q4_1",
    "1B/gguf-q8_0",
    "1B:2/uint4_wo_128+gptq",
    "1B:2/uint4_wo_128+awq",
    "8B:4/uint4_wo_128",
    "8B:4/fp8",
    "1T:2:8/uint4_wo_128",
    "1T:2:8/fp8",
)
PLANS = ("1B", "8B", "70B", "1T")
#: What is estimated for each size.
PLANNED = ("uint4_wo_128", "fp8", "uint4_wo_128+gptq", "uint4_wo_128+awq")
CLOCKS: dict[str, Callable[[], float]] = {
    "wall": time.perf_counter,
    "cpu": time.process_time,
}
LENGTH = 512
#: Calibration windows of runs, and of plans.
WINDOWS, PLANNED_WINDOWS = 2, 128
#: Tokens of the models with few blocks.
FEW_TOKENS = 8192
CHUNK = 1 << 24
_NAME = re.compile(r"(\w+)(?::(\d+))?(?::(\d+))?/([\w-]+)(?:\+([\w:=,.]+))?")


@dataclass(frozen=True)
class Run:
    """Model and settings of a run.

    Attributes:
        name: name in the results.
        size: shape of the model.
        scheme: name of the scheme; ``gguf-`` and a kind for a GGUF file.
        algorithm: an algorithm with its settings; empty for none.
    """

    name: str
    size: Size
    scheme: str
    algorithm: str = ""

    @classmethod
    def of(cls, name: str) -> Run:
        """Return the run of a name."""
        found = _NAME.fullmatch(name)
        if found is None or found[1] not in SIZES:
            raise SystemExit(f"{name} is no run; one is 8B:1/uint4_wo_128+gptq")
        size = SIZES[found[1]]
        if found[2] and found[1] in ("70B", "1T"):
            size = size.with_(vocabulary=FEW_TOKENS)
        if found[2]:
            size = size.with_(blocks=int(found[2]))
        if found[3]:
            size = size.with_(experts=int(found[3]))
        return cls(name, size, found[4], found[5] or "")

    @property
    def calibrates(self) -> bool:
        """Whether the blocks run on data."""
        return self.scheme == "fp8" or bool(self.algorithm)


@dataclass(frozen=True)
class Result:
    """Resources of a run; memory and sizes are bytes.

    Attributes:
        seconds: runtime.
        cpu_seconds: time on processors.
        peak: peak of resident memory, with mapped files.
        private: peak of the memory without mapped files.
        size: size of the result.
        estimated_memory: estimated peak of resident memory; None for a GGUF file.
        estimated_size: estimated size of the result; None for a GGUF file.
    """

    seconds: float
    cpu_seconds: float
    peak: int
    private: int
    size: int
    estimated_memory: int | None
    estimated_size: int | None


class _Planned(Exception):
    """Exception to stop a run after its estimate."""


def config_of(source: Any, scheme: str, algorithm: str) -> Any:
    """Return the configuration of a run."""
    from quark_onnx.torch.pipelines.ptq import config_for

    config = config_for(scheme, exclude=source.usually_float())
    return config.with_(algorithms=(algorithm,) if algorithm else ())


def child(folder: str, output: str, scheme: str, algorithm: str) -> None:
    """Quantize in this process, and print a Result."""
    import transformers.models.llama.modeling_llama  # noqa: F401  - imports are not timed

    from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
    from quark_onnx.torch.exports.gguf import write_gguf
    from quark_onnx.torch.pipelines.estimate import Estimate
    from quark_onnx.torch.pipelines.ptq import Text, ptq

    source = FloatCheckpoint(folder)
    text = Text(str(Path(folder) / "tokens.npy"), None, LENGTH)
    watch = PrivatePeak()
    start, cpu = time.perf_counter(), time.process_time()
    estimate: Estimate | None = None
    if kind := scheme.partition("gguf-")[2]:
        write_gguf(folder, f"{output}.gguf", kind)
    else:
        config = config_of(source, scheme, algorithm)
        estimate = ptq(source, text, config, output, progress=False).estimate
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    found = Result(
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        peak=int(peak_mb() * 2**20),
        private=int(watch.mb * 2**20),
        size=size_of(Path(output).parent),
        estimated_memory=estimate and estimate.memory,
        estimated_size=estimate and estimate.disk,
    )
    print(json.dumps(asdict(found)))


def planning_child(folder: str, *entries: str) -> None:
    """Print the estimates for a checkpoint by SCHEME[+ALGORITHM]."""
    from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
    from quark_onnx.torch.pipelines.estimate import Estimate
    from quark_onnx.torch.pipelines.ptq import Text, ptq

    rows = dict[str, Row]()

    def announce(expected: Estimate) -> None:
        rows[entry] = {
            "estimated_memory": expected.memory,
            "estimated_size": expected.disk,
        }
        raise _Planned

    source = FloatCheckpoint(folder)
    text = Text(str(Path(folder) / "tokens.npy"), None, LENGTH)
    for entry in entries:
        scheme, _, algorithm = entry.partition("+")
        config = config_of(source, scheme, algorithm)
        with contextlib.suppress(_Planned):
            ptq(source, text, config, f"{folder}-out", announce=announce)
    print(json.dumps(rows))


def called(*arguments: str) -> Any:
    """Call this file in a process of its own, and return what it prints."""
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def write_tokens(folder: Path, vocabulary: int, windows: int) -> None:
    """Write random token ids for the calibration."""
    numbers = np.random.default_rng(0).integers(0, vocabulary, (windows, LENGTH))
    np.save(folder / "tokens.npy", numbers)


def size_of(folder: Path | str) -> int:
    """Return the size of the tensor files of a folder and its folders in bytes."""
    files = Path(folder).rglob("*")
    kinds = (".safetensors", ".gguf")
    return sum(file.stat().st_size for file in files if file.suffix in kinds)


def copied(folder: Path, clock: Callable[[], float]) -> tuple[float, float]:
    """Return the seconds of reading the tensor files and of writing as many bytes.

    Files are read from the disk if the system drops them from its cache on request.
    """
    read = written = 0.0
    buffer = bytearray(CHUNK)
    copy = folder / "copy"
    for file in sorted(folder.glob("*.safetensors")):
        drop_cache(file)
        with (
            copy.open("wb", buffering=0) as target,
            file.open("rb", buffering=0) as source,
        ):
            while True:
                start = clock()
                count = source.readinto(buffer)
                read += clock() - start
                if not count:
                    break
                start = clock()
                target.write(memoryview(buffer)[:count])
                written += clock() - start
    copy.unlink()
    return read, written


def drop_cache(file: Path) -> None:
    """Let the system forget the cached pages of a file, where it supports that."""
    if not hasattr(os, "posix_fadvise"):
        return
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def product_rate(
    rows: int,
    columns: int,
    dtype: str = "bfloat16",
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the multiply-accumulates per second of a layer, the best of five."""
    import torch

    left = torch.ones(LENGTH, columns, dtype=getattr(torch, dtype))
    right = torch.ones(rows, columns, dtype=left.dtype)
    best = float("inf")
    for _ in range(5):
        start = clock()
        torch.nn.functional.linear(left, right)
        best = min(best, clock() - start)
    return left.numel() * len(right) / best


def complaints(result: Result) -> list[str]:
    """Return what is more than twice, or less than half of the estimate."""
    pairs = {
        "memory": (result.peak, result.estimated_memory),
        "disk": (result.size, result.estimated_size),
    }
    found = []
    for name, (real, estimated) in pairs.items():
        if estimated and not estimated / 2 <= real <= estimated * 2:
            found.append(f"{name}: {real:.4g}, estimated {estimated:.4g}")
    return found


def measured(run: Run, source: Path, shared: Row, clock: str) -> tuple[Result, Row]:
    """Return the result of a run, and its row in the results.

    Args:
        run: the run.
        source: folder of the float model.
        shared: figures of the model and of the machine.
        clock: key of ``CLOCKS``.
    """
    for file in source.glob("*.safetensors"):
        drop_cache(file)
    with TemporaryDirectory(dir=source.parent) as place:
        words = (str(source), f"{place}/out", run.scheme, run.algorithm)
        result = Result(**called("--child", *words))
    floor = shared["read"] + shared["written"] * result.size / shared["source"]
    if run.calibrates:
        floor += shared["block_weights"] * WINDOWS * LENGTH / shared["rate"]
    return result, {**asdict(result), **shared, "floor": floor, "clock": clock}


def written_model(size: Size, folder: Path, clock: str) -> Row:
    """Write a model, and return figures of the model and of the machine."""
    from quark_onnx.torch.checkpoints.meta_model import skeleton_of
    from quark_onnx.torch.models.structure import blocks_of

    block = write(folder, size.config())
    write_tokens(folder, size.vocabulary, WINDOWS)
    read, written = copied(folder, CLOCKS[clock])
    model = skeleton_of(size.config())
    weights = active = 0
    for each in blocks_of(model).values():
        for name, parameter in each.named_parameters():
            weights += parameter.numel()
            used = 8 / size.experts if ".experts." in name else 1
            active += int(parameter.numel() * used)
    return {
        "source": size_of(folder),
        "parameters": sum(each.numel() for each in model.parameters()),
        "blocks": size.blocks,
        "block": 2 * block,
        "block_weights": active,
        "read": read,
        "written": written,
        "rate": product_rate(size.wide, size.hidden, clock=CLOCKS[clock]),
    }


def plan(name: str, folder: Path) -> Iterator[tuple[str, Row]]:
    """Yield the estimates for a whole model, by run."""
    size = SIZES[name]
    block = write_headers(folder, size.config())
    write_tokens(folder, size.vocabulary, PLANNED_WINDOWS)
    shared = {"source": size_of(folder), "blocks": size.blocks, "block": 2 * block}
    for entry, row in called("--plan", str(folder), *PLANNED).items():
        yield f"plan {name}/{entry}", {**row, **shared}


def estimate_again(store: Store, folder: Path | None) -> None:
    """Replace the estimates of all runs."""
    for name, row in store.rows().items():
        if name.startswith("plan ") or row["estimated_memory"] is None:
            continue
        run = Run.of(name)
        with TemporaryDirectory(dir=folder) as place:
            source = Path(place) / "in"
            write_headers(source, run.size.config())
            write_tokens(source, run.size.vocabulary, WINDOWS)
            entry = f"{run.scheme}+{run.algorithm}".rstrip("+")
            found = called("--plan", str(source), entry)
        store.put(name, {**row, **found[entry]})


def measured_tables(rows: dict[str, Row]) -> str:
    """Return the tables of the runs and of the plans in Markdown."""
    runs = []
    for name, row in rows.items():
        if name.startswith("plan "):
            continue
        runs.append(
            [
                name,
                f"{row['source'] / 1e9:.2f}",
                f"{row['block'] / 1e6:.0f}",
                f"{row['seconds']:.1f}",
                f"{row['cpu_seconds']:.1f}",
                f"{row['floor']:.1f}",
                f"{_time(row) / row['floor']:.1f}",
                _megabytes(row["peak"]),
                _megabytes(row["private"]),
                _megabytes(row["estimated_memory"]),
                _megabytes(row["size"]),
                _megabytes(row["estimated_size"]),
            ]
        )
    plans = []
    for name, row in rows.items():
        if name.startswith("plan "):
            plans.append(
                [
                    name.removeprefix("plan "),
                    f"{row['source'] / 1e9:.0f}",
                    f"{row['block'] / 1e9:.2f}",
                    f"{row['estimated_memory'] / 1e9:.1f}",
                    f"{row['estimated_size'] / 1e9:.0f}",
                ]
            )
    run_head = [
        "run",
        "model GB",
        "block MB",
        "seconds",
        "CPU seconds",
        "floor",
        "times floor",
        "peak MB",
        "private MB",
        "estimated MB",
        "result MB",
        "estimated MB",
    ]
    plan_head = ["plan", "model GB", "block GB", "memory GB", "result GB"]
    return f"{table(run_head, runs)}\n\n{table(plan_head, plans)}\n"


def _megabytes(size: int | None) -> str:
    """Return a size in a cell of the table; empty where none is known."""
    return "" if size is None else f"{size / 1e6:.0f}"


def _time(row: Row) -> float:
    """Return the time of a run by the clock of its floor."""
    seconds: float = row["cpu_seconds" if row["clock"] == "cpu" else "seconds"]
    return seconds


def report(store: Store, out: Path) -> None:
    """Write the Markdown page of the results."""
    title = "# Quantization of large language models, file to file"
    text = f"{title}\n\n{measured_tables(store.rows())}"
    (out / "llm_large.md").write_text(text, encoding="utf-8")


def small_runs(blocks: int, hidden: int) -> list[Run]:
    """Return the runs of a model of other sizes, with the proportions of the smallest one."""
    size = small_llama(blocks, hidden)
    return [Run(f"{blocks} x {hidden}/{scheme}", size, scheme) for scheme in SCHEMES]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", nargs="*", default=list(RUNS), help="runs by name")
    parser.add_argument("--plans", nargs="*", default=list(PLANS), help="sizes to plan")
    parser.add_argument(
        "--shape", nargs=2, type=int, help="blocks, and a hidden size divisible by 256"
    )
    parser.add_argument("--folder", type=Path, help="place of the temporary models")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--report", action="store_true", help="only write the tables")
    parser.add_argument(
        "--estimate-again", action="store_true", help="only estimate all runs again"
    )
    add_arguments(parser, "out")
    return parser.parse_args()


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
        return 0
    if sys.argv[1:2] == ["--plan"]:
        planning_child(*sys.argv[2:])
        return 0
    arguments = parse()
    store = Store(arguments.out / "llm_large.json")
    if arguments.estimate_again:
        estimate_again(store, arguments.folder)
    if arguments.report or arguments.estimate_again:
        report(store, arguments.out)
        return 0
    runs = [Run.of(name) for name in arguments.runs]
    plans = list(arguments.plans)
    if arguments.shape:
        runs, plans = small_runs(*arguments.shape), []
    wrong = list[str]()
    for size in dict.fromkeys(run.size for run in runs):
        with TemporaryDirectory(dir=arguments.folder) as place:
            source = Path(place) / "in"
            shared = written_model(size, source, arguments.clock)
            for run in runs:
                if run.size == size:
                    result, row = measured(run, source, shared, arguments.clock)
                    store.put(run.name, row)
                    print(run.name, json.dumps(row), file=sys.stderr, flush=True)
                    found = complaints(result)
                    wrong += [f"{run.name}: {text}" for text in found]
    for name in plans:
        with TemporaryDirectory(dir=arguments.folder) as place:
            for key, row in plan(name, Path(place) / "in"):
                store.put(key, row)
    print("\n".join([measured_tables(store.rows()), *wrong]))
    if not arguments.shape:
        report(store, arguments.out)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
