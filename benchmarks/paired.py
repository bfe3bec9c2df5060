"""Where ours is below another tool's, or our default below a recipe: is it worse, or unlucky?

    QUARK_ONNX_DATA=DIR python benchmarks/paired.py [--tasks mobilenetv2 ...]
        [--amd-quark-python VENV/bin/python] [--nncf-python VENV/bin/python]
    QUARK_ONNX_DATA=DIR python benchmarks/paired.py --tasks yolox_nano
        --models FIRST.onnx SECOND.onnx

A test set of 900 or 1,000 images sees differences of a few images as tenths of a point. Here both
tools quantize again at every setting where `results/accuracy.json` has ours more than 0.3 points
below, or our default more than 0.3 points below our own recipe, and are compared image by image:
how many are right in ours alone and in theirs alone, the probability that a fair coin would show a
difference as large (the exact sign test, two-sided), and the noise of the logits over the whole
test set, which does not depend on luck. A detector has no right and wrong image, so its images are
drawn again, with replacement and with a seed, the same ones for both tools, and the metric is
computed for each of 1,000 draws: the row has the standard error of the difference, the middle 95 %
of the draws, and the probability of a difference that is none; tasks of packages, whose samples
have a score each, are drawn in the same way. Each comparison is kept in results/paired.json with
the metrics of both tools; one of the metrics that accuracy.json has now is not made again, and the
marks of accuracy.py read it. The exit code is 1 where ours is worse at the level of 5 %, or a row
was not compared. With --models two models of any origin are compared.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator
from math import comb
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from _data import Samples, labels, load
from _detections import TASKS as DETECTORS
from _detections import Paired, metric_of, paired_bootstrap
from _images import LEVEL, logits
from _packaged import TASKS as PACKAGED
from _results import Row, Store, add_arguments, table
from _settings import RECIPES, SETTINGS, Setting
from _tools import (
    AmdQuark,
    Nncf,
    OnnxRuntime,
    Ours,
    Tool,
    add_peer_arguments,
)
from accuracy import CALIBRATION_SAMPLES, Gap, gaps, own_setting, paired_row

CLASSIFIERS = ("mobilenetv2", "squeezenet", "resnet20", "resnet44")
TASKS = (*CLASSIFIERS, *DETECTORS, *PACKAGED)
_BOOTSTRAP = ("difference", "95 % of draws", "probability")


def sign_test(first: int, second: int) -> float:
    """Two-sided probability of a split at least this uneven.

    >>> sign_test(0, 5), sign_test(4, 4)
    (0.0625, 1.0)
    """
    n = first + second
    tail = float(sum(comb(n, k) for k in range(min(first, second) + 1)) / 2**n)
    return min(1.0, 2 * tail)


def compare(name: str, setting: Setting, peer: Tool) -> Row:
    """Compare two classifiers image by image."""
    task, right = load(name), labels(name)
    reference = logits(task, task.path)
    with TemporaryDirectory() as folder:
        models = quantized(name, setting, peer, Path(folder))
        theirs, ours = (logits(task, model) for model in models)
    good, better = (values.argmax(1) == right for values in (theirs, ours))
    alone, instead = int((better & ~good).sum()), int((good & ~better).sum())
    noise = [
        round(float(10 * np.log10(np.square(reference).sum() / np.square(v).sum())), 2)
        for v in (theirs - reference, ours - reference)
    ]
    return {
        "ours": round(100 * float(better.mean()), 4),
        "theirs": round(100 * float(good.mean()), 4),
        "alone": [alone, instead],
        "sqnr": noise,
        "probability": round(sign_test(alone, instead), 4),
    }


def quantized(name: str, setting: Setting, peer: Tool, folder: Path) -> list[Path]:
    """The models of another tool, or of a recipe of ours, and of ours, of the same samples."""
    task = load(name)
    samples = Samples.write(task.calibration(CALIBRATION_SAMPLES), folder / "samples")
    theirs, ours = folder / "theirs.onnx", folder / "ours.onnx"
    peer.quantize(task.path, samples, setting, theirs)
    Ours().quantize(task.path, samples, own_setting(name, setting), ours)
    return [theirs, ours]


def compare_models(name: str, first: Path, second: Path) -> Paired:
    """The first model's metric less the second's."""
    task = load(name)
    metric, images = metric_of(name, task, first)
    other, _ = metric_of(name, task, second)
    return paired_bootstrap(metric, other, images)


def bootstrapped(name: str, setting: Setting, peer: Tool) -> Row:
    """Compare two models over draws of the test samples."""
    task = load(name)
    with TemporaryDirectory() as folder:
        theirs, ours = quantized(name, setting, peer, Path(folder))
        (mine, images), (other, _) = (
            metric_of(name, task, model) for model in (ours, theirs)
        )
    found = paired_bootstrap(mine, other, images)
    once = np.ones(images, int)
    return {
        "ours": round(mine(once), 4),
        "theirs": round(other(once), 4),
        "difference": cells(found),
        "probability": round(found.probability, 4),
    }


def cells(found: Paired) -> list[str]:
    """The figures of a difference, as a table has them."""
    return [
        f"{found.gap:+.2f} ± {found.error:.2f}",
        f"{found.low:+.2f} to {found.high:+.2f}",
        f"{found.probability:.2f}",
    ]


def below(tasks: list[str], rows: dict[str, Row], peers: list[Tool]) -> Iterator[Gap]:
    """Yield the rows of accuracy.json where ours is below another tool's or a recipe of ours."""
    for name in tasks:
        for peer in peers:
            settings = RECIPES if isinstance(peer, Ours) else SETTINGS
            found = gaps(rows, name, peer, Ours(), settings)
            yield from (gap for gap in found if gap.missed)


