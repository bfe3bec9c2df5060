"""Which error of the outputs ranks quantized models as the metric of their task does?

    QUARK_ONNX_DATA=DIR python benchmarks/judging.py [--tasks mobilenetv2 ...]
        [--settings A8W8 minmse ...] [--again] [--report]

The search of settings, and the steps that accept or reject what optimizers do, see a few samples
without labels, and judge by the signal-to-noise ratio (SQNR) of the outputs. Here one model is
quantized at many settings, and each result has its metric on the test data and several errors on
the samples that the search would hold out (every fourth calibration sample): the SQNR, the
Kullback-Leibler divergence of class probabilities or of scores, and the overlap and shift of boxes.
A table has the rank correlation (Spearman) of each error with the metric over the settings; for
classifiers also with the share of test images whose class is the float model's, which is less noisy
than a top-1; how often, over draws of the settings, the error ranks no better than the one that
the search judges by (p; empty for the latter); and what the setting that an error would choose
loses against the best one. All errors are in dB, the higher the better: -10 log10 of a divergence
in nats, of 1 - IoU, or of a shift in grid steps. Settings that give equal outputs count once. Rows
go to OUT/judging.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from _data import Feeds, Samples, Task, digest, load, session_of
from _ranks import spearman
from _results import Row, Store, add_store_arguments, due, table

from quark_onnx import QConfig, quantize

Array = np.ndarray[Any, np.dtype[Any]]
Errors = dict[str, float]

CLASSIFIERS = ("resnet20", "mobilenetv2", "squeezenet")
DETECTORS = ("yolox_nano", "ultraface")
TASKS = (*CLASSIFIERS, *DETECTORS)
#: Calibration samples, of which every fourth judges, as in `search`.
SAMPLES, EVERY = 100, 4
DRAWS = 1000
#: The error that the search judges by, where it is not the SQNR.
JUDGES = {"yolox_nano": "mean SQNR of parts"}
#: Score of the float model from which a box counts, and limits of a probability.
LEAST, _FLOOR = 0.05, 1e-6
_LEAST_ERROR = 1e-12
#: Strides of the grids of YOLOX and the side of its input; width and height of the face
#: detector's, and a stride.
_STRIDES, _SIDE, _FACES, _FACE_STRIDE = (8, 16, 32), 416, (320, 240), 8.0

#: Changes to a preset by the name of a setting.
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "A8W8": ("A8W8", {}),
    "minmax": ("A8W8", {"calibrator": "minmax"}),
    "mean_minmax": ("A8W8", {"calibrator": "mean_minmax"}),
    "minmse": ("A8W8", {"calibrator": "minmse"}),
    "entropy": ("A8W8", {"calibrator": "entropy"}),
    "percentile": ("A8W8", {"calibrator": "percentile"}),
    "percentile99": ("A8W8", {"calibrator": "percentile:percentile=99"}),
    "percentile98": ("A8W8", {"calibrator": "percentile:percentile=98"}),
    "percentile97": ("A8W8", {"calibrator": "percentile:percentile=97"}),
    "tensor": ("A8W8", {"calibrator": "percentile", "per_channel": False}),
    "cle": ("A8W8", {"optimizers": ("cle",)}),
    "cle+bc": ("A8W8", {"optimizers": ("cle", "bias_correction")}),
    "bc": ("A8W8", {"calibrator": "minmax", "optimizers": ("bias_correction",)}),
    "S8S8": ("S8S8", {}),
    "A16W8": ("A16W8", {}),
    "XINT8": ("XINT8", {}),
    "A8W4": ("A8W4", {}),
    "A8W4+bc": ("A8W4", {"optimizers": ("bias_correction",)}),
    "A8W4+minmse": ("A8W4", {"calibrator": "minmse"}),
    "A8W4p99": ("A8W4", {"calibrator": "percentile:percentile=99"}),
    "A4W8": ("A8W8", {"activation": "uint4"}),
    "A4W8minmse": ("A8W8", {"activation": "uint4", "calibrator": "minmse"}),
    "A4W8bc": (
        "A8W8",
        {
            "activation": "uint4",
            "calibrator": "minmse",
            "optimizers": ("bias_correction",),
        },
    ),
    "A4W4": ("A8W4", {"activation": "uint4", "calibrator": "minmse"}),
    "A8W2": ("A8W4", {"weight": "int2"}),
}


def config_of(setting: str) -> QConfig:
    """Return the configuration of a setting."""
    preset, changes = SETTINGS[setting]
    config = QConfig.of(preset)
    for kind in ("activation", "weight"):
        if kind in changes:
            spec = getattr(config, kind).with_(dtype=changes[kind])
            config = config.with_(**{kind: spec})
    optimizers = (*config.optimizers, *changes.get("optimizers", ()))
    others = {
        name: value
        for name, value in changes.items()
        if name in ("calibrator", "per_channel")
    }
    return config.with_(optimizers=optimizers, **others)


def decibels(error: float) -> float:
    """Return an error in dB, the higher the better.

    >>> decibels(0.01)
    20.0
    """
    return float(-10 * np.log10(max(error, _LEAST_ERROR)))


def sqnr(reference: Array, found: Array) -> float:
    """Return the signal-to-quantization-noise ratio in dB."""
    expected = reference.astype(np.float64)
    return decibels(
        float(np.square(expected - found).sum() / np.square(expected).sum())
    )


def divergence(reference: Array, found: Array) -> Array:
    """Return the Kullback-Leibler divergence of each row of logits, in nats.

    >>> divergence(np.log([[0.5, 0.5]]), np.log([[0.25, 0.75]])).round(4)
    array([0.1438])
    """
    before, after = map(_log_probabilities, (reference, found))
    return np.asarray((np.exp(before) * (before - after)).sum(axis=1))


def _log_probabilities(logits: Array) -> Array:
    rows = logits.astype(np.float64)
    rows = rows - rows.max(axis=1, keepdims=True)
    return np.asarray(rows - np.log(np.exp(rows).sum(axis=1, keepdims=True)))


def score_divergence(reference: Array, found: Array) -> Array:
    """Return the Kullback-Leibler divergence of each score, a probability, in nats.

    >>> score_divergence(np.array([0.5]), np.array([0.25])).round(4)
    array([0.1438])
    """
    p, q = (
        np.clip(scores.astype(np.float64), _FLOOR, 1 - _FLOOR)
        for scores in (reference, found)
    )
    return np.asarray(p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q)))


def class_errors(reference: list[Array], found: list[Array]) -> Errors:
    """Return the errors of a classifier's logits."""
    before, after = (each[0].reshape(len(each[0]), -1) for each in (reference, found))
    return {
        "SQNR": sqnr(before, after),
        "divergence": decibels(float(divergence(before, after).mean())),
        "agreement": 100 * float(np.mean(before.argmax(1) == after.argmax(1))),
    }


