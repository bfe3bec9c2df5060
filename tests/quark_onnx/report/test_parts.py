"""parts: a detector's coordinates and scores are judged apart, other outputs as a whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quark_onnx.report.measure import OutputError, Total
from quark_onnx.report.parts import JoinedParts
from tests.models import Array

IMAGE = {"x": np.zeros((1, 3, 64, 64), np.float32)}
ANCHORS = 84


def rows(seed: int = 0) -> Array:
    """Boxes in pixels, an objectness and two classes for each anchor."""
    random = np.random.default_rng(seed)
    boxes = random.uniform(1, 60, (1, ANCHORS, 4))
    return np.concatenate([boxes, random.uniform(0, 1, (1, ANCHORS, 3))], axis=2)


def judged(expected: Array, *found: Array) -> tuple[float, float]:
    """The SQNR of the whole output, and of its parts, over several samples."""
    parts, total = JoinedParts(), Total()
    for each in found:
        parts.add(IMAGE, {"y": expected}, {"y": each})
        total.add(expected, each)
    error = total.result("y")
    least = parts.least_sqnr([error])
    assert error.sqnr is not None and least is not None
    return error.sqnr, least


def decibels(expected: Array, found: Array) -> float:
    noise = np.square(expected - found).sum()
    return float(10 * np.log10(np.square(expected).sum() / noise))


def test_the_sqnr_of_a_joined_output_is_the_mean_of_its_parts() -> None:
    expected = rows()
    found = expected + np.random.default_rng(1).normal(0, 0.1, expected.shape)
    parts = [slice(0, 4), slice(4, 5), slice(5, None)]
    wanted = np.mean([decibels(expected[..., p], found[..., p]) for p in parts])
    assert judged(expected, found)[1] == pytest.approx(wanted)


def test_lost_scores_count_where_the_whole_output_does_not_show_them() -> None:
    expected = rows()
    without_scores, moved = expected.copy(), expected.copy()
    without_scores[..., 4:] = 0.5
    moved[..., :4] += 1.0
    whole, parts = zip(
        judged(expected, without_scores), judged(expected, moved), strict=True
    )
    assert whole[0] > whole[1]
    assert parts[0] < parts[1]


def test_columns_have_coordinates_and_classes() -> None:
    expected = np.delete(rows(), 4, axis=2)
    found = expected + np.random.default_rng(1).normal(0, 0.1, expected.shape)
    wanted = np.mean(
        [decibels(expected[..., p], found[..., p]) for p in (slice(4), slice(4, None))]
    )
    turned = [each.transpose(0, 2, 1) for each in (expected, found)]
    assert judged(*turned)[1] == pytest.approx(wanted)


def test_the_parts_are_totals_over_the_samples() -> None:
    expected = rows()
    noise = np.random.default_rng(1).normal(0, 0.1, expected.shape)
    once = judged(expected, expected + noise)[1]
    assert judged(expected, expected + noise, expected + noise)[1] == pytest.approx(
        once
    )


@pytest.mark.parametrize(
    "expected",
    [np.linspace(-3, 3, 10)[None], np.linspace(-9, 9, ANCHORS * 7).reshape(1, -1, 7)],
    ids=["classes", "rows without scores"],
)
def test_other_outputs_are_judged_as_a_whole(expected: Array) -> None:
    whole, parts = judged(expected, expected + 0.1)
    assert parts == whole


def test_an_exact_part_hides_no_other_and_an_equal_output_is_exact() -> None:
    expected = rows()
    scores = expected.copy()
    scores[..., 5:] = 0.5
    assert judged(expected, scores)[1] < 100
    assert judged(expected, expected) == (np.inf, np.inf)


def test_an_output_of_another_shape_has_lost_everything() -> None:
    expected = rows()
    assert judged(expected, expected[:, :-1]) == (-np.inf, -np.inf)


def test_no_sqnr_is_none() -> None:
    integers: list[Any] = [OutputError("y", None, None, None, 1.0)]
    assert JoinedParts().least_sqnr(integers) is None
    assert JoinedParts().least_sqnr([]) is None
