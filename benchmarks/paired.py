"""Where ours is below onnxruntime's: is it worse, or unlucky?

    QUARK_ONNX_DATA=DIR python benchmarks/paired.py [--tasks mobilenetv2 ...] QUARK_ONNX_DATA=DIR
    python benchmarks/paired.py --tasks yolox_nano --models FIRST.onnx SECOND.onnx

A test set of 900 or 1,000 images sees differences of a few images as tenths of a point. Here both
tools quantize again at every setting where `results/accuracy.json` has ours more than 0.3 points
below, and are compared image by image: how many are right in ours alone and in theirs alone, the
probability that a fair coin would show a difference as large (the exact sign test, two-sided), and
the noise of the logits over the whole test set, which does not depend on luck. A detector has no
right and wrong image, so its images are drawn again, with replacement and with a seed, the same
ones for both tools, and the metric is computed for each of 1,000 draws: the row has the standard
error of the difference, the middle 95 % of the draws, and the probability of a difference that is
none. The exit code is 1 where ours is worse at the level of 5 %. With --models two detectors of any
origin are compared.
"""

from __future__ import annotations

import argparse
import logging
import sys
from math import comb
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from _data import Samples, labels, load
from _detections import TASKS as DETECTORS
from _detections import Paired, metric_of, paired_bootstrap
from _images import logits
from _results import Store, table
from _settings import SETTINGS, Setting
from _tools import OnnxRuntime, Ours, Tool
from accuracy import CALIBRATION_SAMPLES, TOLERANCE

CLASSIFIERS = ("mobilenetv2", "squeezenet", "resnet20", "resnet44")
TASKS = (*CLASSIFIERS, *DETECTORS)
LEVEL = 0.05
_BOOTSTRAP = ("difference", "95 % of draws", "probability")


def sign_test(first: int, second: int) -> float:
    """Two-sided probability of a split at least this uneven.

    >>> sign_test(0, 5), sign_test(4, 4)
    (0.0625, 1.0)
    """
    n = first + second
    tail = sum(comb(n, k) for k in range(min(first, second) + 1)) / 2**n
    return min(1.0, 2 * tail)


def compare(name: str, setting: Setting) -> tuple[list[object], float]:
    """A row of the table, and the probability in it; 1 where ours has more right."""
    task, right = load(name), labels(name)
    reference = logits(task, task.path)
    with TemporaryDirectory() as folder:
        models = quantized(name, setting, Path(folder))
        theirs, ours = (logits(task, model) for model in models)
    good, better = (values.argmax(1) == right for values in (theirs, ours))
    alone, instead = int((better & ~good).sum()), int((good & ~better).sum())
    probability = sign_test(alone, instead)
    gap = f"{100 * (alone - instead) / len(right):+.2f}"
    noise = [
        f"{10 * np.log10(np.square(reference).sum() / np.square(v - reference).sum()):.2f}"
        for v in (theirs, ours)
    ]
    row = [f"{name} {setting}", gap, alone, instead, f"{probability:.2f}", *noise]
    return row, probability if instead > alone else 1.0


def quantized(name: str, setting: Setting, folder: Path) -> list[Path]:
    """The models of onnxruntime and of ours, made of the same samples."""
    task, tools = load(name), list[Tool]([OnnxRuntime(), Ours()])
    samples = Samples.write(task.calibration(CALIBRATION_SAMPLES), folder / "samples")
    models = [folder / f"{tool.name}.onnx" for tool in tools]
    for tool, output in zip(tools, models, strict=True):
        tool.quantize(task.path, samples, setting, output)
    return models


def compare_detectors(name: str, first: Path, second: Path) -> Paired:
    """The first detector's metric less the second's."""
    task = load(name)
    metric, images = metric_of(name, task, first)
    other, _ = metric_of(name, task, second)
    return paired_bootstrap(metric, other, images)


def bootstrapped(name: str, setting: Setting) -> tuple[list[object], float]:
    """A row of the table of detectors, and the probability in it; 1 where ours is better."""
    with TemporaryDirectory() as folder:
        theirs, ours = quantized(name, setting, Path(folder))
        found = compare_detectors(name, ours, theirs)
    return [
        f"{name} {setting}",
        *cells(found),
    ], found.probability if found.gap < 0 else 1.0


def cells(found: Paired) -> list[object]:
    """The figures of a difference, as a table has them."""
    return [
        f"{found.gap:+.2f} ± {found.error:.2f}",
        f"{found.low:+.2f} to {found.high:+.2f}",
        f"{found.probability:.2f}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tasks", nargs="+", choices=TASKS, default=TASKS, metavar="TASK"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--models", nargs=2, type=Path, metavar=("FIRST", "SECOND"))
    arguments = parser.parse_args()
    logging.getLogger("quark_onnx").setLevel(logging.ERROR)
    if arguments.models:
        if len(arguments.tasks) != 1 or arguments.tasks[0] not in DETECTORS:
            parser.error(
                f"--models compares detectors: give one task of {', '.join(DETECTORS)}"
            )
        found = compare_detectors(arguments.tasks[0], *arguments.models)
        print(table(["models", *_BOOTSTRAP], [["first - second", *cells(found)]]))
        return 0
    rows = Store(arguments.out / "accuracy.json").rows()
    classified, detected, worst = list[list[object]](), list[list[object]](), 1.0
    for name in arguments.tasks:
        for setting in SETTINGS:
            mine, theirs = (
                rows.get(f"{name}/{tool}/{setting}", {}).get("value")
                for tool in ("ours", "onnxruntime")
            )
            if mine is not None and theirs is not None and mine - theirs < -TOLERANCE:
                row, probability = (bootstrapped if name in DETECTORS else compare)(
                    name, setting
                )
                (detected if name in DETECTORS else classified).append(row)
                worst = min(worst, probability)
    header = [
        "row",
        "ours - onnxruntime",
        "ours alone right",
        "theirs alone right",
        "probability",
    ]
    text = table([*header, "SQNR onnxruntime", "SQNR ours"], classified)
    text += "\n\n" + table(["row", *_BOOTSTRAP], detected) if detected else ""
    print(text)
    if set(arguments.tasks) == set(TASKS):
        (arguments.out / "paired.md").write_text(
            f"# Rows below onnxruntime, image by image\n\n{text}\n"
        )
    return 1 if worst < LEVEL else 0


if __name__ == "__main__":
    sys.exit(main())
