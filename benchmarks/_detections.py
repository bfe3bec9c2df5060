"""How good a detector is on each test image, and how certain a difference between two of them is.

A mean average precision is no mean over images, so that a difference has no test image by image.
The bootstrap draws the images again, with replacement, the same ones for both detectors, and
computes the metric of each draw (Efron and Tibshirani 1993, "An Introduction to the Bootstrap",
chapters 6 and 16).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _data import VARIABLE, ScoredTask, Task, session_of

Array = np.ndarray[Any, np.dtype[Any]]
#: The metric of a draw, of how often each image is in it.
Metric = Callable[[Array], float]

TASKS = ("yolox_nano", "ultraface")
THRESHOLDS = np.arange(0.5, 1.0, 0.05)
DRAWS = 1000
_RECALLS = np.linspace(0, 1, 101)
#: Strides of the grids of YOLOX, the side of its input, and with what its task keeps and suppresses
#: boxes.
_STRIDES, _SIDE, _LEAST, _OVERLAP, _MOST = (8, 16, 32), 416, 0.01, 0.65, 100
#: The same of the face detector, and the overlap at which a face is the same one.
_SURE, _FACE_OVERLAP, _SAME = 0.7, 0.5, 0.75


def iou(boxes: Array, others: Array) -> Array:
    """Intersections over unions of n boxes and m others: n x m. A box is (x1, y1, x2, y2)."""
    low = np.maximum(boxes[:, None, :2], others[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    common = np.clip(high - low, 0, None).prod(axis=2)
    areas = [(each[:, 2:] - each[:, :2]).prod(axis=1) for each in (boxes, others)]
    return np.asarray(common / (areas[0][:, None] + areas[1][None] - common + 1e-9))


def suppressed(boxes: Array, scores: Array, least: float, overlap: float) -> Array:
    """Detections (class, score, box) of n boxes with n x classes scores, the best first.

    At most 100.
    """
    found = [np.empty((0, 6))]
    for kind in range(scores.shape[1]):
        left = np.flatnonzero(scores[:, kind] > least)
        left = left[np.argsort(-scores[left, kind])]
        while left.size:
            first, left = left[0], left[1:]
            found.append(np.array([[kind, scores[first, kind], *boxes[first]]]))
            left = left[iou(boxes[[first]], boxes[left])[0] <= overlap]
    rows = np.concatenate(found)
    return rows[np.argsort(-rows[:, 1], kind="stable")][:_MOST]


@dataclass(frozen=True)
class Detections:
    """What a detector finds on a number of images, matched with what there is to be found.

    Attributes:
        image, kind, score: of each detection.
        hit: detections x thresholds: whether it is the first that overlaps an object so far.
        objects: images x classes: how many there are.
    """

    image: Array
    kind: Array
    score: Array
    hit: Array
    objects: Array

    @classmethod
    def matched(
        cls, found: Sequence[Array], truths: Sequence[Array], classes: int
    ) -> Detections:
        """Match detections (class, score, box), the best first, with objects (class, box), image by
        image.
        """
        hits = [
            object_hits(each, truth) for each, truth in zip(found, truths, strict=True)
        ]
        rows = np.concatenate([np.empty((0, 6)), *found])
        image = np.repeat(np.arange(len(found)), [len(each) for each in found])
        objects = np.array(
            [
                np.bincount(truth[:, 0].astype(int), minlength=classes)
                for truth in truths
            ]
        )
        order = np.argsort(-rows[:, 1], kind="stable")
        hit = np.concatenate([np.empty((0, len(THRESHOLDS)), bool), *hits])
        return cls(
            image[order],
            rows[order, 0].astype(int),
            rows[order, 1],
            hit[order],
            objects,
        )

    def mean_average_precision(self, weights: Array) -> float:
        """COCO's mean over classes and thresholds, in percent, of images that are there ``weights``
        times each.
        """
        found = list[float]()
        totals = weights @ self.objects
        for kind in np.flatnonzero(totals):
            rows = self.kind == kind
            times = weights[self.image[rows]]
            right, all_of_them = (
                np.cumsum(times[:, None] * self.hit[rows], axis=0),
                np.cumsum(times),
            )
            precision = right / np.maximum(all_of_them, 1)[:, None]
            best = np.maximum.accumulate(precision[::-1])[::-1]
            for column, recall in zip(best.T, (right / totals[kind]).T, strict=True):
                places = np.searchsorted(recall, _RECALLS)
                found.append(float(np.append(column, 0.0)[places].mean()))
        return 100 * float(np.mean(found))


def object_hits(found: Array, truth: Array) -> Array:
    """For each detection and threshold whether it is the first of an object that it overlaps most."""  # noqa: E501
    hit = np.zeros((len(found), len(THRESHOLDS)), bool)
    for kind in np.unique(found[:, 0]):
        boxes = truth[truth[:, 0] == kind, 1:]
        rows = np.flatnonzero(found[:, 0] == kind)
        if not len(boxes):
            continue
        overlaps = iou(found[rows, 2:], boxes)
        for place, threshold in enumerate(THRESHOLDS):
            free = np.ones(len(boxes), bool)
            for row, overlap in zip(rows, overlaps, strict=True):
                best = int(np.where(free, overlap, -1).argmax())
                if free[best] and overlap[best] >= threshold:
                    hit[row, place], free[best] = True, False
    return hit


@dataclass(frozen=True)
class Counts:
    """For each image: objects that are found, detections of nothing, objects that are missed."""

    hits: Array
    wrong: Array
    missed: Array

    def f1(self, weights: Array) -> float:
        """Harmonic mean of precision and recall, in percent, of images that are there ``weights``
        times each.
        """
        twice = 2 * weights @ self.hits
        return 100 * float(
            twice / max(1, twice + weights @ self.wrong + weights @ self.missed)
        )


@dataclass(frozen=True)
class Paired:
    """The difference of two detectors' metrics on the same images.

    Attributes:
        gap: on all images.
        error: its standard error, over draws of the images. low, high: 95 % of the draws lie
        between. probability: that of a gap that is none (two-sided: twice the share of draws on the
        rarer side of zero).
    """

    gap: float
    error: float
    low: float
    high: float
    probability: float


def paired_bootstrap(
    first: Metric, second: Metric, images: int, draws: int = DRAWS, seed: int = 0
) -> Paired:
    """The first detector's metric less the second's, over draws of the images with replacement.

    >>> scores = np.array([1.0, 0.0, 1.0, 1.0])
    >>> found = paired_bootstrap(lambda w: float(w @ scores), lambda w: 0.0, images=4, draws=200)
    >>> found.gap, found.probability < 0.05
    (3.0, True)
    """
    random = np.random.default_rng(seed)
    gaps = np.empty(draws)
    for draw in range(draws):
        weights = np.bincount(random.integers(0, images, images), minlength=images)
        gaps[draw] = first(weights) - second(weights)
    once = np.ones(images, int)
    below, above = np.mean(gaps <= 0), np.mean(gaps >= 0)
    low, high = np.percentile(gaps, (2.5, 97.5))
    return Paired(
        gap=float(first(once) - second(once)),
        error=float(gaps.std(ddof=1)),
        low=float(low),
        high=float(high),
        probability=float(min(1.0, 2 * min(below, above))),
    )


class _Recorder:
    """A session that hands the outputs of every run on."""

    def __init__(self, model: Path, see: Callable[[list[Array]], Array]) -> None:
        self._session, self._see = session_of(model), see
        self.found: list[Array] = []

    def get_inputs(self) -> Any:
        return self._session.get_inputs()

    def run(self, names: Any, feeds: Any) -> Any:
        values = self._session.run(names, feeds)
        self.found.append(self._see(values))
        return values


def metric_of(name: str, task: Task, model: Path) -> tuple[Metric, int]:
    """The metric of a model on draws of a task's test samples, and how many there are."""
    if isinstance(task, ScoredTask):
        scores = task.scores(session_of(model))
        return lambda weights: 100 * float(weights @ scores / weights.sum()), len(
            scores
        )
    see = _faces if name == "ultraface" else _objects
    recorder = _Recorder(model, see)
    task.evaluate(recorder)
    if name == "ultraface":
        reference = _Recorder(task.path, see)
        task.evaluate(reference)
        counts = np.array(
            [
                _counted(*pair)
                for pair in zip(recorder.found, reference.found, strict=True)
            ]
        )
        return Counts(*counts.T).f1, len(counts)
    truths = _truths()
    return Detections.matched(
        recorder.found, truths, classes=80
    ).mean_average_precision, len(truths)


