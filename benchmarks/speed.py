"""Time and peak memory of quantize_static against float inference over the same images, ours and
peers.

    QUARK_ONNX_DATA=DIR python benchmarks/speed.py [--models resnet50 squeezenet mobilenetv2]
        [--samples 64] [--repeats 3] [--methods 'ours*' 'onnxruntime minmax'] [--amd-quark-python
        VENV/bin/python] [--against CHECKOUT]

Ours is measured with every calibrator at A8W8, and at every preset; presets with blocks, whose
formats onnxruntime simulates node by node, on small models alone. A8W8 is also measured without a
verdict. Models of packages and small ones are measured where `--models` names them. Every
measurement is a process of its own; the methods take turns, and medians over the repeats are
reported. The floor is plain inference in a default onnxruntime session. `ratio` is a method's whole
time over the floor's; `net ratio` leaves out the constant, which is what one sample takes: (T(n) -
T(1)) / (floor(n) - floor(1)). onnxruntime is timed without its pre-processing, which it leaves to
the caller. The exit code is 1 when a mark is missed.

With `--against`, the chosen methods of ours are measured in turns with those of another checkout
of this repository (its folder, as of `git worktree add`), and nothing else is. The table has the
ratio of this one's time to the other's, the median over the turns, and the scatter: the standard
deviation of that ratio over the turns. The exit code is 1 when, by `--clock`, a ratio is above 1 by
more than its scatter.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from statistics import median, stdev
from tempfile import TemporaryDirectory

from _data import Samples, load
from _measure import Measurement, Method
from _models import resnet50
from _packaged import INPUTS
from _results import Store, add_arguments, table
from _settings import CALIBRATORS, Setting

from quark_onnx.common.registry import PRESETS
from quark_onnx.dtypes import Block

LARGE = ("resnet50", "resnet50-bn")
MODELS = (*LARGE, "squeezenet", "mobilenetv2", "yolox_nano")
#: Models of 0.6 to 20 MB, measured only where they are named. Most come with packages.
SMALL = ("resnet20", "ultraface", *INPUTS)
#: Models on which formats with blocks are timed, which onnxruntime simulates node by node.
SIMULATED = ("squeezenet", "mobilenetv2")
HEADER = (
    "method",
    "seconds",
    "one sample",
    "CPU seconds",
    "ratio",
    "net ratio",
    "peak MB",
)
FLOOR = Method("float", Setting("float"))


XINT8, QUARK = "ours XINT8", "amd-quark XINT8"
#: Times as fast as amd-quark at the same preset, where both were timed.
FASTER = 3.0


@dataclass(frozen=True)
class Mark:
    """These methods have to stay at or below `most`, in `column` of the table."""

    methods: tuple[str, ...]
    column: str
    most: float
    models: tuple[str, ...] = MODELS


EXTREMES = ("ours minmax", "ours nonoverflow")
HISTOGRAMS = ("ours percentile", "ours entropy", "ours minmse")
MARKS = (
    Mark(EXTREMES, "net ratio", 1.3),
    Mark(HISTOGRAMS, "net ratio", 2.5),
    Mark(HISTOGRAMS, "ratio", 2.5, models=LARGE),  # constant included
    Mark((XINT8,), "ratio", 5.0),
)


@dataclass(frozen=True)
class Result:
    """Medians of one method on one model, with n samples and with one."""

    method: Method
    whole: Measurement
    single: Measurement

    def ratios(self, floor: Result, clock: str) -> dict[str, float]:
        """The method's time over the floor's, whole and without the constant."""
        whole, single = self.times(clock)
        floor_whole, floor_single = floor.times(clock)
        return {
            "ratio": whole / floor_whole,
            "net ratio": (whole - single) / (floor_whole - floor_single),
        }

    def times(self, clock: str) -> tuple[float, float]:
        """Seconds with n samples and with one."""
        if clock == "cpu":
            return self.whole.cpu_seconds, self.single.cpu_seconds
        return self.whole.seconds, self.single.seconds

    def cells(self, ratios: dict[str, float]) -> list[object]:
        """A row of the table under HEADER."""
        whole = self.whole
        if whole.error:
            return [self.method, "failed", *[None] * (len(HEADER) - 2)]
        times = (whole.seconds, self.single.seconds, whole.cpu_seconds)
        return [self.method, *times, *ratios.values(), f"{whole.peak_mb:.0f}"]


def methods(amd_quark_python: Path | None) -> Iterator[Method]:
    """Everything that is compared with the floor."""
    for calibrator in CALIBRATORS:
        yield Method("ours", Setting("A8W8", calibrator))
    for preset in PRESETS:
        yield Method("ours", Setting(preset))
    yield Method("ours without verdict", Setting("A8W8"))
    for calibrator in ("minmax", "entropy", "percentile"):
        yield Method("onnxruntime", Setting("A8W8", calibrator))
    if amd_quark_python:
        yield Method("amd-quark", Setting("XINT8"), amd_quark_python)


def simulated(method: Method) -> bool:
    """Whether a method is a preset of ours with blocks.

    >>> simulated(Method("ours", Setting("MX9"))), simulated(Method("ours", Setting("A8W8")))
    (True, False)
    """
    if method.tool != "ours":
        return False
    config = PRESETS[method.setting.preset]
    specs = [spec for spec in (config.activation, config.weight) if spec is not None]
    return any(isinstance(spec.dtype, Block) for spec in specs)


def prepare(name: str, folder: Path, count: int) -> tuple[Path, Path]:
    """The model and a folder with up to `count` real images, preprocessed as it wants them."""
    if name in INPUTS:
        path, samples = INPUTS[name](count)
        Samples.write(iter(samples), folder / name)
        return path, folder / name
    if not name.startswith("resnet50"):
        task = load(name)
        Samples.write(task.calibration(count), folder / name)
        return task.path, folder / name
    Samples.write(
        load("mobilenetv2").calibration(count), folder / name
    )  # whose input is called 'input' too
    return resnet50(
        folder / f"{name}.onnx", batch_norm=name.endswith("bn")
    ), folder / name


def middle(runs: list[Measurement]) -> Measurement:
    """Medians over repeats; a failure once is a failure."""
    failed = next((run for run in runs if run.error), None)
    return failed or Measurement(
        median(run.seconds for run in runs),
        median(run.cpu_seconds for run in runs),
        median(run.peak_mb for run in runs),
    )


def measure(
    name: str, chosen: list[Method], count: int, repeats: int
) -> dict[Method, Result]:
    """All methods on one model, taking turns."""
    runs: dict[tuple[Method, int], list[Measurement]] = {}
    with TemporaryDirectory() as folder:
        model, samples = prepare(name, Path(folder), count)
        for repeat in range(repeats):
            for method in chosen:
                for n in (1, count):
                    run = method.measure(model, samples, n)
                    runs.setdefault((method, n), []).append(run)
                    outcome = run.error or f"{run.seconds:.2f} s"
                    print(
                        f"{name} {repeat + 1}/{repeats} {method!s:24} n={n:<4} {outcome}",
                        file=sys.stderr,
                    )
                    if run.error:
                        break
    return {
        m: Result(m, middle(runs.get((m, count), runs[m, 1])), middle(runs[m, 1]))
        for m in chosen
    }


def compare(
    model: Path, samples: Path, pair: tuple[Method, Method], count: int, repeats: int
) -> dict[str, tuple[float, float]]:
    """Return the median and the scatter, by clock, of the first method's time over the second's.

    The two run in turns, and each turn starts with the other one.
    """
    ratios: dict[str, list[float]] = {"cpu": [], "wall": []}
    for repeat in range(repeats):
        order = pair if repeat % 2 == 0 else pair[::-1]
        runs = {method: method.measure(model, samples, count) for method in order}
        ours, other = (runs[method] for method in pair)
        for method, run in runs.items():
            if run.error:
                sys.exit(f"{method} of {method.checkout} failed: {run.error}")
        ratios["cpu"].append(ours.cpu_seconds / other.cpu_seconds)
        ratios["wall"].append(ours.seconds / other.seconds)
        print(
            f"{repeat + 1}/{repeats} {pair[0]!s:24} CPU {ours.cpu_seconds:.2f} s"
            f" against {other.cpu_seconds:.2f} s, wall {ours.seconds:.2f} s"
            f" against {other.seconds:.2f} s",
            file=sys.stderr,
        )
    return {
        clock: (median(turns), stdev(turns) if repeats > 1 else 0.0)
        for clock, turns in ratios.items()
    }


def against(arguments: argparse.Namespace) -> int:
    """Print how the chosen methods' times compare with another checkout's; return the exit code."""
    checkout = arguments.against.resolve()
    if not (checkout / "quark_onnx" / "__init__.py").is_file():
        sys.exit(
            f"--against {checkout}: it has no quark_onnx package; name the folder of a checkout"
        )
    chosen = [
        method
        for method in methods(None)
        if method.tool == "ours"
        and any(fnmatch(str(method), pattern) for pattern in arguments.methods)
    ]
    if not chosen:
        sys.exit(f"--methods {arguments.methods}: no method of ours has such a name")
    rows: list[list[object]] = []
    with TemporaryDirectory() as folder:
        for name in arguments.models:
            model, samples = prepare(name, Path(folder), arguments.samples)
            for method in chosen:
                if simulated(method) and name not in SIMULATED:
                    continue
                pair = (method, replace(method, checkout=checkout))
                clocks = compare(
                    model, samples, pair, arguments.samples, arguments.repeats
                )
                ratio, scatter = clocks[arguments.clock]
                verdict = "SLOWER" if ratio > 1 + scatter else "met"
                times = itertools.chain(*clocks.values())
                rows.append([name, method, *times, verdict])
    print(
        f"{arguments.samples} images, {arguments.repeats} turns against {checkout},"
        f" judged by the {arguments.clock} clock\n"
    )
    header = ("model", "method", "CPU ratio", "scatter", "wall ratio", "scatter")
    print(table((*header, "verdict"), rows))
    return 1 if any(row[-1] == "SLOWER" for row in rows) else 0


def beside(
    name: str, results: Mapping[str, Result], clock: str
) -> Iterator[list[object]]:
    """How many times as fast as amd-quark's the same preset is, a row of the marks.

    None where one was not timed.
    """
    if XINT8 in results and QUARK in results:
        times = results[QUARK].times(clock)[0] / results[XINT8].times(clock)[0]
        yield [
            name,
            XINT8,
            f"{FASTER} times as fast as amd-quark",
            times,
            "met" if times >= FASTER else "MISSED",
        ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", choices=(*MODELS, *SMALL), default=MODELS
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        default=["*"],
        metavar="PATTERN",
        help="as 'ours*' or '*minmax'",
    )
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--clock",
        choices=["wall", "cpu"],
        default="wall",
        help="cpu: less noise on a busy machine",
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="CHECKOUT",
        help="compare the time of ours with that of another checkout",
    )
    add_arguments(parser, "amd-quark-python", "out")
    arguments = parser.parse_args()
    if arguments.against:
        return against(arguments)

    asked = (FLOOR, *methods(arguments.amd_quark_python))
    chosen = [
        m
        for m in asked
        if m == FLOOR or any(fnmatch(str(m), p) for p in arguments.methods)
    ]
    store = Store(arguments.out / "speed.json")
    cores = f"{os.cpu_count()} cores, {arguments.clock} clock"
    report = [f"{arguments.samples} images, medians of {arguments.repeats}, {cores}"]
    verdicts: list[list[object]] = []
    for name in arguments.models:
        fitting = [m for m in chosen if name in SIMULATED or not simulated(m)]
        results = measure(name, fitting, arguments.samples, arguments.repeats)
        rows: list[list[object]] = []
        for method, result in results.items():
            ratios = result.ratios(results[FLOOR], arguments.clock)
            rows.append(result.cells(ratios))
            how = {
                "samples": arguments.samples,
                "repeats": arguments.repeats,
                "clock": arguments.clock,
            }
            timed = {"whole": asdict(result.whole), "one sample": asdict(result.single)}
            store.put(f"{name}/{method}", how | ratios | timed)
            for mark in MARKS:
                if str(method) in mark.methods and name in mark.models:
                    found = ratios[mark.column]
                    met = (
                        "met" if 0 < found <= mark.most else "MISSED"
                    )  # neither noise below 0 nor NaN is
                    verdicts.append(
                        [name, method, f"{mark.column} <= {mark.most}", found, met]
                    )
        verdicts += beside(
            name,
            {str(method): result for method, result in results.items()},
            arguments.clock,
        )
        report.append(f"## {name}\n\n{table(HEADER, rows)}")
    report.append(
        "## Marks\n\n"
        + table(["model", "method", "wanted", "measured", "verdict"], verdicts)
    )
    text = "\n\n".join(report)
    print(text)
    if arguments.methods == ["*"]:
        (arguments.out / "speed.md").write_text(f"# Speed and memory\n\n{text}\n")
    return 1 if any(row[-1] == "MISSED" for row in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
