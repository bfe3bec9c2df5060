"""Errors of the parts of a detector's output, for judges that compare two quantized models.

A YOLO-like detector joins coordinates and scores in one output. The coordinates are the greater
values and the most of the signal, so that the SQNR of the whole output says little about the
scores, which decide what is found. Judges therefore compare the mean SQNR of the parts. The SQNR of
every other output is that of the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark_onnx.report.measure import OutputError, Total
from quark_onnx.report.verdict.boxes import DetectorLayout, arrays_of, detector_layout

#: Limit of the SQNR of a part, in dB, so that an exact part does not hide another one, nor does
#: a part of zeros.
_MOST = 100.0
#: Columns of the coordinates of a box.
_COORDINATES = 4


class JoinedParts:
    """The errors of coordinates and scores in a joined output, sample by sample."""

    def __init__(self) -> None:
        self._layout: DetectorLayout | None = None
        self._first = True
        self._totals: list[Total] = []

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
            self._layout = _joined_layout(feeds, expected)
        if self._layout is None:
            return
        name = self._layout.boxes
        # Arrays (N, anchors, 4), (N, anchors, 1) for an objectness, and (N, anchors, classes).
        before = _parts(self._layout, expected[name])
        after = _parts(self._layout, actual[name])
        if not self._totals:
            self._totals = [Total() for _ in before]
        for total, reference, other in zip(self._totals, before, after, strict=True):
            total.add(reference, other)

    def sqnr(self, error: OutputError) -> float | None:
        """Return the mean SQNR of the parts of an output in dB; that of a whole output as it is.

        None where the output has no SQNR.
        """
        layout = self._layout
        joined = layout is not None and layout.boxes == error.name
        # An infinite SQNR (outputs that are equal, or broken) needs no parts.
        if error.sqnr is None or not np.isfinite(error.sqnr) or not joined:
            return error.sqnr
        ratios = [total.result(error.name).sqnr for total in self._totals]
        values = [ratio for ratio in ratios if ratio is not None]
        # A mean in dB, so that a loss in a part counts equally however large its values are.
        return float(np.mean(np.clip(values, -_MOST, _MOST)))

    def least_sqnr(self, errors: Iterable[OutputError]) -> float | None:
        """Return the minimum over the outputs, in dB; None without SQNR."""
        return min(
            [error for error in map(self.sqnr, errors) if error is not None],
            default=None,
        )


def _joined_layout(
    feeds: Mapping[str, NDArray[Any]],
    outputs: Mapping[str, Any],
) -> DetectorLayout | None:
    """Return the layout of a detector with boxes and scores in one output, if the output has one.

    Args:
        feeds: the first sample.
        outputs: outputs of the float model on the sample, by name.
    """
    layout = detector_layout(arrays_of(outputs), feeds)
    # A pair has separate outputs; selected boxes differ in number and order, and have no SQNR.
    if layout is None or layout.form not in ("rows", "columns"):
        return None
    return layout


def _parts(layout: DetectorLayout, output: NDArray[Any]) -> list[NDArray[Any]]:
    """Return the coordinates, the objectness if there is one, and the class scores.

    Args:
        layout: a layout of the form rows or columns.
        output: the joined output, (N, anchors, values) or (N, values, anchors).

    Returns:
        Arrays (N, anchors, values of the part).
    """
    # (N, values, anchors) becomes (N, anchors, values).
    rows = output.transpose(0, 2, 1) if layout.form == "columns" else output
    ends = [_COORDINATES]
    if layout.form == "rows":
        # YOLOv5 and YOLOX have an objectness in column 4; YOLOv8 (columns) has none.
        ends.append(_COORDINATES + 1)
    return np.split(rows, ends, axis=2)
