"""Scoring on labelled data: names of samples, and positions of their boxes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from calibrators.readers.files import find_files
from calibrators.readers.images import IMAGE_SUFFIXES, ImageSpec
from calibrators.readers.open import CalibrationData
from quark_onnx.report.verdict import Scorer, read_labels

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
    images = data.keywords.get("images") if isinstance(data, partial) else None
    if (
        not isinstance(data, partial)
        or not isinstance(images, ImageSpec)
        or not data.args
    ):
        return Scorer(read_labels(Path(labels)), None, None)
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
    ratios = np.array([width / size[0], height / size[1]])
    if spec.resize == "letterbox":
        ratios[:] = ratios.min()
    elif spec.resize == "crop":
        target = spec.resize_to or 0
        ratios[:] = max(
            max(width, target) / size[0],
            max(height, target) / size[1],
        )
    margin = (np.array([width, height]) - ratios * size) / 2
    moved = boxes * np.tile(ratios, 2) + np.tile(margin, 2)
    return np.asarray(np.clip(moved, 0, np.tile([width, height], 2)))
