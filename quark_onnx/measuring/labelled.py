"""Scoring on labelled data: names of samples, positions of their boxes, and the float model."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from calibrators.readers.files import find_files
from calibrators.readers.images import IMAGE_SUFFIXES, ImageSpec
from calibrators.readers.open import CalibrationData
from quark_onnx.common.errors import ConfigError, data_errors
from quark_onnx.graph import Graph
from quark_onnx.measuring.open_data import reader_for
from quark_onnx.preprocessing import Finding, PreprocessingCheck
from quark_onnx.report.verdict import Scorer, read_labels
from quark_onnx.report.verdict.task import Task, find_task
from quark_onnx.running.run import Reference

Floats = NDArray[np.float64]


def scorer_for(labels: str | Path, data: CalibrationData | None) -> Scorer:
    """Return a scorer for labels and data.

    Args:
        labels: a CSV or JSON file, see ``read_labels``.
        data: as for ``compare``. Samples of image files are named like their files, other samples
            by their index.

    Returns:
        The scorer.

    Raises:
        DataError: the labels cannot be read.
        ConfigError: labels and data do not go together.
    """
    # Images in files arrive as a partial of open_reader; arrays have no pixels to which boxes
    # refer.
    images = data.keywords.get("images") if isinstance(data, partial) else None
    if (
        not isinstance(data, partial)
        or not isinstance(images, ImageSpec)
        or not data.args
    ):
        return Scorer(read_labels(Path(labels)), None, None)
    # open_reader finds the files by the same call: names and samples have the same order.
    files = find_files(Path(data.args[0]), IMAGE_SUFFIXES)
    return Scorer(
        read_labels(Path(labels)),
        [file.name for file in files],
        partial(placed, images),
    )


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
    """
    height, width = spec.size
    # (x, y) pairs from here on, whereas ImageSpec has (height, width).
    ratios = np.array([width / size[0], height / size[1]])
    if spec.resize == "letterbox":
        # One ratio for both axes: the picture fits into the input, and a margin fills the rest.
        ratios[:] = ratios.min()
    elif spec.resize == "crop":
        target = spec.resize_to or 0
        # One ratio for both axes: the picture covers the input, and what juts out is cut off.
        ratios[:] = max(max(width, target) / size[0], max(height, target) / size[1])
    # Half of what is left on each side; negative where the crop cuts something off.
    margin = (np.array([width, height]) - ratios * size) / 2
    moved = boxes * np.tile(ratios, 2) + np.tile(margin, 2)
    return np.asarray(np.clip(moved, 0, np.tile([width, height], 2)))


def labelled_findings(
    reference: Reference,
    data: CalibrationData | None,
    labels: str | Path,
    asked: str = "auto",
) -> tuple[Finding, ...] | None:
    """Return signs of wrong preprocessing by the float model's top-1 on labelled samples.

    Args:
        reference: the float model.
        data: as for ``scorer_for``; it is read once.
        labels: as for ``scorer_for``.
        asked: a task in ``report.verdict.TASKS``, or ``auto``.

    Returns:
        The findings; None if labels of boxes or random samples tell nothing.

    Raises:
        ConfigError: the data can be read only once, or the labels are for another task.
        DataError: the labels or the data cannot be read.
    """
    scorer = scorer_for(labels, data)
    if scorer.kind != "classifier":
        return None
    reader = reader_for(Graph.of(reference.model), data)
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
            outputs = reference.outputs_once(feeds)
            # The outputs of the first sample decide the task.
            task = task or find_task(reference.model, feeds, outputs, asked)
            # The float model takes the place of the quantized one: only its top-1 matters here.
            check.add(feeds, outputs, scorer.add(task, outputs, outputs))
            if check.is_full:
                break
    return tuple(check.findings(reference.session))
