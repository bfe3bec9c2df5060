"""Labels of samples, and two models' scores: top-1 and top-5, or COCO-style mAP."""

from __future__ import annotations

import csv
import io
import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise, starmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibrators.json_file import Entry, read_document, read_json
from calibrators.readers.encoded import encoded_size
from calibrators.readers.samples import sample_name
from calibrators.shown import short
from quark_onnx.common.errors import ConfigError, DataError
from quark_onnx.common.wording import counted
from quark_onnx.report.figures import percent
from quark_onnx.report.verdict.boxes import RANKED, detections, overlaps
from quark_onnx.report.verdict.task import Task, squeezed

logger = logging.getLogger(__name__)

Outputs = Mapping[str, NDArray[Any]]
Floats = NDArray[np.float64]
#: A function of (width, height) of an image and boxes x1, y1, x2, y2 in pixels of the image;
#: returns boxes in pixels of the input.
Placement = Callable[[tuple[float, float], Floats], Floats]

#: COCO's overlaps and recalls for the average precision.
#: 0.50, 0.55, ..., 0.95 and 0.00, 0.01, ..., 1.00.
_OVERLAPS = np.arange(0.5, 1.0, 0.05)
_RECALLS = np.linspace(0, 1, 101)
#: Share of an image by which a rounded box may stand out.
_OUTSIDE = 0.01
#: Metrics in words.
_METRICS = {
    "top1": "top-1",
    "top5": "top-5",
    "map": "mAP (IoU 0.5 to 0.95)",
    "map50": "mAP (IoU 0.5)",
}


@dataclass(frozen=True)
class Score:
    """A metric of the two models, as a share.

    Attributes:
        name: ``top1``, ``top5`` (of scores, not of chosen classes), ``map`` (IoU 0.5 to 0.95) or
            ``map50``.
        reference: value of the float model.
        other: value of the quantized model.
    """

    name: str
    reference: float
    other: float

    @property
    def title(self) -> str:
        """Return the metric in words."""
        return _METRICS[self.name]

    def __str__(self) -> str:
        values = f"float {percent(self.reference)} %, quantized {percent(self.other)} %"
        return f"{self.title}: {values}"


def score_lines(
    scores: Sequence[Score], labelled: int, sample: str = "labelled sample"
) -> list[str]:
    """Return scores in words, with the number of labelled samples.

    Args:
        scores: the scores.
        labelled: the number of labelled samples.
        sample: the word for a sample.
    """
    return [f"{score}, on {counted(labelled, sample)}" for score in scores]


@dataclass(frozen=True)
class _Image:
    size: tuple[float, float]
    boxes: Floats  # (n, 5): x1, y1, x2, y2, class


@dataclass(frozen=True)
class Labels:
    """Labels by sample name: classes, or boxes.

    Attributes:
        source: the file.
        classes: class of each sample.
        images: boxes of each image.
        assumed: number of folders whose order was taken for that of the model's classes, so that
            the labels count only if the model has as many; 0 for given labels.
        found: the labels came with the samples, so that they count only if they can be classes of
            the model; ``classes`` is filled as samples are read.
    """

    source: Path
    classes: Mapping[str, int] = field(default_factory=dict)
    images: Mapping[str, _Image] = field(default_factory=dict)
    assumed: int = 0
    found: bool = False

    @property
    def kind(self) -> str:
        """Return the task of the labels."""
        return "detector" if self.images else "classifier"

    @property
    def names(self) -> list[str]:
        """Return the names of labelled samples."""
        return [*self.images, *self.classes]


def read_labels(path: Path) -> Labels:
    """Read labels: a CSV file with the columns name and label, or a JSON file of COCO.

    Args:
        path: ``*.csv``: one row per sample, the label is the index of the class. ``*.json``:
            the keys ``images`` (``id``, ``file_name``, ``width``, ``height``), ``annotations``
            (``image_id``, ``category_id``, ``bbox`` as x, y, width, height) and ``categories``
            (``id``), whose sorted identifiers are the classes 0, 1, 2, ...

    Raises:
        DataError: the file cannot be read, or an entry is missing or not a number.
    """
    if path.suffix.lower() == ".json":
        remedy = "see docs/accuracy.md for COCO's format"
        document = read_json(path, "labels", DataError, remedy)
        labels = Labels(path, images=_coco_images(document))
    else:
        labels = _csv(path, read_document(path, "labels", DataError))
    if not labels.names:
        raise DataError(f"labels {path}: there is no label in it")
    return labels