def report(found: list[tuple[Gap, Row | None]]) -> str:
    """The comparisons as tables, of classifiers and of detectors."""
    classified, detected = list[list[object]](), list[list[object]]()
    for gap, row in found:
        label = f"{gap.task} {gap.setting}"
        peer = "own recipe" if gap.peer == Ours.name else gap.peer
        if row is None:
            classified.append([label, peer, f"{gap.value:+.2f}", "not compared"])
        elif "difference" in row:
            detected.append([label, peer, *row["difference"]])
        else:
            classified.append(
                [
                    label,
                    peer,
                    f"{row['ours'] - row['theirs']:+.2f}",
                    *row["alone"],
                    f"{row['probability']:.2f}",
                    *(f"{value:.2f}" for value in reversed(row["sqnr"])),
                ]
            )
    header = [
        "row",
        "other tool",
        "ours - theirs",
        "ours alone right",
        "theirs alone right",
        "probability",
        "SQNR ours",
        "SQNR theirs",
    ]
    filled = [[*row, *[None] * (len(header) - len(row))] for row in classified]
    text = table(header, filled)
    if detected:
        text += "\n\n" + table(["row", "other tool", *_BOOTSTRAP], detected)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tasks", nargs="+", choices=TASKS, default=TASKS, metavar="TASK"
    )
    add_arguments(parser, "out")
    parser.add_argument("--models", nargs=2, type=Path, metavar=("FIRST", "SECOND"))
    add_peer_arguments(parser)
    arguments = parser.parse_args()
    logging.getLogger("quark_onnx").setLevel(logging.ERROR)
    if arguments.models:
        known = (*DETECTORS, *PACKAGED)
        if len(arguments.tasks) != 1 or arguments.tasks[0] not in known:
            parser.error(
                f"--models compares two models: give one task of {', '.join(known)}"
            )
        found = compare_models(arguments.tasks[0], *arguments.models)
        print(table(["models", *_BOOTSTRAP], [["first - second", *cells(found)]]))
        return 0
    rows = Store(arguments.out / "accuracy.json").rows()
    store = Store(arguments.out / "paired.json")
    pythons = {
        AmdQuark.name: arguments.amd_quark_python,
        Nncf.name: arguments.nncf_python,
    }
    peers: list[Tool] = [
        OnnxRuntime(),
        AmdQuark(arguments.amd_quark_python or Path()),
        Nncf(arguments.nncf_python or Path()),
        Ours(),
    ]
    tools = {tool.name: tool for tool in peers}
    compared = list[tuple[Gap, Row | None]]()
    for gap in below(list(arguments.tasks), rows, peers):
        available = gap.peer not in pythons or pythons[gap.peer]
        if paired_row(store.rows(), gap) is None and available:
            method = compare if gap.task in CLASSIFIERS else bootstrapped
            store.put(gap.key, method(gap.task, gap.setting, tools[gap.peer]))
        compared.append((gap, paired_row(store.rows(), gap)))
    text = report(compared)
    print(text)
    if set(arguments.tasks) == set(TASKS):
        (arguments.out / "paired.md").write_text(
            f"# Rows below another tool's or a recipe of ours, image by image\n\n{text}\n"
        )
    worse = [gap for gap, row in compared if row is None or row["probability"] < LEVEL]
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
