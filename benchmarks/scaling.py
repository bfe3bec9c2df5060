"""Time per node as graphs grow, and time and memory as calibration data grow.

    python benchmarks/scaling.py [--shapes chain branches constants residual] [--sizes 1000 2000
        5000 10000 20000] [--work W8 explain A8W8 check preflight analyze] [--jobs 2]
    QUARK_ONNX_DATA=DIR python benchmarks/scaling.py --images 1000 4000 16000

The first quantizes, explains, checks and analyzes models of 1,000 to 20,000 nodes. It needs no
data. Every shape and size is a process of its own. What is measured is processor time
of this package, without that of onnxruntime, which loads some large graphs in more than linear time
and stands in a column of its own. The mark is that a node of the largest graph takes at most 1.5
times as long as one of a graph of 2,000 nodes: linear, but for caches that grow too small.

The second quantizes ResNet-20 with so many images of CIFAR-10, one file each. The images of the
task repeat with noise. The marks are that an image of the largest set takes at most 1.5 times as
long as one of the smallest, and that memory grows by at most what held-out samples may take.

The exit code is 1 when a mark is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

import numpy as np
from _data import Samples, Task, load
from _growing import SHAPES
from _measure import Method
from _results import Store, add_arguments, table
from _settings import Setting
from onnx import ModelProto

Feeds = dict[str, np.ndarray[Any, np.dtype[Any]]]
#: Numbers of images of the table in the documentation.
IMAGES = (1000, 4000, 16_000)
SIZES = (1000, 2000, 5000, 10_000, 20_000)
WORK = ("W8", "explain", "A8W8", "check", "preflight", "analyze")
#: Of the graph whose time per node the largest one is compared with; smaller ones show what any run
#: costs.
BASE = 2000
MOST = 1.5
#: What a run may keep of the samples in memory, in MB: held-out ones, and those of the verdict.
KEPT_MB = (128 + 64) * 2**20 / 1e6
METHODS = {
    "float model": Method("float", Setting("A8W8")),
    "A8W8": Method("ours", Setting("A8W8")),
    "XINT8": Method("ours", Setting("XINT8")),
    "A8W8, percentile": Method("ours", Setting("A8W8", "percentile")),
}


class _Runtime:
    """Processor time within onnxruntime; nothing else runs meanwhile, as there is one sample."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose time is added up."""

        def call(*arguments: Any, **options: Any) -> Any:
            if self._inside:
                return function(*arguments, **options)
            self._inside, start = True, process_time()
            try:
                return function(*arguments, **options)
            finally:
                self._inside = False
                self.seconds += process_time() - start

        return call


def _work() -> dict[str, Callable[[ModelProto, ModelProto, Feeds], object]]:
    """What is done with a float model, the A8W8 model made of it, and a sample."""
    from quark_onnx import analyze, quantize_static, quantize_weights
    from quark_onnx.api import plan_for
    from quark_onnx.npu import check, preflight
    from quark_onnx.plan import explain

    return {
        "W8": lambda model, _, __: quantize_weights(model),
        "explain": lambda model, _, __: explain(plan_for(model)),
        "A8W8": lambda model, _, feeds: quantize_static(model, [feeds]),
        "check": lambda _, quantized, __: check(quantized),
        "preflight": lambda _, quantized, __: preflight(quantized),
        "analyze": lambda model, quantized, feeds: analyze(model, quantized, [feeds]),
    }