def paired_iou(boxes: Array, others: Array) -> Array:
    """Return the intersection over union of each box (..., 4) and the other one at its place."""
    low = np.maximum(boxes[..., :2], others[..., :2])
    high = np.minimum(boxes[..., 2:], others[..., 2:])
    common = np.clip(high - low, 0, None).prod(axis=-1)
    areas = [
        np.clip(each[..., 2:] - each[..., :2], 0, None).prod(axis=-1)
        for each in (boxes, others)
    ]
    return np.asarray(common / np.maximum(areas[0] + areas[1] - common, 1e-12))


def box_errors(
    scores: tuple[Array, Array], boxes: tuple[Array, Array], steps: Array
) -> Errors:
    """Return the errors of a detector's scores and boxes.

    Boxes weigh by the score of the float model, from a score of 0.05.

    Args:
        scores: (images, anchors, classes) of the float and of the quantized model.
        boxes: (images, anchors, 4) of both, as corners in pixels.
        steps: grid step of each anchor in pixels, or of all.
    """
    likeliest = scores[0].max(axis=-1)
    weights = np.where(likeliest >= LEAST, likeliest, 0.0)
    missed = 1 - paired_iou(*boxes)
    shifts = np.abs(boxes[0] - boxes[1]).mean(axis=-1) / steps
    total = max(float(weights.sum()), _LEAST_ERROR)
    of_scores = decibels(float(score_divergence(*scores).sum(axis=(1, 2)).mean()))
    overlap = decibels(float((missed * weights).sum()) / total)
    shift = decibels(float((shifts * weights).sum()) / total)
    return {
        "divergence of scores": of_scores,
        "overlap of boxes": overlap,
        "shift of boxes": shift,
        "divergence and overlap": (of_scores + overlap) / 2,
        "divergence and shift": (of_scores + shift) / 2,
    }


