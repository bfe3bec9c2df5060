"""Errors of a detector's boxes and scores, for decisions between two quantized models.

Most anchors of a detector see background. Their coordinates are read by nobody, but are the most of
the signal, so that the SQNR of an output says little about what is found. Judges therefore compare
the mean SQNR of two parts: the coordinates where the float model finds something, and the scores of
all anchors. The SQNR of every other output is that of the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark_onnx.report.measure import OutputError, Total
from quark_onnx.report.verdict.boxes import (
    LEAST_SCORE,
    DetectorLayout,
    arrays_of,
    best_scores,
    class_scores,
    detector_layout,
)

#: Limit of the SQNR of a part, in dB, so that an exact part does not hide another one, nor does
#: a part of zeros.
_MOST = 100.0
#: Columns of the coordinates of a box.
_COORDINATES = 4


class DetectorParts:
    """The errors of the boxes and of the scores of a detector, sample by sample."""

    def __init__(self) -> None:
        self._layout: DetectorLayout | None = None
        self._first = True
        self._totals: dict[str, Total] = {}

    def add(
        self,
        feeds: Mapping[str, NDArray[Any]],
        expected: Mapping[str, Any],
        actual: Mapping[str, Any],
    ) -> None:
        """Add the outputs of the float and of the quantized model on a sample.

        Args:
            feeds: the sample.
            expected: outputs of the float model by name, which decide the parts.
            actual: outputs of the quantized model by name.
        """
        # The layout of the first sample holds for all: the search over outputs is done once.
        if self._first:
            self._first = False
            self._layout = _layout(feeds, expected)
        if self._layout is None:
            return
        before, after = (_parts(self._layout, each) for each in (expected, actual))
        # A box for each anchor, (images, anchors, 4); of another number, all are compared.
        found = best_scores(self._layout, expected) >= LEAST_SCORE
        if before[0].shape == after[0].shape == (*found.shape, _COORDINATES):
            before = before[0][found], before[1]
            after = after[0][found], after[1]
        for name, reference, other in zip(
            ("boxes", "scores"), before, after, strict=True
        ):
            if reference.size:
                self._totals.setdefault(name, Total()).add(reference, other)

    def sqnr(self, error: OutputError) -> float | None:
        """Return the mean SQNR of the parts in dB for an output of boxes or scores.

        That of a whole output for every other one; None where the output has no SQNR.
        """
        layout = self._layout
        has_parts = layout is not None and error.name in layout.outputs
        # An infinite SQNR (outputs that are equal, or broken) needs no parts.
        if error.sqnr is None or not np.isfinite(error.sqnr) or not has_parts:
            return error.sqnr
        values = [
            value
            for value in (
                total.result(name).sqnr for name, total in self._totals.items()
            )
            if value is not None
        ]
        if not values:
            return error.sqnr
        # A mean in dB, so that a loss in a part counts equally however large its values are.
        return float(np.mean(np.clip(values, -_MOST, _MOST)))

    def least_sqnr(self, errors: Iterable[OutputError]) -> float | None:
        """Return the minimum over the outputs, in dB; None without SQNR."""
        return min(
            [error for error in map(self.sqnr, errors) if error is not None],
            default=None,
        )


def _layout(
    feeds: Mapping[str, NDArray[Any]],
    outputs: Mapping[str, Any],
) -> DetectorLayout | None:
    """Return the layout of a detector with a box for each anchor, if it has one.

    Args:
        feeds: the first sample.
        outputs: outputs of the float model on the sample, by name.
    """
    layout = detector_layout(arrays_of(outputs), feeds)
    # Selected boxes differ in number and order, and have no SQNR; they come with their classes.
    if layout is None or layout.form == "selected" or layout.labels:
        return None
    return layout


def _parts(
    layout: DetectorLayout, outputs: Mapping[str, Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the coordinates and the scores as the model has them, before boxes are decoded.

    Returns:
        Arrays (images, anchors, 4) and (images, anchors, classes). An objectness is multiplied into
        the scores, as for detections.
    """
    values = outputs[layout.boxes]
    if layout.form == "pair":
        boxes = values if values.ndim == 3 else values[None]
        return boxes, outputs[layout.scores]
    # (N, values, anchors) becomes (N, anchors, values).
    rows = values.transpose(0, 2, 1) if layout.form == "columns" else values
    return rows[..., :_COORDINATES], class_scores(rows, layout)
