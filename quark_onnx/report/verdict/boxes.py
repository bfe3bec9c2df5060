"""Boxes and scores of detectors, read off outputs and matched between two models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]
Floats = NDArray[np.float64]


class Selection(NamedTuple):
    """The boxes that count.

    Attributes:
        least_score: minimum score.
        overlap: maximum overlap (IoU) of boxes of one class.
    """

    least_score: float
    overlap: float


#: Boxes that an application would show, and those that a mAP ranks, as YOLOX's evaluation: a mAP
#: counts boxes of low scores, too.
SHOWN, RANKED = Selection(0.05, 0.5), Selection(0.01, 0.65)
#: Minimum score of a detection that an application would show, and the fallback if the float
#: model has none.
SHOWN_SCORE = 0.25
#: Share of the minimum score that suffices for a detection of the other model.
SLACK = 0.5
#: Maximum number of boxes per image.
MOST_BOXES = 100
#: Maximum number of candidates per image, by score.
#: Suppression compares selected boxes with all candidates: their number limits the time.
_CANDIDATES = 1000
#: Boxes that are compared with the others at a time.
_AT_ONCE = 16
#: Minimum number of rows of an output with one box per anchor.
_ANCHORS = 50
#: Strides of the maps of YOLO-like detectors whose boxes are relative to the cell.
_STRIDES = (8, 16, 32)
#: Columns of selected boxes: four coordinates, score, class.
_SELECTED = 6


@dataclass(frozen=True)
class DetectorLayout:
    """The layout of a detector's outputs.

    Attributes:
        form: ``pair``: an output of boxes and an output of scores; ``rows``: one output (N,
            anchors, 4 + ...); ``columns``: one output (N, 4 + classes, anchors); ``selected``:
            one output (N, boxes, 6) of coordinates, score and class.
        boxes: name of the output with the boxes.
        scores: name of the output with the scores; equal to ``boxes`` for a single output.
        labels: name of the output with the classes; empty if there is none.
        size: (height, width) of the input image.
        width: number of values per box in its output.
    """

    form: Literal["pair", "rows", "columns", "selected"]
    boxes: str
    scores: str
    labels: str
    size: tuple[int, int]
    width: int

    @property
    def outputs(self) -> tuple[str, ...]:
        """Return the names of the required outputs."""
        return tuple(dict.fromkeys((self.boxes, self.scores, self.labels)))

    def fits(self, outputs: Arrays) -> bool:
        """Return whether outputs have the layout, with any number of boxes.

        Args:
            outputs: outputs of a model by name; those of the layout must be among them.
        """
        boxes = outputs[self.boxes]
        if boxes.shape[_width_axis(self.form)] != self.width:
            return False
        if self.form != "pair":
            return True
        # Any number of boxes; scores and classes must have as many.
        count = boxes.size // 4
        scores = outputs[self.scores].size
        if self.labels:
            return scores == count == outputs[self.labels].size
        if not count:
            return scores == 0
        return scores % count == 0


def arrays_of(values: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Return the arrays among values, without sequences and maps."""
    return {
        name: value for name, value in values.items() if isinstance(value, np.ndarray)
    }


def image_inputs(feeds: Arrays) -> list[NDArray[Any]]:
    """Return the inputs of rank four, which may be images.

    Args:
        feeds: inputs of a sample by name.
    """
    return [feed for feed in feeds.values() if feed.ndim == 4]


def _width_axis(form: str) -> int:
    """Return the axis of the coordinates in an output of boxes, by the form of its layout."""
    return 1 if form == "columns" else -1


def detector_layout(outputs: Arrays, feeds: Arrays) -> DetectorLayout | None:
    """Return the box layout of a float model's outputs; None unless a detector.

    Args:
        outputs: outputs of the float model on a sample, by name.
        feeds: inputs of the sample by name; the first of rank four is taken for the image.
    """
    images = image_inputs(feeds)
    if not images:
        return None
    size = _image_size(images[0])
    # Separate outputs come first: a pair is certain, one output with scores is a guess.
    return _paired_layout(outputs, size) or _single_layout(outputs, size)