def read_box_files(folder: Path, images: Mapping[str, Path]) -> Labels:
    """Read labels in YOLO's format: a text file per image, a line per object.

    A line has the class and the centre, width and height of a box as shares of the image's sides;
    or the class and the corners (x, y) of a polygon, of which the box around it counts.

    Args:
        folder: files that are called like the images, with the suffix .txt. An image without a file
            has no object.
        images: the image files, by the name of the sample.

    Raises:
        DataError: no image has a file, a file cannot be read, or a line is malformed.
    """
    found = dict[str, _Image]()
    for name, file in images.items():
        labels = folder / Path(name).with_suffix(".txt")
        boxes = list[list[float]]()
        if labels.is_file():
            text = read_document(labels, "labels", DataError)
            for number, line in enumerate(text.splitlines(), 1):
                if line.strip():
                    boxes.append(_shares(line, f"labels {labels}, line {number}"))
        try:
            size = encoded_size(file.read_bytes(), file)
        # A damaged image, which the reader leaves out.
        except (OSError, ValueError):
            continue
        rows = np.array(boxes, np.float64).reshape(-1, 5)
        rows[:, :4] *= np.tile(size, 2)
        found[name] = _Image(size, rows)
    if not any(len(image.boxes) for image in found.values()):
        name = next(iter(images), "a.jpg")
        hint = f"files are called like the images, such as {Path(name).with_suffix('.txt')}"
        if "/" in name and (folder / name).is_file():
            hint = "if its sub-folders are the classes, leave out the labels: they are known"
        raise DataError(f"labels {folder}: no text file in it labels an image; {hint}")
    return Labels(folder, images=found)


def _shares(line: str, place: str) -> list[float]:
    """Return x1, y1, x2, y2 as shares of the image, and the class, of a line of YOLO's format.

    Args:
        place: names file and line in messages.
    """
    try:
        kind, *numbers = map(float, line.split())
    except ValueError:
        raise DataError(
            f"{place}: {short(line)} has a text that is no number"
        ) from None
    # Neither NaN nor infinity is an integer.
    if not kind.is_integer() or kind < 0 or len(numbers) % 2 or len(numbers) < 4:
        raise DataError(
            f"{place}: {short(line)} is not a class and four numbers: centre x, centre y, width,"
            " height"
        )
    if len(numbers) == 4:
        x, y, width, height = numbers
        corners = [x - width / 2, y - height / 2, x + width / 2, y + height / 2]
    else:
        xs, ys = numbers[::2], numbers[1::2]
        corners = [min(xs), min(ys), max(xs), max(ys)]
    if not all(-_OUTSIDE <= value <= 1 + _OUTSIDE for value in corners):
        raise DataError(
            f"{place}: {short(line)} is outside of the image; numbers are shares of its width and"
            " height, from 0 to 1"
        )
    return [*corners, kind]


def read_class_names(path: Path) -> list[str]:
    """Read names of classes, one per line, in the order of the model's classes.

    Raises:
        DataError: the file cannot be read, is empty, or has a name twice.
    """
    lines = read_document(path, "labels", DataError).split("\n")
    names = [line.strip() for line in lines]
    while names and not names[-1]:
        names.pop()
    if not names:
        raise DataError(f"labels {path}: there is no name of a class in it")
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise DataError(f"labels {path}: the class {repeated[0]!r} is there twice")
    return names


def _csv(path: Path, text: str) -> Labels:
    """Return the classes of a CSV file with the columns name (or file) and label.

    Args:
        path: path of the file, for messages.

    Raises:
        DataError: a column is missing, a label is no integer, or a sample has two labels.
    """
    # The reader ends lines itself: a quoted name may contain an end of line.
    rows = csv.DictReader(io.StringIO(text, newline=""))
    try:
        columns = rows.fieldnames or []
    except csv.Error as error:
        raise DataError(f"labels {path}, line 1: {error}") from error
    name = next((column for column in columns if column in ("name", "file")), None)
    if name is None or "label" not in columns:
        raise DataError(
            f"labels {path}: the columns are {', '.join(map(short, columns[:8])) or 'none'};"
            " they must be name and label",
        )
    classes = dict[str, int]()
    try:
        # Line 1 has the names of the columns.
        for number, row in enumerate(rows, 2):
            try:
                label = int(row["label"])
            except (TypeError, ValueError):
                raise DataError(
                    f"labels {path}, line {number}: label {short(row['label'])} is not the"
                    " index of a class, counted from 0 in the model's order",
                ) from None
            if classes.setdefault(row[name], label) != label:
                raise DataError(
                    f"labels {path}, line {number}: {short(row[name])} has the label"
                    f" {label}, and {classes[row[name]]} in an earlier line",
                )
    # A null character, or a quotation mark without its end.
    except csv.Error as error:
        raise DataError(f"labels {path}, line {rows.line_num}: {error}") from error
    return Labels(path, classes=classes)


