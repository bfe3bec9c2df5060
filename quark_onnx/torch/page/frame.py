"""Frame: axes of plots along a model, with blocks on x and a scale on y."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from quark_onnx.page.svg import (
    Scale,
    axes,
    drawing,
    linear,
    logarithmic,
    power_text,
    short,
    tag,
    ticks,
)

# The first number of a name ends the name of its block; further numbers belong to experts.
_BLOCK = re.compile(r"(.*?)\.(\d+)(?=\.|$)")
#: Margins of the plot, and the distance of two block labels.
_LEFT, _RIGHT, _TOP, _BOTTOM, _APART = 48.0, 12.0, 32.0, 40.0, 30.0
#: Number of colours of the style sheet.
_COLOURS = 7


def centred(text: str, x: float, y: float) -> str:
    """Draw text around a horizontal position."""
    return tag("text", text, x=x, y=y, text_anchor="middle")


def series(index: int) -> str:
    """Return the CSS class of a series."""
    return f"series-{index % _COLOURS}"


def block_of(name: str) -> str:
    """Return the block of a layer; a layer outside of blocks is its own block.

    >>> block_of("model.layers.3.mlp.experts.7.up_proj"), block_of("lm_head")
    ('model.layers.3', 'lm_head')
    """
    match = _BLOCK.match(name)
    return match[0] if match else name


@dataclass(frozen=True)
class Frame:
    """Axes of a plot.

    Attributes:
        names: names of layers from left to right.
        width: width of the drawing in pixels.
        height: height of the drawing in pixels.
        lo: lower end of the y scale.
        hi: upper end of the y scale.
        log: whether the scale is logarithmic; both ends are then positive.
    """

    names: Sequence[str]
    width: float
    height: float
    lo: float
    hi: float
    log: bool = True

    @classmethod
    def around(
        cls,
        names: Sequence[str],
        width: float,
        height: float,
        values: Iterable[float],
    ) -> Frame:
        """Return a frame with a logarithmic scale that covers the positive values.

        The scale covers at least two powers of ten.
        """
        exponents = [math.log10(value) for value in values if 0 < value < math.inf]
        if not exponents:
            # Without any positive value, the scale surrounds 1.
            exponents = [0.0]
        # The ends are whole or half powers of ten.
        lo, hi = math.floor(2 * min(exponents)) / 2, math.ceil(2 * max(exponents)) / 2
        # Fewer than two labelled powers of ten would not show that the scale is logarithmic.
        if math.floor(hi) - math.ceil(lo) < 1:
            lo, hi = math.floor(lo), max(math.ceil(hi), math.floor(lo) + 1)
        return cls(names, width, height, 10.0**lo, 10.0**hi)

    @property
    def slot(self) -> float:
        """Return the width of a layer."""
        # A model without layers still has axes.
        return (self.width - _RIGHT - _LEFT) / max(1, len(self.names))

    def x(self, index: float) -> float:
        """Return the centre of a layer by index."""
        return _LEFT + (index + 0.5) * self.slot

    @property
    def y(self) -> Scale:
        """Return the function from values to y, which clips values to the scale."""
        scale = (logarithmic if self.log else linear)(
            self.lo,
            self.hi,
            self.bottom,
            _TOP,
        )
        return lambda value: scale(min(max(value, self.lo), self.hi))

    @property
    def bottom(self) -> float:
        """Return the y of the horizontal axis."""
        return self.height - _BOTTOM

    def drawn(self, title: str, unit: str, parts: Iterable[str], class_: str) -> str:
        """Draw the axes with parts inside.

        Args:
            title: the title of the drawing.
            unit: the unit of the y axis.
            parts: SVG elements.
            class_: CSS class of the drawing.

        Returns:
            SVG.
        """
        bands, labels = self._blocks()
        elements = axes(
            (_LEFT, self.width - _RIGHT, self.bottom),
            labels,
            self._ticks(),
            ("block of the model", unit),
        )
        elements = [*bands, *elements, *parts]
        return drawing(self.width, self.height, title, elements, class_)

    def _ticks(self) -> dict[float, str]:
        """Return the label of the grid line at each y."""
        y = self.y
        if not self.log:
            return {y(value): short(value) for value in ticks(self.lo, self.hi, 5)}
        # log10 of a power of ten may be off by its last bit.
        lo, hi = (
            math.ceil(math.log10(self.lo) - 1e-9),
            math.floor(math.log10(self.hi) + 1e-9),
        )
        # At most eight labels.
        step = max(1, math.ceil((hi - lo) / 7))
        exponents = range(lo, hi + 1, step)
        return {y(10.0**exponent): power_text(exponent) for exponent in exponents}

    def _blocks(self) -> tuple[list[str], dict[float, str]]:
        """Shade every second block, and label as many blocks as fit, by x."""
        # No label is drawn yet: the first has its distance from anything.
        bands, labels, start, free = list[str](), dict[float, str](), 0, -math.inf
        for index, (block, layers) in enumerate(groupby(self.names, block_of)):
            count = len(list(layers))
            left, wide = self.x(start) - self.slot / 2, count * self.slot
            if index % 2:
                bands.append(
                    tag(
                        "rect",
                        class_="band",
                        x=left,
                        y=_TOP,
                        width=wide,
                        height=self.bottom - _TOP,
                    ),
                )
            # Layers outside of blocks, such as lm_head, have no number.
            label, middle = block.rpartition(".")[2], left + wide / 2
            if label.isdigit() and middle - free >= _APART:
                labels[middle] = label
                free = middle
            start += count
        return bands, labels


def for_widths(
    draw: Callable[[float, float, str], str], heights: tuple[float, float]
) -> list[str]:
    """Return a drawing for wide and for narrow windows; the style sheet shows one of both."""
    return [draw(1000.0, heights[0], "wide"), draw(380.0, heights[1], "narrow")]


def key_of(labels: Iterable[str]) -> list[tuple[str, str]]:
    """Return the legend of series, in the order of their colours."""
    return [(f"own {series(index)}", label) for index, label in enumerate(labels)]
