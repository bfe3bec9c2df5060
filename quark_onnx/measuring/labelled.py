"""Scoring on labelled data: names of samples, positions of their boxes, and the float model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from os import PathLike
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from calibrators.errors import nearest
from calibrators.readers.images import ImageSpec, class_folders, image_files
from calibrators.readers.open import CalibrationData, Reader
from quark_onnx.common.errors import ConfigError, data_errors
from quark_onnx.graph import Graph
from quark_onnx.measuring.open_data import first_sample, reader_for
from quark_onnx.preprocessing import Finding, PreprocessingCheck
from quark_onnx.report.verdict import Scorer, read_box_files, read_labels
from quark_onnx.report.verdict.labels import Labels, read_class_names
from quark_onnx.report.verdict.task import Task, find_task
from quark_onnx.running.run import Reference

Floats = NDArray[np.float64]


def scorer_for(
    labels: str | Path | None,
    data: CalibrationData | None,
    left_out: Collection[str] = (),
) -> Scorer | None:
    """Return a scorer for labels and data.

    Args:
        labels: a CSV or JSON file, see ``read_labels``; a folder of text files in YOLO's format; a
            text file with the names of class folders in the order of the model's classes; or None,
            where class folders stand in the order of the classes.
        data: as for ``compare``. Samples of image files are named like their files (with the folder
            of the class), other samples by their index.
        left_out: names of the images that the reader of the data has left out so far.

    Returns:
        The scorer; None without labels.

    Raises:
        DataError: the labels cannot be read.
        ConfigError: labels and data do not go together.
    """
    images = _images_of(data)
    folder = None if images is None else images[0]
    names = [] if folder is None else class_folders(folder)
    if labels is None and not names:
        return None
    if labels is None or Path(labels).suffix.lower() == ".txt":
        order = names if labels is None else read_class_names(Path(labels))
        return _folder_scorer(folder, names, order, labels, left_out)
    if images is None:
        return Scorer(_read(Path(labels), {}), None, None, left_out)
    samples = _sample_names(images[0])
    files = dict(zip(samples, image_files(images[0]), strict=True))
    return Scorer(
        _read(Path(labels), files),
        samples,
        partial(placed, images[1]),
        left_out,
    )


def _read(labels: Path, images: dict[str, Path]) -> Labels:
    """Return the labels in a file, or in a folder of text files for images.

    Raises:
        ConfigError: a folder is given, and the data has no images.
    """
    if not labels.is_dir():
        return read_labels(labels)
    if not images:
        raise ConfigError(
            f"labels {labels} are a folder, with a text file per image; the data must be a"
            " folder of images, read with --image-size"
        )
    return read_box_files(labels, images)


def found_scorer(reader: Reader) -> Scorer | None:
    """Return a scorer for integer labels that come with the data; None if there are none.

    Raises:
        DataError: the first sample does not fit the model.
    """
    first_sample(reader)
    if not reader.labelled:
        return None
    return scorer_of(reader.labels, reader.rows)


def scorer_of(labels: Mapping[str, int], rows: Mapping[int, range]) -> Scorer:
    """Return a scorer for labels that came with the data.

    Args:
        labels: classes of rows, by the index of the row as text; filled as samples are read.
        rows: as for ``Scorer``.
    """
    scorer = Scorer(Labels(Path("data"), labels, found=True), None, None)
    scorer.rows = rows
    return scorer


def has_class_folders(data: CalibrationData | None) -> bool:
    """Return whether data is a folder with a sub-folder of images for each class."""
    images = _images_of(data)
    return images is not None and bool(class_folders(images[0]))


def _images_of(data: CalibrationData | None) -> tuple[Path, ImageSpec] | None:
    """Return the path of image files, and how they are read; None for other data.

    Images in files arrive as a reader or as a partial of open_reader; arrays have no pixels to
    which boxes refer.
    """
    if isinstance(data, Reader):
        return data.images
    if not isinstance(data, partial) or not data.args:
        return None
    spec = data.keywords.get("images")
    if not isinstance(spec, ImageSpec):
        return None
    # Images in a data set have no files.
    if not isinstance(data.args[0], str | PathLike):
        return None
    folder = Path(data.args[0])
    return (folder, spec) if image_files(folder) else None


def _sample_names(folder: Path) -> list[str]:
    """Return the names of the samples, in the order in which open_reader finds the files."""
    files = image_files(folder)
    if not folder.is_dir():
        return [file.name for file in files]
    return [file.relative_to(folder).as_posix() for file in files]


def _folder_scorer(
    folder: Path | None,
    names: list[str],
    order: list[str],
    labels: str | Path | None,
    left_out: Collection[str],
) -> Scorer:
    """Return a scorer by class folders.

    Args:
        folder: the folder of the images; None for other data.
        names: names of the class folders.
        order: names of the classes 0, 1, 2, ...
        labels: the file of the names; None if the order is that of the folders.
        left_out: as for ``scorer_for``.

    Raises:
        ConfigError: the file has names of classes, and the data has no such folders.
    """
    if folder is None or not names:
        raise ConfigError(
            f"labels {labels} are names of classes, for images in folders that are called"
            " so; the data has no such folders",
        )
    index = {name: number for number, name in enumerate(order)}
    for name in names:
        if name not in index:
            raise ConfigError(
                f"labels {labels}: no class is called like the folder"
                f" {name!r}{nearest(name, order)}",
            )
    samples = _sample_names(folder)
    classes = {sample: index[sample.partition("/")[0]] for sample in samples}
    if labels is None:
        assumed = Labels(folder, classes, assumed=len(names))
        return Scorer(assumed, samples, None, left_out)
    return Scorer(Labels(Path(labels), classes), samples, None, left_out)


def placed(spec: ImageSpec, size: tuple[float, float], boxes: Floats) -> Floats:
    """Transform boxes of an image to the resized input, and clip them.

    Args:
        spec: conversion of the image to an input.
        size: (width, height) of the image.
        boxes: (n, 4): x1, y1, x2, y2 in pixels of the image.

    Returns:
        (n, 4): x1, y1, x2, y2 in pixels of the input.

    >>> square = np.array([[0., 0., 100., 50.]])
    >>> placed(ImageSpec(size=(64, 64), resize="letterbox"), (100, 50), square).tolist()
    [[0.0, 16.0, 64.0, 48.0]]
    >>> placed(ImageSpec(size=(64, 64), resize="corner"), (100, 50), square).tolist()
    [[0.0, 0.0, 64.0, 32.0]]
    """
    height, width = spec.size
    # (x, y) pairs from here on, whereas ImageSpec has (height, width).
    ratios = np.array([width / size[0], height / size[1]])
    if spec.resize in ("letterbox", "corner"):
        # One ratio for both axes: the picture fits into the input, and a margin fills the rest.
        ratios[:] = ratios.min()
    elif spec.resize == "crop":
        target = spec.resize_to or 0
        # One ratio for both axes: the picture covers the input, and what juts out is cut off.
        ratios[:] = max(max(width, target) / size[0], max(height, target) / size[1])
    # Half of what is left on each side; negative where the crop cuts something off.
    margin = (np.array([width, height]) - ratios * size) / 2
    if spec.resize == "corner":
        margin[:] = 0
    moved = boxes * np.tile(ratios, 2) + np.tile(margin, 2)
    return np.asarray(np.clip(moved, 0, np.tile([width, height], 2)))


def labelled_findings(
    reference: Reference,
    data: CalibrationData | None,
    labels: str | Path | None,
    asked: str = "auto",
) -> tuple[Finding, ...] | None:
    """Return signs of wrong preprocessing by the float model's top-1 on labelled samples.

    Args:
        reference: the float model.
        data: as for ``scorer_for``; it is read once.
        labels: as for ``scorer_for``.
        asked: a task in ``report.verdict.TASKS``, or ``auto``.

    Returns:
        The findings; None if labels of boxes, random samples, or folders that are no classes tell
        nothing.

    Raises:
        ConfigError: the data can be read only once, or the labels are for another task.
        DataError: the labels or the data cannot be read.
    """
    left_out = set[str]()
    # Before the data is opened: wrong labels cost no time.
    scorer = scorer_for(labels, data, left_out)
    assert scorer is not None  # there are labels
    if scorer.kind != "classifier":
        return None
    reader = reader_for(Graph.of(reference.model), data)
    scorer.rows = reader.rows
    if reader.random:
        return None
    if not reader.restartable:
        raise ConfigError(
            "labels need data that can be read twice; the data is a"
            f" {type(data).__name__}, which can be read once: pass a list, a folder, or a"
            " DataLoader",
        )
    check = PreprocessingCheck(reference.model, asked)
    task: Task | None = None
    with data_errors():
        for feeds in reader:
            left_out |= set(reader.left_out)
            outputs = reference.outputs_once(feeds)
            # The outputs of the first sample decide the task.
            task = task or find_task(reference.model, feeds, outputs, asked)
            # The float model takes the place of the quantized one: only its top-1 matters here.
            check.add(feeds, outputs, scorer.add(task, outputs, outputs, feeds))
            if check.is_full:
                break
    if not scorer.count:
        return None
    return tuple(check.findings(reference.session))