def _coco_images(document: Entry) -> dict[str, _Image]:
    """Return the images of a document in COCO's format by file name.

    Args:
        document: the content of the file.

    Returns:
        For each image, the size (width, height) in pixels and the boxes (n, 5): x1, y1, x2, y2 and
            class. Classes are counted from 0 in the order of category identifiers.

    Raises:
        DataError: the document is not in COCO's format.
    """
    # COCO's 80 identifiers reach up to 90, with gaps; models number classes without gaps.
    identifiers = {
        _whole(category["id"]) for category in document["categories"].array()
    }
    classes = {
        identifier: index for index, identifier in enumerate(sorted(identifiers))
    }
    boxes = dict[Any, list[list[float]]]()
    for annotation in document["annotations"].array():
        # A crowd is one box around many objects, which no detection matches.
        crowd = annotation.get("iscrowd")
        if crowd is None or not crowd.value:
            image_id = _identifier(annotation["image_id"])
            boxes.setdefault(image_id, []).append(_box(annotation, classes))
    images = dict[str, _Image]()
    for image in document["images"].array():
        size = (_pixels(image["width"]), _pixels(image["height"]))
        # An image without annotations counts: its detections are all wrong. Shape (0, 5).
        rows = np.array(boxes.get(_identifier(image["id"]), []), np.float64)
        images[image["file_name"].text()] = _Image(size, rows.reshape(-1, 5))
    return images


def _identifier(entry: Entry) -> float | str:
    """Return an identifier of an image: a number, or a text in other tools' files."""
    if isinstance(entry.value, str):
        return entry.value
    return entry.number()


def _whole(entry: Entry) -> int:
    """Return an identifier of a category, which other tools write as a text or as 1.0."""
    text = str(entry.value).removesuffix(".0")
    if isinstance(entry.value, bool) or not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise entry.wrong("a whole number")
    return int(text)


def _pixels(entry: Entry) -> float:
    number = entry.number()
    if number <= 0:
        raise entry.wrong("a number of pixels above 0")
    return number


def _box(annotation: Entry, classes: Mapping[int, int]) -> list[float]:
    """Return x1, y1, x2, y2 and the class of an annotation.

    Args:
        annotation: an annotation of COCO.
        classes: class by the identifier of a category.
    """
    numbers = [value.number() for value in annotation["bbox"].array()]
    if len(numbers) != 4:
        raise annotation["bbox"].wrong("four numbers: x, y, width, height")
    x, y, width, height = numbers
    category = annotation["category_id"]
    if _whole(category) not in classes:
        raise category.wrong("the id of one of the categories")
    return [x, y, x + width, y + height, classes[_whole(category)]]