def measure(
    shape: str, count: int, chosen: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Seconds of this package and of onnxruntime, by what is done; in this process."""
    from calibrators.onnx_runtime import session
    from quark_onnx import quantize_static

    runtime, work = _Runtime(), _work()
    session.native_session = runtime.timed(session.native_session)
    session._Session.run = runtime.timed(session._Session.run)  # type: ignore[method-assign]
    model = SHAPES[shape](count)
    dims = [
        dim.dim_value or 1 for dim in model.graph.input[0].type.tensor_type.shape.dim
    ]
    feeds = {"x": np.random.default_rng(0).normal(size=dims).astype(np.float32)}
    small = SHAPES[shape](30)
    for name in chosen:  # what is imported and made once
        work[name](small, quantize_static(small, [feeds]), feeds)
    quantized = model if "A8W8" in chosen else quantize_static(model, [feeds])
    found: dict[str, dict[str, float]] = {}
    for name in (name for name in WORK if name in chosen):
        start, before = process_time(), runtime.seconds
        result = work[name](model, quantized, feeds)
        there = runtime.seconds - before
        found[name] = {"seconds": process_time() - start - there, "onnxruntime": there}
        quantized = (
            result if isinstance(result, ModelProto) and name == "A8W8" else quantized
        )
    return found


def _apart(
    shape: str, count: int, chosen: Sequence[str]
) -> dict[str, dict[str, float]]:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--measure", shape, str(count), *chosen]
    done = subprocess.run(command, text=True, capture_output=True)
    if done.returncode:
        raise RuntimeError(f"{shape}, {count} nodes: {done.stderr.strip()[-400:]}")
    answer: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return answer


def rows_of(
    store: Store, shapes: Sequence[str], sizes: Sequence[int], chosen: Sequence[str]
) -> list[list[object]]:
    """Milliseconds a node at each size, and the verdict."""
    known, rows = store.rows(), list[list[object]]()
    for shape in shapes:
        for name in chosen:
            found = {size: known.get(f"{shape}/{size}/{name}", {}) for size in sizes}
            times = {
                size: row["seconds"] / size * 1e3 for size, row in found.items() if row
            }
            there = found[max(sizes)].get("onnxruntime")
            ratio = (
                times[max(sizes)] / times[BASE]
                if {max(sizes), BASE} <= times.keys()
                else float("nan")
            )
            verdict = (
                "met" if ratio <= MOST else "MISSED"
            )  # what was not measured is missed, too
            rows.append(
                [
                    shape,
                    name,
                    *(times.get(size) for size in sizes),
                    there,
                    ratio,
                    verdict,
                ]
            )
    return rows


def _images(task: Task, count: int) -> Iterator[Feeds]:
    """Samples of a task; from the second round on with noise, so that none is there twice."""
    random, known = np.random.default_rng(0), list(task.calibration(2000))
    for index, feeds in enumerate(islice(cycle(known), count)):
        noise = 0.05 if index >= len(known) else 0.0
        yield {
            name: array
            + np.float32(noise) * random.normal(size=array.shape).astype(array.dtype)
            for name, array in feeds.items()
        }


def measure_images(store: Store, sizes: Sequence[int]) -> list[list[object]]:
    """Measure with so many images, keep the results, and return a row with a verdict a method."""
    task, rows = load("resnet20"), list[list[object]]()
    with TemporaryDirectory() as folder:
        Samples.write(_images(task, max(sizes)), Path(folder))
        for name, method in METHODS.items():
            found = {
                size: method.measure(task.path, Path(folder), size) for size in sizes
            }
            for size, measured in found.items():
                if measured.error:
                    raise RuntimeError(f"{name}, {size} images: {measured.error}")
                store.put(f"images/{size}/{name}", asdict(measured))
            rows.append(
                [name, *images_row([asdict(found[size]) for size in sizes], sizes)]
            )
            print(*rows[-1], file=sys.stderr, flush=True)
    return rows


def images_row(found: Sequence[dict[str, Any]], sizes: Sequence[int]) -> list[object]:
    """Return seconds and peak MB at each size, the ratio of times per image, and the verdict."""
    cells = [f"{row['cpu_seconds']:.1f} s, {row['peak_mb']:.0f} MB" for row in found]
    least, most = found[0], found[-1]
    ratio = most["cpu_seconds"] / least["cpu_seconds"] * sizes[0] / sizes[-1]
    grown = most["peak_mb"] - least["peak_mb"]
    met = ratio <= MOST and grown <= KEPT_MB
    return [*cells, ratio, grown, "met" if met else "MISSED"]


def main() -> int:
    """Measure, keep and judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES)
    parser.add_argument("--work", nargs="+", choices=WORK, default=WORK)
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="processes at a time; time is processor time",
    )
    parser.add_argument(
        "--images",
        nargs="+",
        type=int,
        metavar="N",
        help="measure sets of images instead",
    )
    add_arguments(parser, "out")
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        shape, count, *chosen = arguments.measure
        print("\n" + json.dumps(measure(shape, int(count), chosen)))
        return 0

    store = Store(arguments.out / "scaling.json")
    if arguments.images:
        sizes = sorted(arguments.images)
        rows = measure_images(store, sizes)
        header = ["method", *(f"{size} images" for size in sizes)]
        header += ["s an image: last / first", "MB: last - first", "verdict"]
        text = "Processor seconds and peak memory of ResNet-20\n\n" + table(
            header, rows
        )
        print(text)
        if sizes == [*IMAGES]:
            title = "# Time and memory as calibration data grow"
            (arguments.out / "scaling_images.md").write_text(f"{title}\n\n{text}\n")
        return 1 if any(row[-1] == "MISSED" for row in rows) else 0
    cases = [(shape, size) for size in arguments.sizes for shape in arguments.shapes]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        found = pool.map(lambda case: _apart(*case, arguments.work), cases)
        for (shape, size), timed in zip(cases, found, strict=True):
            for name, row in timed.items():
                store.put(f"{shape}/{size}/{name}", dict(row))
                seconds = f"{row['seconds']:.2f} s"
                print(shape, size, name, seconds, file=sys.stderr, flush=True)
    rows = rows_of(store, arguments.shapes, arguments.sizes, arguments.work)
    largest = max(arguments.sizes)
    header = ["graph", "work", *(f"{size} nodes" for size in arguments.sizes)]
    text = table(
        [*header, f"s in onnxruntime, {largest}", f"{largest} / {BASE}", f"<= {MOST}"],
        rows,
    )
    print("Processor time in ms a node, without onnxruntime\n\n" + text)
    whole = set(arguments.shapes) == set(SHAPES) and tuple(arguments.sizes) == SIZES
    if whole and set(arguments.work) == set(WORK):
        (arguments.out / "scaling.md").write_text(
            "# Time per node as graphs grow\n\nProcessor time in ms a node, without"
            f" onnxruntime\n\n{text}\n"
        )
    return 1 if any(row[-1] == "MISSED" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
