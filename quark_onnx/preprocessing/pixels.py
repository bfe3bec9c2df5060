"""Common scalings of pixels, and properties of natural images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Images = NDArray[Any]

#: Channels of pictures.
_CHANNELS = (1, 3)
#: Maximum deviation of a channel's range from a scaling's range, as a share of it.
_UNLIKE = 0.3
#: Value of white, and deviation from the pixels' range within which a scaling holds pictures:
#: interpolation exceeds it a little.
_WHITE, _BEYOND = 255.0, 8.0
#: Mean distance of consecutive pictures below which they show one thing.
_ALIKE = 0.5
#: Minimum correlation of neighbouring pixels of a natural image.
_SMOOTH = 0.5
#: Correlation below which channels are those of no picture.
_UNRELATED = 0.7
#: Correlation by which the rows of pictures are more alike in another layout (minimum).
_SMOOTHER = 0.3
#: Standard deviation of a channel, as a share of its mean, below which pictures are faint.
_FAINT = 0.02
#: Minimum side in pixels of an image with meaningful smoothness.
_LEAST_SIDE = 16


@dataclass(frozen=True)
class Scaling:
    """A map from pixels, 0 to 255, to inputs.

    Inputs are ``(pixel * scale - mean) / std`` by channel.

    Attributes:
        name: name for messages.
        options: command-line options for the scaling.
        scale: factor of pixels.
        mean: mean per channel.
        std: standard deviation per channel.
        color: the order of channels that models with the scaling usually expect, as in
            ``--color``; empty if it tells nothing about the order.
    """

    name: str
    options: str
    scale: float
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    color: str = ""

    def of_pixels(self, pixels: Images) -> Images:
        """Return inputs, channels on axis 1.

        Args:
            pixels: (batch, channels, height, width) from 0 to 255, with one channel or three.
        """
        mean, std = _column(self.mean, pixels), _column(self.std, pixels)
        return (pixels * self.scale - mean) / std

    def pixels(self, inputs: Images) -> Images:
        """Return the pixels of inputs, channels on axis 1.

        Args:
            inputs: (batch, channels, height, width), with one channel or three.
        """
        mean, std = _column(self.mean, inputs), _column(self.std, inputs)
        return (inputs * std + mean) / self.scale


def _column(values: Sequence[float], like: Images) -> NDArray[np.float64]:
    """Return values per channel as (1, channels, 1, 1), to broadcast against pictures."""
    # A picture in gray takes the first of three values.
    return np.asarray(values[: like.shape[1]], np.float64).reshape(1, -1, 1, 1)


#: Scalings of training pipelines, the most common first.
SCALINGS = (
    Scaling("pixels from 0 to 1", "--scale 1/255", 1 / 255),
    Scaling(
        "ImageNet's mean and standard deviation",
        "--mean 0.485 0.456 0.406 --std 0.229 0.224 0.225",
        1 / 255,
        (0.485, 0.456, 0.406),
        (0.229, 0.224, 0.225),
    ),
    Scaling(
        "pixels from -1 to 1",
        "--mean 0.5 0.5 0.5 --std 0.5 0.5 0.5",
        1 / 255,
        (0.5, 0.5, 0.5),
        (0.5, 0.5, 0.5),
    ),
    Scaling("pixels from 0 to 255", "--scale 1", 1.0),
    Scaling(
        "pixels from 0 to 255 less Caffe's mean",
        "--scale 1 --mean 103.939 116.779 123.68",
        1.0,
        (103.939, 116.779, 123.68),
        color="bgr",
    ),
)


def picture_axis(shape: tuple[int, ...]) -> int | None:
    """Return the channel axis of a batch of pictures, or None.

    Args:
        shape: shape of an input.

    Returns:
        1 for (batch, channels, height, width) and 3 for (batch, height, width, channels), with one
        channel or three and at least 16 pixels a side; None for any other shape.
    """
    if len(shape) != 4:
        return None
    if shape[1] in _CHANNELS and min(shape[2:]) >= _LEAST_SIDE:
        return 1
    # Channels first is tried first: (1, 3, 224, 3) would fit both.
    if shape[3] in _CHANNELS and min(shape[1:3]) >= _LEAST_SIDE:
        return 3
    return None


def scaling_of(images: Sequence[Images]) -> Scaling | None:
    """Return the scaling for the ranges of the channels; None without a fit.

    Pictures nearly reach black and white, so that their range tells the scaling. Dark, bright and
    faint ones do not: theirs is the scaling that holds them, and in which they reach farthest.

    Args:
        images: batches with the channels on axis 1.
    """
    # (1, channels, 1, 1) over all batches.
    least = np.min([batch.min(axis=(0, 2, 3)) for batch in images], axis=0)
    greatest = np.max([batch.max(axis=(0, 2, 3)) for batch in images], axis=0)
    least, greatest = least.reshape(1, -1, 1, 1), greatest.reshape(1, -1, 1, 1)
    errors = []
    reach = []
    for scaling in SCALINGS:
        dark, bright = scaling.pixels(least), scaling.pixels(greatest)
        errors.append(np.maximum(np.abs(dark), np.abs(bright - _WHITE)).max() / _WHITE)
        holds = dark.min() >= -_BEYOND and bright.max() <= _WHITE + _BEYOND
        # Rounded, so that the first of equal ones is taken.
        reach.append(round(float((bright - dark).max()), 3) if holds else 0.0)
    if min(errors) <= _UNLIKE:
        return SCALINGS[int(np.argmin(errors))]
    return SCALINGS[int(np.argmax(reach))] if any(reach) else None


def are_alike(images: Sequence[Images]) -> bool:
    """Return whether pictures show one thing, as frames of a film do.

    What a model finds in them is one observation, not many.

    Args:
        images: batches with the channels on axis 1, in the order of the samples.
    """
    rows = [row.astype(np.float64).ravel() for batch in images for row in batch]
    if len(rows) < 2 or len({row.size for row in rows}) > 1:
        return False
    spreads = [row.std() for row in rows]
    distances = []
    for (row, following), two in zip(pairwise(rows), pairwise(spreads), strict=True):
        # The distance of unrelated pictures is 1; those of one value are all alike.
        spread = np.hypot(*two)
        distances.append((row - following).std() / spread if spread else 0.0)
    return bool(np.mean(distances) < _ALIKE)


def are_faint(images: Sequence[Images]) -> bool:
    """Return whether pictures hardly differ from one value per channel.

    So they are if mean and standard deviation in units of 0 to 255 are applied to pixels from 0 to
    1.

    Args:
        images: batches with the channels on axis 1.
    """
    # (batches, channels) each: as many values of every picture count.
    means = np.array([batch.mean((0, 2, 3), np.float64) for batch in images])
    spreads = np.array([batch.std((0, 2, 3), np.float64) for batch in images])
    spread = np.hypot(np.sqrt(np.square(spreads).mean(0)), means.std(0))
    return bool((spread < _FAINT * np.abs(means.mean(0))).all())


@dataclass(frozen=True)
class Smoothness:
    """The correlation of a pixel with its neighbours, and with its other channels.

    Attributes:
        across: with the next pixel in its row.
        down: with the pixel below.
        channels: with the same pixel in the next channel; 1 for one channel.
    """

    across: float
    down: float
    channels: float

    @property
    def natural(self) -> bool:
        """Return whether the arrays look like pictures."""
        return self.across > _SMOOTH and self.down > _SMOOTH

    @property
    def unrelated(self) -> bool:
        """Return whether the channels are those of no picture."""
        return self.channels < _UNRELATED

    def is_interleaved(self, other: Smoothness) -> bool:
        """Return whether channels-last pictures were read as channels first.

        The rows are then parts of a row, and the channels the thirds of a picture: both are hardly
        related, and the rows of the other reading are.

        Args:
            other: of the same values read as channels last.
        """
        smoother = other.natural and other.down > self.down + _SMOOTHER
        return smoother and self.unrelated


def smoothness(images: Sequence[Images]) -> Smoothness:
    """Return the mean smoothness of batches with the channels on axis 1.

    Args:
        images: (batch, channels, height, width) each, at least one; batches weigh equally.
    """
    correlations = []
    for batch in images:
        centred = batch.astype(np.float64)
        # Per picture and channel: different means would look like correlation.
        centred = centred - centred.mean(axis=(2, 3), keepdims=True)
        # A constant batch has no energy; every correlation is then 0.
        energy = float(np.square(centred).mean()) or 1.0
        across = (centred[..., 1:] * centred[..., :-1]).mean() / energy
        down = (centred[..., 1:, :] * centred[..., :-1, :]).mean() / energy
        # Per channel, as each may have a scale of its own.
        power = np.square(centred).mean(axis=(2, 3))
        products = (centred[:, 1:] * centred[:, :-1]).mean(axis=(2, 3))
        scales = np.sqrt(power[:, 1:] * power[:, :-1])
        alike = products / np.where(scales > 0, scales, 1.0)
        correlations.append((across, down, alike.mean() if alike.size else 1.0))
    across, down, channels = np.mean(correlations, axis=0)
    return Smoothness(float(across), float(down), float(channels))


def as_channels_last(images: Sequence[Images]) -> list[Images]:
    """Return the pictures that the values are if channels come last in memory.

    Args:
        images: (batch, channels, height, width) each.

    Returns:
        Pictures of the same shapes, channels on axis 1.
    """
    pictures = []
    for batch in images:
        count, channels, height, width = batch.shape
        last = np.ascontiguousarray(batch).reshape(count, height, width, channels)
        pictures.append(last.transpose(0, 3, 1, 2))
    return pictures