class Scorer:
    """A scorer of two models on labelled samples.

    Attributes:
        rows: rows of each sample in the data, by its index; filled as samples are read. None where
            they are not known.
    """

    rows: Mapping[int, range] | None = None

    def __init__(
        self,
        labels: Labels,
        names: Sequence[str] | None,
        placement: Placement | None,
        left_out: Collection[str] = (),
    ) -> None:
        """Start without samples.

        Args:
            labels: labels of the samples.
            names: names of the samples in their order; None for indices 0, 1, 2, ...
            placement: position of an image's boxes in the model's input.
            left_out: names of samples that the reader has left out so far.

        Raises:
            ConfigError: boxes are given without image files.
            DataError: no sample can have a label.
        """
        # Boxes are in pixels of the image file; only the reader of images knows the resizing and
        # padding.
        if labels.images and (names is None or placement is None):
            raise ConfigError(
                f"labels {labels.source} are boxes of image files; the data must be a"
                " folder of images, read with --image-size",
            )
        self._labels, self._names, self._placement = labels, names, placement
        self._left_out = left_out
        # Before any model runs, and before a result is written. Arrays are named by index, and so
        # may files be, in their order.
        known = [] if names is None else names
        is_named = not set(known).isdisjoint(labels.names)
        by_index = any(map(str.isdecimal, labels.names))
        if not (labels.found or is_named or by_index):
            raise self._nothing_labelled()
        self._is_named = is_named
        # Index of the next row, of those left out as well, and of the next sample.
        self._index = self._sample = 0
        # Why the folders are not the classes of this model; None if they are.
        self._no_classes: str | None = None
        # Ranks of the label in the float and in the quantized model, for each row.
        self._ranks: list[tuple[int, int]] = []
        # Numbers of classes among which the label counts: top-1 and top-5.
        self._depths: tuple[int, ...] = (1, 5)
        # For each image: true boxes (n, 5), and detections (n, 6) of both models.
        self._found: list[tuple[Floats, Floats, Floats]] = []

    @property
    def kind(self) -> str:
        """Return the task of the labels."""
        return self._labels.kind

    def only(
        self, rows: Sequence[range], left_out: Collection[str] = ()
    ) -> Scorer | None:
        """Return a scorer of some of the samples; None if none of them has a label.

        Args:
            rows: the rows of each of these samples in the data.
            left_out: names of samples that the reader has left out of the data.
        """
        self._left_out = left_out
        names = [self._name() for _ in range(max(chosen.stop for chosen in rows))]
        chosen_names = [names[row] for chosen in rows for row in chosen]
        if set(chosen_names).isdisjoint(self._labels.names):
            return None
        if self._labels.images:
            return Scorer(self._labels, chosen_names, self._placement)
        classes = {
            str(row): self._labels.classes[name]
            for row, name in enumerate(chosen_names)
            if name in self._labels.classes
        }
        scorer = Scorer(replace(self._labels, classes=classes), None, None)
        ends = [*accumulate(map(len, rows), initial=0)]
        scorer.rows = dict(enumerate(starmap(range, pairwise(ends))))
        return scorer

    def add(
        self,
        task: Task,
        expected: Outputs,
        actual: Outputs,
        feeds: Outputs | None = None,
    ) -> list[int | None]:
        """Add the outputs of the two models on the next sample.

        Args:
            task: the task, whose output holds the scores.
            expected: outputs of the float model by name.
            actual: outputs of the quantized model by name.
            feeds: the sample; None if it is not known.

        Returns:
            The class of each row, None for a row without a label; empty for boxes.

        Raises:
            ConfigError: the labels are for another task, or for samples of which the output has
                other numbers of rows.
            DataError: the model has no class with the index of a label.
        """
        sample = self._sample
        self._sample += 1
        if self._labels.assumed and not self._are_classes(task, expected):
            return []
        if self._labels.found and task.name != self._labels.kind:
            self._no_classes = (
                f"labels of the data are no classes: the task is {task.name}"
            )
            return []
        undecoded = self._labels.kind == "detector" and task.layout is None
        if task.name != self._labels.kind or undecoded:
            raise ConfigError(
                f"labels {self._labels.source} are for a {self._labels.kind}, and the"
                f" outputs are those of: {task.name}; say --task {self._labels.kind} if"
                " they are read wrongly",
            )
        if task.layout is not None:
            self._add_boxes(task, expected, actual)
            return []
        before, after = _rows(expected[task.output]), _rows(actual[task.output])
        if problem := self._other_rows(task, len(before), sample, feeds or {}):
            if not (self._labels.found or self._labels.assumed):
                raise ConfigError(f"labels {self._labels.source} {problem}")
            self._no_classes = f"labels of the data {problem}"
            return []
        labels = self._add_classes(before, after)
        return labels if self._no_classes is None else []

    def _other_rows(self, task: Task, rows: int, sample: int, feeds: Outputs) -> str:
        """Return why the rows of the output are not those of the sample; empty if they are."""
        if self.rows is None or sample not in self.rows:
            return ""
        counts = {len(self.rows[sample])}
        # Rows of a batch are not counted where the lengths of the inputs differ.
        if not (self._labels.found or self._is_named):
            counts |= {np.shape(value)[0] for value in feeds.values() if np.ndim(value)}
        if rows in counts:
            return ""
        return (
            f"are for samples, and output {task.output!r} has {counted(rows, 'row')} for"
            f" {counted(max(counts), 'sample')}: compare the model without labels"
        )

    def _are_classes(self, task: Task, expected: Outputs) -> bool:
        """Return whether folders can be the classes of the model."""
        folders = f"{self._labels.assumed} folders in {self._labels.source}"
        if task.name != "classifier":
            self._no_classes = f"{folders} are no labels: the task is {task.name}"
            return False
        scores = _rows(expected[task.output])
        # Where the model returns classes, their number is not known.
        if scores.ndim == 2 and scores.shape[1] != self._labels.assumed:
            self._no_classes = (
                f"{folders}, and the model has {scores.shape[1]} classes: for top-1 give"
                " the names of all classes in the model's order, one a line, --labels NAMES.txt"
            )
            return False
        return True

    def _name(self) -> str:
        """Return the name of the next sample; empty for more samples than names."""
        if self._names is None:
            while sample_name(self._index) in self._left_out:
                self._index += 1
            self._index += 1
            return str(self._index - 1)
        # A reader may be ahead: it has left out all that comes before the next sample, and more.
        while (
            self._index < len(self._names)
            and self._names[self._index] in self._left_out
        ):
            self._index += 1
        index = self._index
        self._index += 1
        if index >= len(self._names):  # rows beyond the names have no label
            return ""
        return self._names[index] if self._is_named else str(index)

    def _add_classes(
        self, before: NDArray[Any], after: NDArray[Any]
    ) -> list[int | None]:
        """Add the ranks of the labels of a sample's rows; return the labels.

        Args:
            before: scores of the float model (rows, classes), or chosen classes (rows,).
            after: those of the quantized model.

        Raises:
            DataError: the model has no class with the index of a label.
        """
        # Rows of chosen classes have one axis, rows of scores two.
        if before.ndim == 1:
            self._depths = (1,)
        labels: list[int | None] = []
        for before_row, after_row in zip(before, after, strict=True):
            # One name for each row: the rows of a batch are samples.
            name = self._name()
            label = self._labels.classes.get(name)
            labels.append(label)
            if label is not None:
                # A model that returns classes does not tell how many there are.
                if before.ndim == 2 and not 0 <= label < before.shape[1]:
                    if self._labels.found:
                        self._no_classes = (
                            f"labels of the data are no classes: {label} is one, and the model"
                            f" has {before.shape[1]} classes, counted from 0"
                        )
                        continue
                    raise DataError(
                        f"labels {self._labels.source}: {short(name)} has the label {label},"
                        f" and the model has {before.shape[1]} classes, counted from 0",
                    )
                self._ranks.append((_rank(before_row, label), _rank(after_row, label)))
        return labels

    def _add_boxes(self, task: Task, expected: Outputs, actual: Outputs) -> None:
        """Add the boxes of a sample's images, of the labels and of both models.

        Args:
            task: the task, with the layout of the boxes.
            expected: outputs of the float model by name.
            actual: outputs of the quantized model by name.
        """
        assert task.layout is not None and self._placement is not None
        before = detections(task.layout, expected, RANKED)
        after = detections(task.layout, actual, RANKED)
        for before_boxes, after_boxes in zip(before, after, strict=True):
            image = self._labels.images.get(self._name())
            if image is None:
                continue
            # Into pixels of the model's input, in which detections() returns boxes.
            truth = image.boxes.copy()
            truth[:, :4] = self._placement(image.size, truth[:, :4])
            self._found.append((truth, before_boxes, after_boxes))

    def _nothing_labelled(self) -> DataError:
        shown = self._names[0] if self._names else "0"
        return DataError(
            f"labels {self._labels.source}: no sample has a label; samples are named like"
            f" {shown!r}, labels like {self._labels.names[0]!r}",
        )

    @property
    def count(self) -> int:
        """Return the number of labelled samples."""
        if self._no_classes is not None:
            return 0
        return len(self._found) or len(self._ranks)

    def scores(self) -> list[Score]:
        """Return the metrics of the two models; none for folders that are not the model's classes.

        Raises:
            DataError: no sample has a label.
        """
        if self._no_classes is not None:
            logger.warning("%s", self._no_classes)
            return []
        if not self.count and self._labels.found:
            return []
        if not self.count:
            raise self._nothing_labelled()
        if self._ranks:
            ranks = np.array(self._ranks)
            return [
                # ranks: (rows, 2), the number of classes before the label.
                Score(f"top{k}", *map(float, (ranks < k).mean(axis=0)))
                for k in self._depths
            ]
        truths, before, after = zip(*self._found, strict=True)
        reference, reference_at_50 = mean_average_precision(truths, before)
        other, other_at_50 = mean_average_precision(truths, after)
        return [
            Score("map", reference, other),
            Score("map50", reference_at_50, other_at_50),
        ]


