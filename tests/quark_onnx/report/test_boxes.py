"""Boxes of detectors are suppressed as ONNX's NonMaxSuppression does it."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

from quark_onnx.report.verdict.boxes import (
    MOST_BOXES,
    SHOWN,
    DetectorLayout,
    detections,
)
from tests.models import parse

LAYOUT = DetectorLayout("selected", "y", "y", "", (320, 320), 6)


@pytest.mark.parametrize("size", [320, 40], ids=["apart", "crowded"])
@pytest.mark.parametrize("classes", [1, 3])
def test_suppression_equals_that_of_onnxruntime(classes: int, size: int) -> None:
    generator = np.random.default_rng(classes)
    count = 400
    # Whole pixels, and scores that float32 holds: both compute the same overlaps.
    corners = generator.integers(0, size, (count, 2))
    sides = generator.integers(1, 60, (count, 2))
    scores = generator.permutation(count) / 512
    labels = generator.integers(0, classes, count)
    rows = np.column_stack([corners, corners + sides, scores, labels])
    (found,) = detections(LAYOUT, {"y": rows[None].astype(np.float32)})

    model = parse(
        """g (float[1, N, 4] boxes, float[1, C, N] scores) => (int64[M, 3] kept) {
            kept = NonMaxSuppression (boxes, scores, most, overlap, least)
        }""",
        most=np.int64([count]),
        overlap=np.float32([SHOWN.overlap]),
        least=np.float32([SHOWN.least_score]),
    )
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    by_class = np.zeros((1, classes, count), np.float32)
    by_class[0, labels, np.arange(count)] = scores
    # ONNX has y before x.
    boxes = rows[None, :, [1, 0, 3, 2]].astype(np.float32)
    (kept,) = session.run(None, {"boxes": boxes, "scores": by_class})
    expected = rows[kept[:, 2]]
    expected = expected[np.argsort(-expected[:, 4])][:MOST_BOXES]
    np.testing.assert_array_equal(found, expected)