def _image_size(image: NDArray[Any]) -> tuple[int, int]:
    """Return the height and width of images (N, C, H, W) or (N, H, W, C)."""
    shape = image.shape
    # Gray, RGB and RGBA images as (N, C, H, W); otherwise (N, H, W, C), as TensorFlow exports them.
    if shape[1] in (1, 3, 4):
        return shape[2], shape[3]
    return shape[1], shape[2]


def _paired_layout(outputs: Arrays, size: tuple[int, int]) -> DetectorLayout | None:
    """Return the layout of boxes and scores in two outputs; None without such outputs.

    Args:
        size: (height, width) of the input image.
    """
    for name, value in outputs.items():
        if not _are_boxes(value):
            continue
        scores, labels = _companions(name, value, outputs)
        if scores:
            return DetectorLayout("pair", name, scores, labels, size, 4)
    return None


def _single_layout(outputs: Arrays, size: tuple[int, int]) -> DetectorLayout | None:
    """Return the layout of an output with boxes and scores, if the output has one."""
    for name, value in outputs.items():
        form = _single_form(value)
        if form is not None:
            width = value.shape[_width_axis(form)]
            return DetectorLayout(form, name, name, "", size, width)
    return None


def _are_boxes(value: NDArray[Any]) -> bool:
    """Return whether an output may hold the coordinates of boxes, and nothing else."""
    if value.dtype.kind != "f" or value.ndim not in (2, 3):
        return False
    return value.shape[-1:] == (4,)


def _companions(name: str, boxes: NDArray[Any], outputs: Arrays) -> tuple[str, str]:
    """Return the outputs with scores and classes of boxes.

    Args:
        boxes: the boxes: (N, count, 4), or (count, 4) of a model for one image.
        outputs: all outputs by name.

    Returns:
        The first output with scores, and the first with classes; empty where missing.
    """
    scores = list[str]()
    labels = list[str]()
    for other, value in outputs.items():
        if other == name or not _is_per_box(value, boxes):
            continue
        if value.dtype.kind in "iu" and value.ndim < boxes.ndim:
            labels.append(other)
        elif value.dtype.kind == "f" and value.shape[-1:] != (4,):
            scores.append(other)
    return next(iter(scores), ""), next(iter(labels), "")


def _is_per_box(value: NDArray[Any], boxes: NDArray[Any]) -> bool:
    """Return whether an output, (N, count, ...) or (count,), has values for each of the boxes."""
    leading = value.shape[: boxes.ndim - 1]
    return leading == boxes.shape[:-1] or value.shape == boxes.shape[-2:-1]


def _single_form(value: NDArray[Any]) -> Literal["rows", "columns", "selected"] | None:
    """Return the layout of boxes and scores in a single output; None for other outputs.

    Args:
        value: an output of any type and rank.

    Returns:
        The form as in ``DetectorLayout``: "rows" for (N, anchors, 5 + classes) with an
            objectness, "columns" for (N, 4 + classes, anchors), "selected" for (N, boxes, 6).
    """
    if not _is_float_matrix(value):
        return None
    if value.shape[2] == _SELECTED and _is_selected(value):
        return "selected"
    # (N, anchors, values) or (N, values, anchors); there are many more anchors than values.
    rows, columns = value.shape[1:]
    # Four coordinates, an objectness, and a class at least.
    if columns > 5 and _end_with_scores(value):
        # wide rows of shares alone are probabilities of many classes, not boxes
        all_shares = _are_shares(value[..., :4])
        return None if all_shares and columns > 200 else "rows"
    transposed = value.transpose(0, 2, 1)
    # Four coordinates and a class at least; an objectness is not part of this form.
    if rows > 4 and _end_with_scores(transposed):
        return None if _are_shares(transposed[..., :4]) else "columns"
    return None


def _is_float_matrix(value: NDArray[Any]) -> bool:
    """Return whether an output is a batch of finite float matrices."""
    if value.dtype.kind != "f" or value.ndim != 3:
        return False
    return value.size > 0 and bool(np.isfinite(value).all())