def _rows(value: NDArray[Any]) -> NDArray[Any]:
    """Return scores (rows, classes); or classes (rows,) where the model has chosen them."""
    if value.dtype.kind in "iu":
        return value.reshape(-1)
    shape = squeezed(value)
    return value.reshape(-1, shape[-1])


def _rank(row: Any, label: int) -> int:
    """Return the number of classes that are chosen before the label.

    Of equal scores the first class is chosen, as by argmax: scores of few bits are often equal.
    Unknown labels, and labels whose score is NaN, rank after every class.

    Args:
        row: scores, (classes,); or a chosen class, behind which the order is not known.
        label: index of the true class.
    """
    scores = np.asarray(row)
    if scores.ndim == 0:
        return int(scores != label)
    # NaN compares false with every score, and would rank first.
    if not 0 <= label < len(scores) or np.isnan(scores[label]):
        # Beyond top-5 even for a model of few classes.
        return len(scores) + 5
    greater = scores > scores[label]
    equal = scores[:label] == scores[label]
    return int(greater.sum()) + int(equal.sum())


def mean_average_precision(
    truths: Sequence[Floats],
    detected: Sequence[Floats],
) -> tuple[float, float]:
    """Return COCO's mAP at IoU 0.5 to 0.95, and at 0.5, without crowds and areas.

    Args:
        truths: for each image (n, 5): x1, y1, x2, y2, class.
        detected: for each image (n, 6): x1, y1, x2, y2, score, class.
    """
    # Classes with a true box; COCO's evaluation leaves out the others.
    labels = set[float]()
    for truth in truths:
        labels.update(map(float, truth[:, 4]))
    if not labels:
        return 0.0, 0.0
    # Shape (classes, overlaps); the first overlap is 0.5.
    table = np.zeros((len(labels), len(_OVERLAPS)))
    for row, label in enumerate(sorted(labels)):
        for column, least in enumerate(_OVERLAPS):
            table[row, column] = _average_precision(truths, detected, label, least)
    return float(table.mean()), float(table[:, 0].mean())