def object_errors(reference: list[Array], found: list[Array]) -> Errors:
    """Return the errors of YOLOX, whose output joins boxes, objectness and classes."""
    before, after = (each[0].astype(np.float64) for each in (reference, found))
    ends = [4, 5]
    parts = zip(np.split(before, ends, 2), np.split(after, ends, 2), strict=True)
    cells = [
        np.stack(np.mgrid[: _SIDE // k, : _SIDE // k][::-1], -1).reshape(-1, 2)
        for k in _STRIDES
    ]
    steps = np.repeat(_STRIDES, [len(each) for each in cells]).astype(np.float64)
    grid = np.concatenate(cells)

    def corners(output: Array) -> Array:
        centers = (output[..., :2] + grid) * steps[:, None]
        half = np.exp(output[..., 2:4]) * steps[:, None] / 2
        return np.concatenate([centers - half, centers + half], axis=-1)

    scores = tuple(each[..., 4:5] * each[..., 5:] for each in (before, after))
    boxes = (corners(before), corners(after))
    return {
        "SQNR": sqnr(before, after),
        "mean SQNR of parts": float(np.mean([sqnr(*part) for part in parts])),
        **box_errors((scores[0], scores[1]), boxes, steps),
    }


def face_errors(reference: list[Array], found: list[Array]) -> Errors:
    """Return the errors of the face detector, with an output of scores and one of boxes."""
    ratios = [sqnr(*pair) for pair in zip(reference, found, strict=True)]
    size = np.array([*_FACES, *_FACES], np.float64)
    return {
        "SQNR": min(ratios),
        "mean SQNR of parts": float(np.mean(ratios)),
        **box_errors(
            (reference[0][..., 1:], found[0][..., 1:]),
            (reference[1] * size, found[1] * size),
            np.float64(_FACE_STRIDE),
        ),
    }


def errors_of(task: str, reference: list[Array], found: list[Array]) -> Errors:
    """Return all errors of a model's outputs on the held-out samples."""
    measures = {"yolox_nano": object_errors, "ultraface": face_errors}
    errors = measures.get(task, class_errors)(reference, found)
    return {name: round(value, 4) for name, value in errors.items()}


class _Recorder:
    """A session that keeps the outputs of all runs."""

    def __init__(self, model: Path) -> None:
        self._session = session_of(model)
        self._found: list[list[Array]] = []

    def get_inputs(self) -> Any:
        return self._session.get_inputs()

    def run(self, names: Any, feeds: Mapping[str, Array]) -> Any:
        values = self._session.run(names, dict(feeds))
        self._found.append(values)
        return values

    def outputs(self) -> list[Array]:
        """Return the outputs, each with the batches one behind another."""
        return [np.concatenate(each) for each in zip(*self._found, strict=True)]


def judged(task: Task, model: Path, samples: list[Feeds]) -> tuple[Row, list[Any]]:
    """Return the metric, and the outputs on held-out samples and on the test data."""
    held_out, test = _Recorder(model), _Recorder(model)
    inputs = {each.name for each in held_out.get_inputs()}
    for sample in samples:
        held_out.run(None, {name: sample[name] for name in inputs})
    value = task.evaluate(test)
    return {"value": round(value, 4)}, [held_out.outputs()[:2], test.outputs()[:1]]


def row_of(
    name: str, value: Row, reference: list[list[Array]], found: list[list[Array]]
) -> Row:
    """Return the row of a quantized model.

    Args:
        name: the task.
        value: its metric.
        reference: outputs of the float model on held-out samples, and on the test data.
        found: those of the quantized model.
    """
    row = {**value, "errors": errors_of(name, reference[0], found[0])}
    if name in CLASSIFIERS:
        row["agreement"] = class_errors(reference[1], found[1])["agreement"]
    return row


def measure(name: str, settings: list[str], store: Store, *, again: bool) -> None:
    """Measure what is missing of a task."""
    task = load(name)
    tag = {"model": digest(task.path)}
    rows = store.rows()
    missing = [
        each for each in settings if due(rows.get(f"{name}/{each}"), tag, again=again)
    ]
    if not missing:
        return
    every = list(task.calibration(SAMPLES))
    judges = every[1::EVERY]
    calibration = [each for place, each in enumerate(every) if place % EVERY != 1]
    _, reference = judged(task, task.path, judges)
    with TemporaryDirectory() as folder:
        samples = Samples.write(iter(calibration), Path(folder) / "samples")
        output = Path(folder) / "quantized.onnx"
        for setting in missing:
            quantize(task.path, samples, config_of(setting), output)
            value, found = judged(task, output, judges)
            row = row_of(name, value, reference, found)
            store.put(f"{name}/{setting}", row | tag)
            print(name, setting, row, file=sys.stderr, flush=True)


def distinct(rows: Mapping[str, Row], task: str) -> dict[str, Row]:
    """Return the rows of a task by setting; of equal ones the first."""
    found: dict[str, Row] = {}
    for setting in SETTINGS:
        row = rows.get(f"{task}/{setting}")
        same = [each for each in found.values() if row and _is_same(each, row)]
        if row is not None and not same:
            found[setting] = row
    return found


def _is_same(row: Row, other: Row) -> bool:
    return bool(row["errors"] == other["errors"] and row["value"] == other["value"])


def summary(rows: Mapping[str, Row], task: str) -> Iterator[list[object]]:
    """Yield for each error its rank correlations, and the loss by its choice."""
    known = distinct(rows, task)
    values = np.array([row["value"] for row in known.values()])
    agreements = [row.get("agreement") for row in known.values()]
    names = list(next(iter(known.values()))["errors"])
    errors = {
        name: np.array([row["errors"][name] for row in known.values()])
        for name in names
    }
    judge = JUDGES.get(task, names[0])
    for name in names:
        chance = None
        if name != judge:
            chance = probability(values, errors[judge], errors[name])
        agreed = None
        if task in CLASSIFIERS:
            agreed = spearman(agreements, errors[name])
        loss = float(values.max() - values[errors[name].argmax()])
        yield [name, spearman(values, errors[name]), chance, agreed, loss]


def probability(values: Array, first: Array, second: Array) -> float:
    """Return how often the second error ranks no better than the first.

    Settings are drawn with replacement (bootstrap), the same ones for both errors.

    >>> values = np.arange(9.0)
    >>> probability(values, -values, values)
    0.0
    """
    random = np.random.default_rng(0)
    draws = [random.integers(0, len(values), len(values)) for _ in range(DRAWS)]
    gains = [
        spearman(values[draw], second[draw]) - spearman(values[draw], first[draw])
        for draw in draws
    ]
    return float(np.mean(np.array(gains) <= 0))


def report(rows: Mapping[str, Row], tasks: list[str]) -> Iterator[str]:
    """A table for each task, and the settings behind it."""
    header = (
        "error",
        "with the metric",
        "p",
        "with agreement on test data",
        "loss by its choice",
    )
    for task in tasks:
        known = distinct(rows, task)
        if len(known) < 3:
            continue
        settings = ", ".join(
            f"{setting} {row['value']:.2f}" for setting, row in known.items()
        )
        yield f"## {task}\n\n{table(header, summary(rows, task))}\n\n{settings}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_store_arguments(parser, TASKS)
    parser.add_argument(
        "--settings",
        nargs="+",
        choices=SETTINGS,
        default=list(SETTINGS),
        metavar="SETTING",
    )
    arguments = parser.parse_args()
    store = Store(arguments.out / "judging.json")
    for name in [] if arguments.report else arguments.tasks:
        measure(name, arguments.settings, store, again=arguments.again)
    text = "\n\n".join(report(store.rows(), arguments.tasks))
    print(text)
    if tuple(arguments.tasks) == TASKS:
        intro = (
            "Rank correlations (Spearman) over the settings of errors on held-out"
            " calibration samples with the metric on test data. The line under each"
            " table has the metric of each setting."
        )
        (arguments.out / "judging.md").write_text(
            f"# Errors of outputs as judges\n\n{intro}\n\n{text}\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
