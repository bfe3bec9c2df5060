"""Alternative preprocessings of pictures: a scaling and an order of channels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark_onnx.preprocessing.finding import Cause
from quark_onnx.preprocessing.pixels import SCALINGS, Scaling

Feeds = Mapping[str, NDArray[Any]]

#: Channels of pictures whose order matters.
_COLORS = 3
#: Pixels of a shift that changes nothing of what a picture shows.
_SHIFT = 2
_SWAP = "the other order of channels"
_SWAP_ADVICE = f"{_SWAP}: --color bgr instead of rgb, or the reverse"


@dataclass(frozen=True)
class Pictures:
    """Samples with pictures as one of the inputs.

    Attributes:
        feeds: the samples.
        name: the input with the pictures.
        axis: its channel axis.
        images: the pictures, channels on axis 1.
        scaling: the scaling of the given pictures; None if unknown.
    """

    feeds: Sequence[Feeds]
    name: str
    axis: int
    images: Sequence[NDArray[Any]]
    scaling: Scaling | None

    def alternatives(self) -> Iterator[Alternative]:
        """Yield every other pair of a scaling and an order of channels.

        Alternatives that change one of the two come first.
        """
        # An unknown scaling (None) equals none of them, and all are tried.
        scalings = [scaling for scaling in SCALINGS if scaling is not self.scaling]
        for scaling in scalings:
            yield Alternative(self, scaling, swapped=False)
        # Pictures in gray have one order of channels.
        if self.images[0].shape[1] != _COLORS:
            return
        yield Alternative(self, None, swapped=True)
        for scaling in scalings:
            yield Alternative(self, scaling, swapped=True)

    def pixels(self, place: int) -> NDArray[np.float64]:
        """Return pictures in pixels from 0 to 255, stretched if the scaling is unknown.

        Args:
            place: index of the sample.

        Returns:
            (batch, channels, height, width) in float64.
        """
        # (batch, channels, height, width).
        image = self.images[place].astype(np.float64)
        if self.scaling is not None:
            return np.asarray(self.scaling.pixels(image))
        least, greatest = float(image.min()), float(image.max())
        # A picture of one value has no range; it becomes black.
        return np.asarray((image - least) * (255.0 / ((greatest - least) or 1.0)))

    def shifted(self, feeds: Feeds) -> Feeds:
        """Return a sample with its picture moved by two pixels to the right, around the edge."""
        width = 3 if self.axis == 1 else 2
        moved = np.roll(feeds[self.name], _SHIFT, axis=width)
        return {**feeds, self.name: moved}


@dataclass(frozen=True)
class Alternative:
    """An alternative preprocessing of pictures.

    Attributes:
        pictures: the given pictures.
        scaling: another scaling; None for the given one.
        swapped: whether the order of channels is reversed.
    """

    pictures: Pictures
    scaling: Scaling | None
    swapped: bool

    @property
    def changes(self) -> int:
        """Return the number of changes: scaling, order of channels."""
        return (self.scaling is not None) + self.swapped

    @property
    def cause(self) -> Cause:
        if self.scaling is None:
            return "color"
        return "scaling and color" if self.swapped else "scaling"

    @property
    def name(self) -> str:
        """Return the preprocessing in words."""
        if self.scaling is None:
            return _SWAP
        if self.swapped:
            return f"{self.scaling.name} and {_SWAP}"
        return self.scaling.name

    @property
    def options(self) -> str:
        """Return the options of the command line, as in ``NextStep``."""
        options = list[str]()
        if self.scaling is not None:
            options.append(self.scaling.options)
        if self.swapped:
            options.append("--color swapped")
        return " ".join(options)

    @property
    def advice(self) -> str:
        if self.scaling is None:
            return f"use {_SWAP_ADVICE}"
        advice = f"use {self.scaling.options}"
        if "--mean" not in self.scaling.options:
            advice += " without --mean and --std"
        if self.swapped:
            advice += f", and {_SWAP_ADVICE}"
        return advice

    @property
    def usual_options(self) -> str:
        """Return the options with the usual order of channels for the scaling."""
        if self.scaling is None or not self.scaling.color:
            return self.options
        return f"{self.scaling.options} --color {self.scaling.color}"

    @property
    def usual_advice(self) -> str:
        """Return the advice with the usual order of channels for the scaling."""
        if self.scaling is None or not self.scaling.color:
            return self.advice
        return f"use {self.usual_options}, the usual order with this mean"

    def feeds(self, start: int, end: int) -> Iterator[Feeds]:
        """Yield samples with the alternative preprocessing.

        Args:
            start: the first sample.
            end: the place after the last sample.
        """
        return map(self._feed, range(start, end))

    def _feed(self, index: int) -> Feeds:
        """Return a sample with the alternative preprocessing; other inputs are unchanged."""
        given = self.pictures
        scaling = self.scaling or given.scaling
        if scaling is None:
            # Only the order of channels changes, for which no pixels are needed.
            image = given.images[index][:, ::-1]
        else:
            pixels = given.pixels(index)
            image = scaling.of_pixels(pixels[:, ::-1] if self.swapped else pixels)
        # onnxruntime copies arrays that are not contiguous in each run.
        array = np.ascontiguousarray(np.moveaxis(image, 1, given.axis), np.float32)
        return {**given.feeds[index], given.name: array}

    def is_twin_of(self, other: Alternative) -> bool:
        """Return whether only the order of channels differs."""
        return self.scaling is other.scaling and self.swapped != other.swapped
