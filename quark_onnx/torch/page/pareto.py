"""Plot of a search: size against divergence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape

from quark_onnx.page.blocks import Drawing
from quark_onnx.page.svg import (
    axes,
    drawing,
    linear,
    logarithmic,
    power_text,
    short,
    tag,
    ticks,
)
from quark_onnx.torch.page.frame import for_widths

_LEFT, _RIGHT, _TOP, _BOTTOM = 56.0, 24.0, 32.0, 40.0


@dataclass(frozen=True)
class Point:
    """A trial in the plot.

    Attributes:
        name: the candidate.
        bits: bits per weight.
        divergence: divergence in nats per token.
        kind: "best", "front", or empty for trials that others surpass.
    """

    name: str
    bits: float
    divergence: float
    kind: str


def size_against_divergence(points: Iterable[Point]) -> Drawing:
    """Return the trials that a logarithmic scale can show."""
    # The scale has no place for 0.
    drawn = [point for point in points if point.divergence > 0]
    key = (
        ("best", "the best within the budget"),
        ("front", "front: none that is at most 1 % larger is more accurate"),
        ("point", "other trials"),
    )
    plots = partial(for_widths, partial(_plot, drawn), (380.0, 320.0))
    return Drawing("Size against divergence", "", plots, key)


def _plot(points: Sequence[Point], width: float, height: float, class_: str) -> str:
    """Draw bits on x, and divergence on a logarithmic y scale; empty without points."""
    if not points:
        return ""
    bits = [point.bits for point in points]
    values = [point.divergence for point in points]
    # Points lie 5 % inside of the frame.
    lo, hi = 0.95 * min(bits), 1.05 * max(bits)
    least = math.floor(math.log10(min(values)))
    # At least one power of ten, so that the ends of the scale differ.
    most = max(math.ceil(math.log10(max(values))), least + 1)
    bottom = height - _BOTTOM
    x = linear(lo, hi, _LEFT, width - _RIGHT)
    y = logarithmic(10.0**least, 10.0**most, bottom, _TOP)
    middle = (_LEFT + width - _RIGHT) / 2
    parts = axes(
        (_LEFT, width - _RIGHT, bottom),
        {x(tick): short(tick) for tick in ticks(lo, hi, 5)},
        {y(10.0**power): power_text(power) for power in range(least, most + 1)},
        ("bits per weight of all layers", "divergence, nats a token"),
    )
    front = sorted(
        (entry for entry in points if entry.kind), key=lambda entry: entry.bits
    )
    path = " ".join(f"{x(entry.bits):.1f},{y(entry.divergence):.1f}" for entry in front)
    parts.append(tag("polyline", class_="front", points=path))
    for point in points:
        hover = escape(
            f"{point.name}\n{point.bits:.2f} bits, {point.divergence:.4f} nats a token"
        )
        parts.append(
            tag(
                "circle",
                tag("title", hover),
                class_=f"point {point.kind}".strip(),
                cx=x(point.bits),
                cy=y(point.divergence),
                r=5,
            )
        )
    for point in front:
        # Labels stay inside of the frame, and above a front that descends.
        is_right = x(point.bits) > middle
        label = tag(
            "text",
            escape(point.name.partition(" (")[0]),  # a layout has no place on phones
            x=x(point.bits) + (-9 if is_right else 9),
            y=y(point.divergence) + (18 if is_right else -8),
            text_anchor="end" if is_right else "start",
        )
        parts.append(label)
    return drawing(width, height, "Size against divergence", parts, class_)
