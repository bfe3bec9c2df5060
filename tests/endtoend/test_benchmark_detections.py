"""The bootstrap for detectors: metrics of draws against a direct computation on the images that
were drawn.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models import Array

FOLDER = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="the benchmarks are not part of this distribution"
)
CLASSES = 3


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("_detections")


def synthetic(images: int, noise: float, seed: int) -> tuple[list[Array], list[Array]]:
    """Objects of images, and detections of them that miss by ``noise`` pixels, some of them of
    nothing.
    """
    random = np.random.default_rng(seed)
    found, truths = list[Array](), list[Array]()
    for place in range(images):
        count = 0 if place == 0 else int(random.integers(1, 5))
        low = random.uniform(0, 80, (count, 2))
        truth = np.column_stack(
            [
                random.integers(0, CLASSES, count),
                low,
                low + random.uniform(10, 40, (count, 2)),
            ]
        )
        boxes = np.repeat(truth, 2, axis=0)
        boxes[:, 1:] += random.normal(0, noise, (len(boxes), 4))
        stray = np.column_stack(
            [random.integers(0, CLASSES, 2), np.tile([5.0, 5.0, 30.0, 30.0], (2, 1))]
        )
        every = np.concatenate([boxes, stray])
        rows = np.column_stack(
            [every[:, 0], random.uniform(0.1, 1, len(every)), every[:, 1:]]
        )
        found.append(rows[np.argsort(-rows[:, 1])])
        truths.append(truth)
    return found, truths


def overlap(a: Array, b: Array) -> float:
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    common = max(0.0, width) * max(0.0, height)
    return common / (
        (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - common
    )


def directly(found: list[Array], truths: list[Array]) -> float:
    """COCO's mean average precision, step by step: precision at 101 recalls, by class and
    threshold.
    """
    means = []
    for kind in range(CLASSES):
        total = sum(int((truth[:, 0] == kind).sum()) for truth in truths)
        rows = [
            (row[1], place, row[2:])
            for place, rows in enumerate(found)
            for row in rows
            if row[0] == kind
        ]
        rows.sort(key=lambda row: -row[0])
        for threshold in np.arange(0.5, 1.0, 0.05) if total else ():
            taken, right, points = (
                set[tuple[int, int]](),
                0,
                list[tuple[float, float]](),
            )
            for seen, (_, place, box) in enumerate(rows, 1):
                free = [
                    (overlap(box, truth[1:]), number)
                    for number, truth in enumerate(truths[place])
                    if truth[0] == kind and (place, number) not in taken
                ]
                if free and max(free)[0] >= threshold:
                    taken.add((place, max(free)[1]))
                    right += 1
                points.append((right / total, right / seen))
            for recall in np.linspace(0, 1, 101):
                means.append(max((p for r, p in points if r >= recall), default=0.0))
    return 100 * float(np.mean(means))


@pytest.mark.parametrize("noise", [0.5, 2.0, 6.0])
def test_the_mean_average_precision_of_a_draw_is_that_of_its_images(
    module: Any, noise: float
) -> None:
    found, truths = synthetic(12, noise, seed=3)
    detections = module.Detections.matched(found, truths, CLASSES)
    random = np.random.default_rng(0)
    for drawn in [np.arange(12), *random.integers(0, 12, (4, 12))]:
        weights = np.bincount(drawn, minlength=12)
        expected = directly([found[i] for i in drawn], [truths[i] for i in drawn])
        assert detections.mean_average_precision(weights) == pytest.approx(
            expected, abs=1e-9
        )


def test_f1_of_a_draw_counts_images_as_often_as_they_are_drawn(module: Any) -> None:
    counts = module.Counts(
        np.array([2, 0, 1]), np.array([0, 3, 1]), np.array([1, 0, 0])
    )
    assert counts.f1(np.array([1, 1, 1])) == pytest.approx(100 * 6 / (6 + 4 + 1))
    assert counts.f1(np.array([2, 0, 1])) == pytest.approx(100 * 10 / (10 + 1 + 2))
    assert counts.f1(np.array([0, 0, 0])) == 0


def test_a_worse_detector_is_told_from_an_equal_one(module: Any) -> None:
    metrics = []
    for noise, seed in ((1.0, 5), (6.0, 5)):
        found, truths = synthetic(30, noise, seed)
        metrics.append(
            module.Detections.matched(found, truths, CLASSES).mean_average_precision
        )
    good, bad = metrics
    found = module.paired_bootstrap(good, bad, 30, draws=200)
    assert found.gap == good(np.ones(30, int)) - bad(np.ones(30, int)) > 0
    assert (
        found.low > 0
        and found.probability < 0.05
        and found.low < found.gap < found.high
    )
    assert module.paired_bootstrap(bad, good, 30, draws=200).gap == -found.gap
    assert module.paired_bootstrap(good, bad, 30, draws=200) == found, (
        "the seed is given"
    )
    same = module.paired_bootstrap(good, good, 30, draws=50)
    assert (same.gap, same.error, same.probability) == (0, 0, 1)


def test_the_error_of_a_mean_is_the_known_one(module: Any) -> None:
    """Of a mean over images, the bootstrap's error is the standard deviation over the root of their
    number.
    """
    values = np.random.default_rng(1).normal(0.1, 1, 200)
    found = module.paired_bootstrap(
        lambda w: w @ values / 200, lambda w: 0.0, 200, draws=2000
    )
    assert found.error == pytest.approx(values.std() / 200**0.5, rel=0.06)


def test_overlapping_detections_are_suppressed_by_class(module: Any) -> None:
    boxes = np.array([[0, 0, 10, 10], [1, 0, 10, 10], [20, 20, 30, 30.0]])
    scores = np.array([[0.5, 0.1], [0.9, 0.0], [0.3, 0.8]])
    found = module.suppressed(boxes, scores, 0.05, 0.5)
    assert found[:, :2].tolist() == [[0, 0.9], [1, 0.8], [0, 0.3], [1, 0.1]]
    assert module.suppressed(boxes, scores, 0.95, 0.5).shape == (0, 6)