def _end_with_scores(rows: NDArray[Any]) -> bool:
    """Return whether rows (N, anchors, values) are many, with shares after four coordinates."""
    count, width = rows.shape[1:]
    # More rows than values tell rows from columns.
    return count >= max(_ANCHORS, width) and _are_shares(rows[..., 4:])


def _are_shares(values: NDArray[Any]) -> bool:
    """Return whether all values lie in [0, 1]; NaN does not."""
    return bool(values.min() >= 0 and values.max() <= 1)


def _is_selected(value: NDArray[Any]) -> bool:
    """Return whether rows may be x1, y1, x2, y2, score and class of selected boxes.

    Args:
        value: finite values, (N, boxes, 6).
    """
    if not _are_shares(value[..., 4]):
        return False
    classes = value[..., 5]
    whole = (classes == np.round(classes)).all()
    ordered = (value[..., 2] >= value[..., 0]).all()
    return bool(whole and ordered)


def detections(
    layout: DetectorLayout, outputs: Arrays, selection: Selection = SHOWN
) -> list[Floats]:
    """Return the boxes of every image, after non-maximum suppression.

    Args:
        layout: the layout of the outputs.
        outputs: outputs by name, which fit the layout.
        selection: the boxes that count.

    Returns:
        For each image of the batch, an array (boxes, 6): x1, y1, x2, y2 in pixels of the input,
            the score and the class, in descending order of scores.
    """
    return [
        _suppressed(*candidates, selection)
        for candidates in _candidates(layout, outputs)
    ]


def _candidates(
    layout: DetectorLayout,
    outputs: Arrays,
) -> list[tuple[Floats, Floats, Floats]]:
    """Return boxes (n, 4), scores (n,) and classes (n,) of every image.

    Boxes are corners in pixels of the input image.
    """
    candidates = []
    for coordinates, scores, classes in _images(layout, outputs):
        # Corners before pixels: the test for corners does not depend on the unit.
        corners = _corners(coordinates)
        candidates.append((_in_pixels(corners, layout.size), scores, classes))
    return candidates


def _images(
    layout: DetectorLayout,
    outputs: Arrays,
) -> list[tuple[Floats, Floats, Floats]]:
    """Return boxes, scores and classes of every image, the boxes as the model has them.

    Returns:
        For each image: boxes (n, 4), scores (n,) and classes (n,), all float64. Boxes are corners,
            or centers and sizes, in pixels or as shares of the image.
    """
    # float16 cannot hold all pixel positions of a large image.
    boxes = outputs[layout.boxes].astype(np.float64)
    if boxes.ndim != 3:
        boxes = boxes[None]
    if layout.form == "selected":
        return [(row[:, :4], row[:, 4], row[:, 5]) for row in boxes]
    if layout.form == "pair":
        return _paired(layout, boxes, outputs)
    if layout.form == "columns":
        boxes = boxes.transpose(0, 2, 1)
    return [_from_rows(row, layout) for row in boxes]


def _from_rows(row: Floats, layout: DetectorLayout) -> tuple[Floats, Floats, Floats]:
    """Return boxes (anchors, 4), best scores (anchors,) and classes of a row (anchors, 4 + ...)."""
    scores, classes = _best_class(_class_scores(row, layout))
    return _decoded(row[:, :4], layout.size), scores, classes


def _class_scores(row: Floats, layout: DetectorLayout) -> Floats:
    """Return the class scores (anchors, classes) of a row (anchors, 4 + ...) of a YOLO."""
    if layout.form == "rows":
        # YOLO: P(object) * P(class | object). Shapes (anchors, 1) and (anchors, classes).
        return row[:, 4:5] * row[:, 5:]
    return row[:, 4:]


