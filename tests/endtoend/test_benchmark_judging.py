"""The errors that the benchmark of judges compares, against numpy in float64."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="the benchmarks are not part of this distribution"
)


@pytest.fixture
def judging(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("judging")


def test_divergence_of_logits_is_that_of_their_probabilities(judging: Any) -> None:
    random = np.random.default_rng(0)
    before, after = random.normal(scale=5, size=(2, 7, 10)).astype(np.float32)
    for place, found in enumerate(judging.divergence(before, after)):
        p = np.exp(before[place].astype(np.float64))
        q = np.exp(after[place].astype(np.float64))
        p, q = p / p.sum(), q / q.sum()
        assert found == pytest.approx(float((p * np.log(p / q)).sum()))
    shifted = judging.divergence(before, before + 3)
    np.testing.assert_allclose(shifted, 0, atol=1e-6)


def test_divergence_of_scores_is_that_of_coins(judging: Any) -> None:
    random = np.random.default_rng(1)
    p, q = random.uniform(0.01, 0.99, size=(2, 5))
    expected = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
    np.testing.assert_allclose(judging.score_divergence(p, q), expected)
    assert np.isfinite(judging.score_divergence(np.zeros(3), np.ones(3))).all()


def test_boxes_count_by_their_scores_in_grid_steps(judging: Any) -> None:
    """A box that nothing is in may be anywhere; one of 10 x 10 pixels moves by 2."""
    boxes = np.array([[[0.0, 0, 10, 10], [0, 0, 10, 10]]])
    moved = np.array([[[2.0, 0, 12, 10], [500, 500, 510, 510]]])
    scores = np.array([[[0.9, 0.1], [0.01, 0.02]]])
    errors = judging.box_errors((scores, scores), (boxes, moved), np.array([8.0, 8.0]))
    iou = 80 / 120
    assert errors["overlap of boxes"] == pytest.approx(-10 * np.log10(1 - iou))
    shift = (2 + 0 + 2 + 0) / 4 / 8
    assert errors["shift of boxes"] == pytest.approx(-10 * np.log10(shift))
    assert errors["divergence of scores"] == judging.decibels(0)


def test_a_detector_without_objects_has_no_error_of_boxes(judging: Any) -> None:
    scores, boxes = np.zeros((1, 2, 3)), np.ones((1, 2, 4))
    errors = judging.box_errors((scores, scores), (boxes, boxes + 1), np.float64(8))
    assert errors["overlap of boxes"] == judging.decibels(0)


def test_an_error_that_ranks_better_is_told_from_one_that_does_not(
    judging: Any,
) -> None:
    values = np.arange(12.0)
    noise = np.random.default_rng(2).normal(size=12)
    assert judging.probability(values, noise, values) < 0.01
    assert judging.probability(values, values, noise) > 0.99


def test_settings_with_equal_outputs_count_once(judging: Any) -> None:
    row = {"value": 1.0, "errors": {"SQNR": 10.0, "divergence": 5.0}}
    rows = {
        "ultraface/A8W8": row,
        "ultraface/cle": dict(row),
        "ultraface/minmax": {**row, "value": 2.0},
        "yolox_nano/A8W8": row,
    }
    assert list(judging.distinct(rows, "ultraface")) == ["A8W8", "minmax"]
    assert list(judging.report(rows, ["ultraface"])) == []


def test_every_setting_is_a_configuration(judging: Any) -> None:
    configs = [judging.config_of(name) for name in judging.SETTINGS]
    assert len(set(map(str, configs))) > 20
