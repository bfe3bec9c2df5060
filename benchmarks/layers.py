"""How long AdaRound and AdaQuant take for each layer, against the floor that their products set.

    QUARK_ONNX_DATA=... python benchmarks/layers.py [--tasks resnet20 mobilenetv2] [--iterations
    200]

A step of the descent multiplies some rows of inputs with the weights, and the errors with these
rows again: 4 floating point operations for each weight and row. The floor is what they take at the
rate that this machine reaches with large float32 matrices, one on each core, measured in the same
run. Layers of one shape are one line. What a step does beside its products (rounding, sigmoids,
Adam) grows with the weights, not with the rows.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from os import cpu_count
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from _data import Samples, load
from _results import add_arguments, table

from quark_onnx import AdaQuant, AdaRound, QConfig, quantize
from quark_onnx.optimizers.problem import RoundingProblem, Solution

CALIBRATION_SAMPLES = 100
#: Side of the matrices that set the rate, and how often they are multiplied.
SIDE, TIMES = 512, 40

#: Of each call, by groups, outputs, inputs and rows.
SECONDS: dict[tuple[int, ...], list[float]] = defaultdict(list)


class Timed:
    """In front of an optimizer of layers: notes how long each call takes."""

    def __call__(self, problem: RoundingProblem, present: Solution) -> Solution:
        start = time.perf_counter()
        found: Solution = super().__call__(problem, present)  # type: ignore[misc]
        SECONDS[(*problem.weight.shape, len(problem.train))].append(
            time.perf_counter() - start
        )
        return found


class TimedAdaRound(Timed, AdaRound):
    """AdaRound, timed."""


class TimedAdaQuant(Timed, AdaQuant):
    """AdaQuant, timed."""


def rate() -> float:
    """Floating point operations a second, of all cores together."""
    from threadpoolctl import threadpool_limits

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        a, b = (random.normal(size=(SIDE, SIDE)).astype(np.float32) for _ in range(2))
        for _ in range(TIMES):
            a @ b

    cores = cpu_count() or 1
    with threadpool_limits(1, "blas"), ThreadPoolExecutor(cores) as pool:
        list(pool.map(work, range(cores)))  # warm
        start = time.perf_counter()
        list(pool.map(work, range(cores)))
        return cores * TIMES * 2 * SIDE**3 / (time.perf_counter() - start)


@dataclass(frozen=True)
class Line:
    """All layers of one shape: how many there are, the seconds they took together, and the floor of
    these.
    """

    shape: str
    count: int
    seconds: float
    floor: float

    @property
    def cells(self) -> list[object]:
        """A row of the table, with milliseconds of one layer."""
        each = [
            f"{1000 * value / self.count:.1f}" for value in (self.seconds, self.floor)
        ]
        return [self.shape, self.count, *each, f"{self.seconds / self.floor:.1f}"]


def lines(settings: AdaRound | AdaQuant, speed: float) -> list[Line]:
    """One line for each shape, the longest first, and one for all layers."""
    found = list[Line]()
    for (groups, outputs, inputs, rows), seconds in SECONDS.items():
        steps = len(seconds) * settings.iterations
        floor = 4 * groups * outputs * inputs * min(settings.rows, rows) * steps / speed
        found.append(
            Line(f"{groups} x {outputs} x {inputs}", len(seconds), sum(seconds), floor)
        )
    found.sort(key=lambda line: -line.seconds)
    whole = (
        sum(getattr(line, name) for line in found)
        for name in ("count", "seconds", "floor")
    )
    return [*found, Line("all", *whole)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tasks", nargs="+", default=["resnet20", "mobilenetv2"], metavar="TASK"
    )
    parser.add_argument("--iterations", type=int, default=200)
    add_arguments(parser, "out")
    arguments = parser.parse_args()
    optimizers = (
        TimedAdaRound(arguments.iterations, device="cpu"),
        TimedAdaQuant(arguments.iterations, device="cpu"),
    )
    speed, parts = rate(), list[str]()
    parts.append(
        f"{speed / 1e9:.0f} GFLOPS, {arguments.iterations} iterations of {optimizers[0].rows} rows."
    )
    for name in arguments.tasks:
        task = load(name)
        with TemporaryDirectory() as folder:
            samples = Samples.write(
                task.calibration(CALIBRATION_SAMPLES), Path(folder) / "samples"
            )
            for optimizer in optimizers:
                SECONDS.clear()
                start = time.perf_counter()
                config = QConfig.of("XINT8").with_(optimizers=optimizer)
                quantize(task.path, samples, config, Path(folder) / "quantized.onnx")
                whole = time.perf_counter() - start
                head = [
                    "groups x outputs x inputs",
                    "layers",
                    "ms a layer",
                    "floor, ms",
                    "times",
                ]
                parts.append(
                    f"## {name}, {optimizer.name}: {whole:.0f} s in all, file to file"
                )
                parts.append(
                    table(head, [line.cells for line in lines(optimizer, speed)])
                )
    text = "\n\n".join(parts)
    print(text)
    (arguments.out / "layers.md").write_text(
        f"# Time of a layer\n\n{text}\n", encoding="utf-8"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
