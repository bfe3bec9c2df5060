"""Exhibits: the samples on which a quantized model differs most, for people to look at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark_onnx.common.wording import counted
from quark_onnx.page.blocks import Gallery, Picture
from quark_onnx.page.png import png
from quark_onnx.page.svg import drawing, linear, tag
from quark_onnx.report.verdict.boxes import (
    SHOWN_SCORE,
    SLACK,
    detections,
    image_inputs,
    matched,
)
from quark_onnx.report.verdict.judges import predicted
from quark_onnx.report.verdict.task import Task

Arrays = Mapping[str, NDArray[Any]]
Pixels = NDArray[np.uint8]

#: Number of samples that are kept, and rows of a batch that are looked at.
_MOST, _ROWS = 6, 8
#: Longest side of a kept image, and the most points of a curve.
_SIDE, _POINTS = 240, 400
#: Width of the frame of a box in pixels.
_FRAME = 2
_FLOAT_COLOR, _QUANTIZED_COLOR = (47, 133, 90), (194, 65, 12)
#: Inputs do not tell the order of their channels.
_CHANNELS = (
    "Channels are shown as red, green and blue, which is wrong for a model of BGR."
)
_TITLES = {
    "classifier": (
        "Images whose class changed",
        f"The classes of both models, by their index. {_CHANNELS}",
    ),
    "detector": (
        "Images with the most changed boxes",
        f"Boxes of both models with a score of at least 0.25. {_CHANNELS}",
    ),
    "image": (
        "Images with the largest errors",
        "The difference is shown at ten times its size, around gray.",
    ),
}
_CURVES = (
    "Samples with the largest errors",
    "The gray line is the float model's output, the thin one the quantized model's.",
)


@dataclass(frozen=True)
class _Exhibit:
    """A sample to look at.

    Attributes:
        change: how much the outputs differ; greater is more.
        caption: the sample, and what has changed.
        images: titles and pixels, (height, width, 3).
        curves: one output of both models along its last axis; None for images.
    """

    change: float
    caption: str
    images: tuple[tuple[str, Pixels], ...] = ()
    curves: tuple[NDArray[Any], NDArray[Any]] | None = None

    @property
    def picture(self) -> Picture:
        if self.curves is not None:
            return Picture(self.caption, [("", _plot(*self.curves))])
        return Picture(
            self.caption, [(title, png(pixels)) for title, pixels in self.images]
        )


@dataclass(frozen=True)
class _Sample:
    """A numbered sample with the outputs of both models."""

    number: int
    feeds: Arrays
    expected: Arrays
    found: Arrays


class Exhibits:
    """The samples with the largest changes, in bounded memory."""

    def __init__(self) -> None:
        self._kept: list[_Exhibit] = []
        self._task = ""
        self._samples = 0

    def add(self, task: Task, feeds: Arrays, expected: Arrays, actual: Arrays) -> None:
        """Look at a sample.

        Args:
            task: the task of the model.
            feeds: inputs by name.
            expected: outputs of the float model by name, of the task's form.
            actual: outputs of the quantized model by name, of the task's form.
        """
        self._task = task.name
        make = _MAKERS.get(task.name)
        same = expected[task.output].shape == actual[task.output].shape
        # Lists of boxes may have any length.
        if make is not None and (same or task.name == "detector"):
            sample = _Sample(self._samples, feeds, expected, actual)
            least = self._kept[-1].change if len(self._kept) == _MOST else 0.0
            self._kept += make(sample, task, least)
            self._kept.sort(key=lambda exhibit: -exhibit.change)
            del self._kept[_MOST:]
        self._samples += 1

    @property
    def gallery(self) -> Gallery:
        """Return the pictures, largest changes first."""
        title, note = _TITLES.get(self._task, _CURVES)
        return Gallery(title, note, [exhibit.picture for exhibit in self._kept])


def _changed_classes(sample: _Sample, task: Task, least: float) -> Iterator[_Exhibit]:
    before = predicted(sample.expected[task.output], task.axis)
    after = predicted(sample.found[task.output], task.axis)
    images = image_inputs(sample.feeds)
    # Positions of a sequence have no image of their own.
    if not images or len(images[0]) != before.size:
        return
    scores = sample.expected[task.output].reshape(before.size, -1)
    for row in np.flatnonzero(before != after)[:_ROWS]:
        surest = np.sort(scores[row])[-2:]
        # Outputs of classes have no scores.
        margin = float(surest[-1] - surest[0]) if surest.size > 1 else 1.0
        pixels = _pixels(images[0][row]) if margin > least else None
        if pixels is None:
            continue
        caption = f"sample {sample.number}: class {before[row]} in float, {after[row]} quantized"
        yield _Exhibit(margin, caption, (("", pixels),))


def _changed_boxes(sample: _Sample, task: Task, least: float) -> Iterator[_Exhibit]:
    assert task.layout is not None
    images = image_inputs(sample.feeds)
    pairs = zip(
        detections(task.layout, sample.expected),
        detections(task.layout, sample.found),
        strict=False,
    )
    for row, (before, after) in enumerate(pairs):
        if row >= min(_ROWS, len(images[0])):
            return
        shown = before[before[:, 4] >= SHOWN_SCORE]
        detected = after[after[:, 4] >= SHOWN_SCORE]
        # As the judge counts: a box that passes the limit in one model alone is none of them.
        loosely = SLACK * SHOWN_SCORE
        lost = len(shown) - len(matched(shown, after[after[:, 4] >= loosely]))
        new = len(detected) - len(matched(detected, before[before[:, 4] >= loosely]))
        whole = _pixels(images[0][row], side=0) if lost + new > least else None
        if whole is None:
            continue
        caption = (
            f"sample {sample.number}: {lost} of {counted(len(shown), 'box', 'boxes')}"
            f" lost, {new} new"
        )
        parts = (
            ("float", _with_boxes(whole, shown, _FLOAT_COLOR)),
            ("quantized", _with_boxes(whole, detected, _QUANTIZED_COLOR)),
        )
        yield _Exhibit(float(lost + new), caption, parts)


def _changed_images(sample: _Sample, task: Task, least: float) -> Iterator[_Exhibit]:
    before = sample.expected[task.output].astype(np.float64)
    after = sample.found[task.output].astype(np.float64)
    for row in range(min(_ROWS, len(before))):
        error = after[row] - before[row]
        change = float(np.square(error).mean())
        if not change > least:  # NaN is no image
            continue
        black, white = float(before[row].min()), float(before[row].max())
        if not black < white:
            continue
        ends = (black, white)
        pictures = (
            _pixels(before[row], ends),
            _pixels(after[row], ends),
            _pixels(10 * error, (black - white, white - black)),
        )
        if all(each is not None for each in pictures):
            titles = ("float", "quantized", "difference")
            caption = (
                f"sample {sample.number}: root mean square error {change**0.5:.3g}"
            )
            named = [
                (t, p) for t, p in zip(titles, pictures, strict=True) if p is not None
            ]
            yield _Exhibit(change, caption, tuple(named))


def _changed_curves(sample: _Sample, task: Task, least: float) -> Iterator[_Exhibit]:
    before = sample.expected[task.output].astype(np.float64)
    after = sample.found[task.output].astype(np.float64)
    # A few values are no curve.
    if before.ndim == 0 or before.shape[-1] < _ROWS or not before.size:
        return
    lines = before.reshape(-1, before.shape[-1])
    others = after.reshape(lines.shape)
    if not (np.isfinite(lines).all() and np.isfinite(others).all()):
        return
    varying = np.square(lines - lines.mean(axis=1, keepdims=True)).sum(axis=1)
    changes = np.square(others - lines).sum(axis=1) / np.maximum(varying, 1e-30)
    worst = int(changes.argmax())
    stride = -(-lines.shape[1] // _POINTS)
    curves = (lines[worst, ::stride].copy(), others[worst, ::stride].copy())
    if changes[worst] > least:
        caption = f"sample {sample.number}, output {task.output}"
        if len(lines) > 1:
            caption += f", line {worst}"
        yield _Exhibit(float(changes[worst]), caption, (), curves)


_MAKERS = {
    "classifier": _changed_classes,
    "detector": _changed_boxes,
    "image": _changed_images,
    "series": _changed_curves,
    "regression": _changed_curves,
    "signal": _changed_curves,
}


def _pixels(
    image: NDArray[Any],
    ends: tuple[float, float] | None = None,
    side: int = _SIDE,
) -> Pixels | None:
    """Return an image for people; None for an array that is no image.

    Args:
        image: (channels, height, width) or (height, width, channels), with 1 or 3 channels.
        ends: values of black and white; None for the least and the greatest value.
        side: longest side; 0 for no limit.
    """
    if image.ndim != 3 or 1 in image.shape[1:2]:
        return None
    if image.shape[0] in (1, 3):
        image = np.moveaxis(image, 0, -1)
    if image.shape[-1] not in (1, 3) or min(image.shape[:2]) < _ROWS:
        return None
    values = np.nan_to_num(image.astype(np.float64))
    least, greatest = ends or (float(values.min()), float(values.max()))
    scaled = (values - least) * (255.0 / max(greatest - least, 1e-30))
    pixels = np.clip(np.rint(scaled), 0, 255).astype(np.uint8)
    whole = np.broadcast_to(pixels, (*pixels.shape[:2], 3))
    return _shrunk(whole, side) if side else whole


def _stride(pixels: Pixels, side: int = _SIDE) -> int:
    """Return the step on each axis from one kept pixel to the next."""
    longest = int(max(pixels.shape[:2]))
    return -(-longest // side)


def _shrunk(pixels: Pixels, side: int = _SIDE) -> Pixels:
    stride = _stride(pixels, side)
    return np.array(pixels[::stride, ::stride])


def _with_boxes(
    pixels: Pixels, boxes: NDArray[Any], color: tuple[int, int, int]
) -> Pixels:
    """Return a shrunk image with the frames of boxes.

    Args:
        pixels: the whole image.
        boxes: left, top, right and bottom in pixels of the whole image, (boxes, 4 or more).
        color: red, green and blue of the frames.
    """
    stride = _stride(pixels)
    pixels = _shrunk(pixels)
    height, width = pixels.shape[:2]
    for box in np.nan_to_num(boxes[:, :4]) / stride:
        left, right = np.clip(box[[0, 2]], 0, width - _FRAME).astype(int)
        top, bottom = np.clip(box[[1, 3]], 0, height - _FRAME).astype(int)
        for row in (top, bottom):
            pixels[row : row + _FRAME, left : right + _FRAME] = color
        for column in (left, right):
            pixels[top : bottom + _FRAME, column : column + _FRAME] = color
    return pixels


def _plot(before: NDArray[Any], after: NDArray[Any]) -> str:
    """Return a drawing of two curves of equal length."""
    lo = float(min(before.min(), after.min()))
    hi = float(max(before.max(), after.max()))
    y = linear(lo, hi, 110.0, 10.0) if hi > lo else linear(lo - 1, lo + 1, 110.0, 10.0)
    x = linear(0, max(1, before.size - 1), 4.0, 296.0)
    lines = [
        tag(
            "polyline",
            points=" ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in enumerate(values)),
            class_=name,
        )
        for name, values in (("float", before), ("quantized", after))
    ]
    return drawing(300.0, 120.0, "outputs of both models", lines)