def _paired(
    layout: DetectorLayout,
    boxes: Floats,
    outputs: Arrays,
) -> list[tuple[Floats, Floats, Floats]]:
    """Return boxes, scores and classes of every image where boxes and scores are two outputs.

    Args:
        boxes: boxes, (images, boxes, 4).
    """
    scores = outputs[layout.scores].astype(np.float64)
    # A detector with suppression inside may find nothing; reshape could not infer the classes then.
    if not boxes.size:
        empty = np.zeros(0)
        return [(np.zeros((0, 4)), empty, empty)] * len(boxes)
    # (images, boxes, classes), or (images, boxes, 1) beside an output of classes.
    scores = scores.reshape(len(boxes), boxes.shape[1], -1)
    if layout.labels:
        labels = outputs[layout.labels].astype(np.float64)
        labels = labels.reshape(len(boxes), -1)
        return list(zip(boxes, scores[:, :, 0], labels, strict=True))
    scores = _foreground(scores)
    return [
        (box, *_best_class(score)) for box, score in zip(boxes, scores, strict=True)
    ]


def _foreground(scores: Floats) -> Floats:
    """Return scores in [0, 1] without the background class.

    Args:
        scores: logits or probabilities, (images, boxes, classes).
    """
    shares = _as_shares(scores)
    if not _have_background(shares):
        return shares
    # A softmax over classes includes the background, the class of most anchors.
    means = shares.reshape(-1, shares.shape[-1]).mean(axis=0)
    return np.delete(shares, int(means.argmax()), axis=-1)


def _as_shares(scores: Floats) -> Floats:
    """Return scores in [0, 1]: logits of one class by a sigmoid, of several by a softmax.

    Args:
        scores: scores of all images, (images, boxes, classes). A single value outside [0, 1] makes
            all of them logits.

    Returns:
        An array of the same shape; ``scores`` itself if they are no logits.
    """
    # Only values outside [0, 1] are logits; NaN is neither below nor above.
    if not scores.size or not (scores.min() < 0 or scores.max() > 1):
        return scores
    if scores.shape[-1] == 1:
        return np.asarray(1 / (1 + np.exp(-scores)))
    return softmax(scores)


def softmax(logits: Floats) -> Floats:
    """Return the softmax along the last axis."""
    # Less the maximum, exp cannot overflow.
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def _have_background(shares: Floats) -> bool:
    """Return whether the classes of scores (images, boxes, classes) include the background.

    Args:
        shares: scores in [0, 1].
    """
    anchors, classes = shares.shape[-2:]
    # Few boxes are selected ones, among which the background is not the usual class.
    if classes < 2 or anchors < _ANCHORS:
        return False
    # Independent sigmoids do not sum to 1, and have no background class.
    return np.allclose(shares.sum(axis=-1), 1, atol=1e-2)


def _best_class(scores: Floats) -> tuple[Floats, Floats]:
    """Return the best score of each box, and its class as float64, of scores (boxes, classes)."""
    classes = scores.argmax(axis=1)
    return scores[np.arange(len(scores)), classes], classes.astype(np.float64)