def _objects(values: list[Array]) -> Array:
    """Detections of YOLOX in its input's pixels."""
    rows = values[0][0].astype(np.float64)
    cells = [
        np.stack(np.mgrid[: _SIDE // k, : _SIDE // k][::-1], -1).reshape(-1, 2)
        for k in _STRIDES
    ]
    stride = np.repeat(_STRIDES, [len(each) for each in cells])[:, None]
    center = (rows[:, :2] + np.concatenate(cells)) * stride
    half = np.exp(rows[:, 2:4]) * stride / 2
    return suppressed(
        np.concatenate([center - half, center + half], 1),
        rows[:, 4:5] * rows[:, 5:],
        _LEAST,
        _OVERLAP,
    )


def _truths() -> list[Array]:
    """Objects of the test images, in the pixels of the input that they are scaled to."""
    from PIL import Image

    folder, truths = Path(os.environ[VARIABLE]) / "detection", list[Array]()
    for place, file in enumerate(sorted((folder / "images").glob("*.jpg"))):
        if place % 4 == 0:  # these calibrate
            continue
        with Image.open(file) as image:
            size = np.array([image.width, image.height] * 2)
        lines = (
            (folder / "labels" / f"{file.stem}.txt").read_text(encoding="utf-8").split()
        )
        kind, x, y, w, h = np.array(lines, float).reshape(-1, 5).T
        boxes = np.stack([x - w / 2, y - h / 2, x + w / 2, y + h / 2], 1) * size
        truths.append(
            np.concatenate(
                [kind[:, None], boxes * min(_SIDE / size[0], _SIDE / size[1])], 1
            )
        )
    return truths


def _faces(values: list[Array]) -> Array:
    """Detections of the face detector."""
    scores, boxes = values[:2]
    return suppressed(
        boxes[0].astype(np.float64), scores[0][:, 1:], _SURE, _FACE_OVERLAP
    )


def _counted(found: Array, real: Array) -> tuple[int, int, int]:
    """Hits, detections of nothing, and faces that are missed, of one image."""
    overlaps = iou(found[:, 2:], real[:, 2:])
    free, hits = np.ones(len(real), bool), 0
    for overlap in overlaps:
        same = np.flatnonzero(free & (overlap > _SAME))
        free[same[:1]] = False
        hits += bool(same.size)
    return hits, len(found) - hits, len(real) - hits