def _average_precision(
    truths: Sequence[Floats],
    detected: Sequence[Floats],
    label: float,
    least: float,
) -> float:
    """Return the average precision of a class: the maximum precision at 101 recalls.

    Args:
        truths: for each image (n, 5): x1, y1, x2, y2, class.
        detected: for each image (n, 6): x1, y1, x2, y2, score, class.
        label: the class, for which there is at least one true box.
        least: minimum overlap (IoU) of a right detection.
    """
    right = [truth[truth[:, 4] == label][:, :4] for truth in truths]
    # All detections of the class, over all images, by falling score.
    ranked: list[tuple[float, int, Floats]] = []
    for image, rows in enumerate(detected):
        ranked += [(-row[4], image, row[:4]) for row in rows[rows[:, 5] == label]]
    # Without the box, which numpy cannot order.
    ranked.sort(key=lambda each: each[:2])
    free = [np.ones(len(boxes), bool) for boxes in right]
    hits = np.zeros(len(ranked))
    for rank, (_, image, box) in enumerate(ranked):
        # Each true box is found once; a second detection of it is wrong.
        overlap = overlaps(box, right[image]) * free[image]
        if overlap.size and overlap.max() >= least:
            free[image][overlap.argmax()] = False
            hits[rank] = 1
    # The denominator is above 0: labels come from true boxes.
    recall = hits.cumsum() / sum(map(len, right))
    precision = hits.cumsum() / np.arange(1, len(hits) + 1)
    # The envelope: the greatest precision at this recall or a higher one.
    best = np.maximum.accumulate(precision[::-1])[::-1]
    # The tolerance keeps a recall such as 0.07, a rounded quotient, at its own threshold.
    places = np.searchsorted(recall, _RECALLS - 1e-12)
    # Recalls that are never reached have a precision of 0.
    reached = np.append(best, 0.0)
    return float(reached[np.minimum(places, len(best))].mean())
