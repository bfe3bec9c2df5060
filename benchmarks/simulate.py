"""What an integer engine computes of XINT8 models, beside onnxruntime: codes of all tensors, and
top-1.

    QUARK_ONNX_DATA=... python benchmarks/simulate.py [--tasks resnet20 ...] [--report]

Each model is quantized to XINT8 for stx with 32 calibration samples and simulated
(`quark_onnx.npu.simulate`). The reference is onnxruntime with its graph optimizations disabled. On
8 images that nothing was calibrated on, every element of every tensor that is rounded is compared,
(a) simulated from onnxruntime's own codes of the inputs of its operator, and (b) end to end from
the image. Then the first test images are classified. Ties are rounded to even, as QuantizeLinear
does, or upward, as the engine does; averages are exact, or the engine's product and shift.
OUT/simulate.json keeps the figures. The exit code is 1 where fewer than 99.9 % of the elements are
within one code: of each simulation from onnxruntime's codes, and end to end of the one that rounds
as onnxruntime does; or a model was not measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from _data import Feeds, Task, labels, load
from _results import Row, Store, add_arguments, table
from _tools import Ours

#: How many test images are classified, each by three simulations.
TASKS = {"resnet20": 1000, "resnet44": 1000, "squeezenet": 300, "mobilenetv2": 300}
CALIBRATION_SAMPLES, IMAGES = 32, 8
NEAR = 99.9  # per cent of the elements that have to be within one code
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Arithmetic:
    """How a simulation rounds."""

    rounding: str
    average: str = "exact"

    @property
    def name(self) -> str:
        return f"ties {self.rounding}, averages {self.average}"


VARIANTS = (Arithmetic("even"), Arithmetic("up"), Arithmetic("up", "dpu"))


class Enough(Exception):
    """All images that were wanted are there."""


class Images:
    """Stands where a metric expects a session, and keeps what it is fed."""

    def __init__(self, session: Any, count: int) -> None:
        self._session, self._count, self.feeds = session, count, list[Feeds]()

    def get_inputs(self) -> Any:
        return self._session.get_inputs()

    def run(self, names: Any, feeds: Feeds) -> Any:
        if sum(len(next(iter(each.values()))) for each in self.feeds) >= self._count:
            raise Enough
        self.feeds.append(feeds)
        return self._session.run(names, feeds)


def test_images(task: Task, session: Any, count: int) -> list[Feeds]:
    """The first test images, in the order of their labels, in the batches in which the metric reads
    them.
    """
    images = Images(session, count)
    with suppress(Enough):
        task.evaluate(images)
    return images.feeds


class Cpu:
    """onnxruntime without optimizations; it gives the codes of all tensors, too."""

    def __init__(self, model: Any) -> None:
        import onnx
        import onnxruntime

        self.codes = [
            node.output[0]
            for node in model.graph.node
            if node.op_type == "QuantizeLinear"
        ]
        whole = onnx.ModelProto()
        whole.CopyFrom(model)
        whole.graph.output.extend(onnx.ValueInfoProto(name=name) for name in self.codes)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.graph_optimization_level = (
            onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        )
        data, providers = whole.SerializeToString(), ["CPUExecutionProvider"]
        self.session = onnxruntime.InferenceSession(data, options, providers=providers)
        self.output = model.graph.output[0].name

    def scores(self, feeds: Feeds) -> Array:
        return np.asarray(self.session.run([self.output], feeds)[0])

    def all_codes(self, feeds: Feeds) -> dict[str, Array]:
        return dict(zip(self.codes, self.session.run(self.codes, feeds), strict=True))


def classes(scores: Callable[[Feeds], Array], images: list[Feeds]) -> Array:
    """The class of each image."""
    found = (scores(feeds) for feeds in images)
    return np.concatenate(
        [each.reshape(len(each), -1).argmax(axis=1) for each in found]
    )


def shares(
    pairs: Iterator[tuple[Mapping[str, Array], Mapping[str, Array]]],
) -> dict[str, float]:
    """Of all elements, how many per cent are equal, and how many are within one code.

    And the greatest difference.
    """
    equal = near = count = greatest = 0
    for found, wanted in pairs:
        for name, codes in wanted.items():
            off = np.abs(codes.astype(np.int64) - found[name])
            equal, near = equal + int((off == 0).sum()), near + int((off <= 1).sum())
            count, greatest = count + off.size, max(greatest, int(off.max(initial=0)))
    return {
        "equal": 100 * equal / count,
        "near": 100 * near / count,
        "greatest": greatest,
        "elements": count,
    }


def measure(name: str) -> Row:
    """All figures of a model."""
    from quark_onnx import QConfig, quantize
    from quark_onnx.npu import Simulator

    task = load(name)
    samples = list(task.calibration(CALIBRATION_SAMPLES + IMAGES))
    calibration, images = samples[:CALIBRATION_SAMPLES], samples[CALIBRATION_SAMPLES:]
    model = quantize(
        task.path, calibration, QConfig.of("XINT8").with_(target="stx")
    ).model
    cpu, outputs = Cpu(model), [value.name for value in model.graph.output]
    tests = test_images(task, cpu.session, TASKS[name])
    right, reference = labels(name)[: TASKS[name]], classes(cpu.scores, tests)
    wanted = [cpu.all_codes(feeds) for feeds in images]
    row: Row = {"cpu": percent(reference == right)}
    for arithmetic in VARIANTS:
        run = Simulator(model, arithmetic.rounding, average=arithmetic.average).run
        alone = [
            run(feeds, codes=codes) for feeds, codes in zip(images, wanted, strict=True)
        ]
        whole = [run(feeds) for feeds in images]
        found = classes(lambda feeds, run=run: run(feeds).outputs[outputs[0]], tests)  # type: ignore[misc]
        row[arithmetic.name] = {
            "alone": shares(
                (each.codes, codes) for each, codes in zip(alone, wanted, strict=True)
            ),
            "whole": shares(
                (each.codes, codes) for each, codes in zip(whole, wanted, strict=True)
            ),
            "top1": percent(found == right),
            "agree": percent(found == reference),
        }
    return row


def percent(true: Array) -> float:
    return 100 * float(true.mean())


def report(rows: Mapping[str, Row], tasks: list[str]) -> str:
    """Codes and top-1, a table each."""
    codes, tops = list[list[object]](), list[list[object]]()
    for name in (name for name in tasks if name in rows):
        row = rows[name]
        for arithmetic in VARIANTS:
            found = row[arithmetic.name]
            figures = [
                f"{found[part][key]:.3f}" if key != "greatest" else found[part][key]
                for part in ("alone", "whole")
                for key in ("equal", "near", "greatest")
            ]
            codes.append(
                [name, arithmetic.name, f"{found['alone']['elements']:,}", *figures]
            )
        cells = [
            f"{row[each.name]['top1']:.2f} ({row[each.name]['agree']:.1f})"
            for each in VARIANTS
        ]
        tops.append([name, TASKS[name], float(row["cpu"]), *cells])
    figures = ["equal %", "within 1 %", "most"]
    head = [
        "model",
        "simulation",
        "elements",
        *(f"{part} {each}" for part in ("(a)", "(b)") for each in figures),
    ]
    first = (
        f"{IMAGES} images, against onnxruntime without graph optimizations: (a) each"
        " tensor from onnxruntime's codes of the inputs of its operator, (b) end to"
        " end; most is the greatest difference in codes"
    )
    second = (
        "Top-1 % of the first test images, and in brackets how many per cent of them"
        " get onnxruntime's class"
    )
    heads = ["model", "images", "onnxruntime", *(each.name for each in VARIANTS)]
    return "\n\n".join(
        [f"{first}.", table(head, codes), f"{second}.", table(heads, tops)]
    )


def complaints(rows: Mapping[str, Row], tasks: list[str]) -> list[str]:
    """Where fewer elements than wanted are within one code."""
    wanted = [(arithmetic, "alone") for arithmetic in VARIANTS] + [
        (VARIANTS[0], "whole")
    ]
    return [
        f"{name}, {arithmetic.name}, {part}:"
        f" {rows[name][arithmetic.name][part]['near']:.3f} % within one code"
        for name in tasks
        if name in rows
        for arithmetic, part in wanted
        if rows[name][arithmetic.name][part]["near"] < NEAR
    ] + [f"{name} was not measured" for name in tasks if name not in rows]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK"
    )
    add_arguments(parser, "report", "out")
    arguments = parser.parse_args()
    store, source = Store(arguments.out / "simulate.json"), Ours().source
    for name in arguments.tasks:
        if not arguments.report:
            store.put(name, measure(name) | {"source": source})
            print(f"{name} done", file=sys.stderr, flush=True)
    rows = store.rows()
    print(report(rows, arguments.tasks))
    if set(rows) == set(TASKS):
        command = "QUARK_ONNX_DATA=... python benchmarks/simulate.py"
        text = (
            "# XINT8 models on integers\n\n   "
            f" {command}\n\n{report(rows, list(TASKS))}\n"
        )
        (arguments.out / "simulate.md").write_text(text, encoding="utf-8")
    missed = complaints(rows, arguments.tasks)
    for line in missed:
        print(f"missed: {line}", file=sys.stderr)
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