def _decoded(boxes: Floats, size: tuple[int, int]) -> Floats:
    """Return centers and sizes in pixels of boxes relative to grid cells.

    Sizes in such boxes are logarithms, and therefore partly negative. Further forms are
    returned unchanged.

    Args:
        boxes: the coordinates of an image, (anchors, 4).
        size: (height, width) of the input image.
    """
    # Sizes in pixels or shares are not negative: already decoded.
    if not boxes.size or boxes[:, 2:].min() >= 0:
        return boxes
    grids = [(size[0] // stride, size[1] // stride) for stride in _STRIDES]
    # One box for each cell of the three maps, as in YOLOX; other anchors are unknown.
    if sum(prod(grid) for grid in grids) != len(boxes):
        return boxes
    cells, strides = [], []
    for stride, (height, width) in zip(_STRIDES, grids, strict=True):
        # Row by row: x changes fastest, as in the flattened map.
        y, x = np.mgrid[:height, :width]
        cells.append(np.stack([x, y], axis=-1).reshape(-1, 2))
        strides.append(np.full((height * width, 1), float(stride)))
    scales = np.concatenate(strides)
    # YOLOX: centre = (offset + cell) * stride, size = exp(value) * stride.
    centres = (boxes[:, :2] + np.concatenate(cells)) * scales
    return np.concatenate([centres, np.exp(boxes[:, 2:]) * scales], axis=1)


def _corners(boxes: Floats) -> Floats:
    """Return boxes as x1, y1, x2, y2.

    Boxes are unchanged if nearly all have x1 < x2 and y1 < y2. Centers and sizes fail the test,
    as the distance of most anchors from the corner exceeds their width.

    Args:
        boxes: coordinates of an image, (n, 4), in any unit.
    """
    ordered = (boxes[:, 2:] >= boxes[:, :2]).all(axis=1)
    # A few boxes of corners may be degenerate, hence not all.
    if not len(boxes) or ordered.mean() > 0.95:
        return boxes
    half = boxes[:, 2:] / 2
    return np.concatenate([boxes[:, :2] - half, boxes[:, :2] + half], axis=1)


def _in_pixels(boxes: Floats, size: tuple[int, int]) -> Floats:
    """Return corners (n, 4) in pixels; those relative to the image's (height, width) are scaled."""
    # Shares lie in [0, 1], a little beyond at the border; a quantile, because single boxes may be
    # wild.
    if not boxes.size or np.quantile(np.abs(boxes), 0.9) > 2:
        return boxes
    height, width = size
    return boxes * np.array([width, height, width, height], np.float64)


def _suppressed(
    boxes: Floats, scores: Floats, classes: Floats, selection: Selection
) -> Floats:
    """Return the boxes after non-maximum suppression by class, as (boxes, 6).

    Args:
        boxes: corners in pixels, (n, 4).
        scores: scores in [0, 1], (n,).
        classes: classes, (n,).
        selection: the boxes that count.

    Returns:
        At most ``MOST_BOXES`` rows x1, y1, x2, y2, score, class, in descending order of scores.
    """
    keep = scores >= selection.least_score
    # Stable: of equal scores, the first anchor comes first, in both models.
    order = np.argsort(-scores[keep], kind="stable")[:_CANDIDATES]
    rows = np.column_stack([boxes, scores, classes])[keep][order]
    # By columns, and without the boxes that are suppressed already: this is most of the time of a
    # detector's outputs.
    indices = np.arange(len(rows))
    x1, y1, x2, y2, _, labels = np.ascontiguousarray(rows.T)
    columns = np.stack([x1, y1, x2, y2, _areas(x1, y1, x2, y2), labels])
    selected: list[int] = []
    while len(indices) and len(selected) < MOST_BOXES:
        first = columns[:, :_AT_ONCE]
        suppresses = _suppress(first, columns, selection.overlap)
        gone = np.zeros(len(indices), np.bool_)
        for place, suppressed in enumerate(suppresses):
            if not gone[place] and len(selected) < MOST_BOXES:
                selected.append(int(indices[place]))
                gone |= suppressed
        # Those that are left of the first ones are selected, or too many.
        gone[: len(suppresses)] = True
        indices, columns = indices[~gone], columns[:, ~gone]
    return np.asarray(rows[selected])


def _suppress(first: Floats, others: Floats, most_overlap: float) -> NDArray[np.bool_]:
    """Return whether boxes of a class overlap by more than allowed, (first, others).

    Args:
        first: x1, y1, x2, y2, area and class of boxes, (6, first).
        others: those of the other boxes, (6, others).
        most_overlap: the maximum overlap (IoU).
    """
    left, top, right, bottom, area, label = first[:, :, None]
    x1, y1, x2, y2, areas, labels = others
    shared = _areas(
        np.maximum(x1, left),
        np.maximum(y1, top),
        np.minimum(x2, right),
        np.minimum(y2, bottom),
    )
    overlap = _over_union(shared, area, areas)
    return np.asarray((labels == label) & (overlap > most_overlap))


def _areas(x1: Floats, y1: Floats, x2: Floats, y2: Floats) -> Floats:
    """Return the areas of boxes by their corners; a negative extent counts as 0."""
    return np.maximum(x2 - x1, 0) * np.maximum(y2 - y1, 0)


def _over_union(shared: Floats, area: Floats, areas: Floats) -> Floats:
    """Return intersection over union from the shared areas of boxes with others."""
    # Two degenerate boxes have an empty union.
    return np.asarray(shared / np.maximum(area + areas - shared, 1e-12))


def overlaps(box: Floats, boxes: Floats) -> Floats:
    """Return the intersection over union of a box (4,) with boxes (n, 4).

    >>> overlaps(np.array([0., 0, 2, 2]), np.array([[0., 0, 2, 2], [1, 0, 3, 2]])).round(3)
    array([1.   , 0.333])
    """
    low = np.maximum(box[:2], boxes[:, :2])
    high = np.minimum(box[2:], boxes[:, 2:])
    # Disjoint boxes have a negative extent.
    shared = _areas(*low.T, *high.T)
    return _over_union(shared, _areas(*box), _areas(*boxes.T))


def matched(
    boxes: Floats, among: Floats, least: float = 0.5
) -> list[tuple[int, int, float]]:
    """Match boxes one-to-one with boxes of equal class, in descending order of scores.

    Args:
        boxes: boxes (n, 6) to match.
        among: boxes (m, 6) to match with.
        least: minimum overlap.

    Returns:
        For each match: its index in ``boxes``, its index in ``among``, and the overlap.
    """
    pairs: list[tuple[int, int, float]] = []
    free = np.ones(len(among), bool)
    for index, row in enumerate(boxes):
        # Boxes that are taken or of another class overlap by 0.
        overlap = overlaps(row[:4], among[:, :4]) * free * (among[:, 5] == row[5])
        if overlap.size and overlap.max() >= least:
            best = int(overlap.argmax())
            free[best] = False
            pairs.append((index, best, float(overlap[best])))
    return pairs


@dataclass(frozen=True)
class Matches:
    """Boxes of two models that were matched over all images.

    Attributes:
        count: boxes of the first model.
        shown: boxes of the second model.
        extra: boxes of the second model that the first one lacks.
        overlaps: intersection over union of each match.
        changes: change of the score of each match.
    """

    count: int
    shown: int
    extra: int
    overlaps: list[float]
    changes: list[float]

    @classmethod
    def of(cls, pairs: Sequence[tuple[Floats, Floats]]) -> Matches:
        """Match boxes of equal class and an overlap of at least 0.5.

        Args:
            pairs: for each image the boxes (n, 6) of both models, in falling order of scores.
        """
        least = SHOWN_SCORE
        if not any((before[:, 4] >= least).any() for before, _ in pairs):
            least = SHOWN.least_score
        count = extra = shown = 0
        overlaps: list[float] = []
        changes: list[float] = []
        for before, after in pairs:
            expected = before[before[:, 4] >= least]
            detected = after[after[:, 4] >= least]
            # a detection whose score passes the limit in one model alone is neither lost nor new
            loosely_detected = after[after[:, 4] >= least * SLACK]
            loosely_expected = before[before[:, 4] >= least * SLACK]
            count += len(expected)
            for i, j, overlap in matched(expected, loosely_detected):
                overlaps.append(overlap)
                changes.append(abs(expected[i, 4] - loosely_detected[j, 4]))
            shown += len(detected)
            # Precision from the other direction: shown boxes of the second model that the first
            # one lacks even below its limit.
            extra += len(detected) - len(matched(detected, loosely_expected))
        return cls(count, shown, extra, overlaps, changes)

    @property
    def f1(self) -> float:
        """Return the harmonic mean of recall and precision; 0 if both are 0."""
        recall = len(self.overlaps) / max(1, self.count)
        # Nothing shown: the precision counts as 0, and so does F1.
        precision = 1 - self.extra / self.shown if self.shown else 0.0
        if not recall + precision:
            return 0.0
        return 2 * recall * precision / (recall + precision)

    @property
    def overlap(self) -> float:
        """Return the mean overlap of the matches; 0 without any."""
        return float(np.mean(self.overlaps)) if self.overlaps else 0.0

    @property
    def change(self) -> float:
        """Return the mean change of the score of the matches; 0 without any."""
        return float(np.mean(self.changes)) if self.changes else 0.0

    @property
    def sentence(self) -> str:
        """Return the number of matches and of new boxes in words."""
        noun = "detection" if self.count == 1 else "detections"
        return (
            f"{len(self.overlaps)} of {self.count} {noun} found again (IoU 0.5, same class),"
            f" {self.extra} new"
        )
