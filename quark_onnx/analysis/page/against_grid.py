"""Histograms drawn with the grid that rounds the values."""

from __future__ import annotations

import math

from quark_onnx.analysis.findings import Bins
from quark_onnx.page.svg import (
    Scale,
    axes,
    drawing,
    linear,
    power_text,
    short,
    tag,
    ticks,
)

_WIDTH, _HEIGHT = 400.0, 200.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 38.0, 392.0, 26.0, 162.0
#: Distance of the grid's ends below which they have a common label, and the distance to the border
#: below which that label is not centered.
_NEAR, _MARGIN = 90, 60
#: Maximum number of codes to draw individually.
_CODES = 64


def against_grid(  # noqa: PLR0913
    title: str,
    values: Bins,
    lo: float | None,
    hi: float | None,
    step: float | None,
    axis_title: str = "value",
) -> str:
    """Draw counts on a logarithmic scale; values beyond the grid are highlighted.

    Args:
        title: title of the plot.
        values: the histogram.
        lo: least value of the grid; None for a format without a fixed grid.
        hi: greatest value of the grid; None for a format without a fixed grid.
        step: step of the grid; None for a format without a fixed grid.
        axis_title: title of the axis.

    Returns:
        The plot as SVG.
    """
    first, last = values.edges[0], values.edges[-1]
    ends = [value for value in (lo, hi) if value is not None]
    least, most = min([first, *ends]), max([last, *ends])
    margin = 0.03 * (most - least or 1.0)
    x = linear(least - margin, most + margin, _LEFT, _RIGHT)
    if max(values.counts, default=0) > 0:
        powers = math.log10(max(values.counts))
    else:
        powers = 1.0
    # Logarithmic; a bar of a single value (log10 = 0) still has a height. The axis has a decade at
    # least.
    y = linear(math.log10(0.5), max(1.0, powers) * 1.04, _BOTTOM, _TOP)
    decades = ticks(0, max(1.0, powers), 4)
    parts = axes(
        (_LEFT, _RIGHT, _BOTTOM),
        {x(value): short(value) for value in ticks(least, most, 5)},
        {y(each): power_text(int(each)) for each in decades if each.is_integer()},
        (axis_title, "count"),
    )
    if lo is not None and hi is not None:
        parts.insert(
            0,
            tag(
                "rect",
                class_="band",
                x=x(lo),
                y=_TOP - 6,
                width=x(hi) - x(lo),
                height=_BOTTOM - _TOP + 6,
            ),
        )
    parts += _bars(values, x, y, lo, hi, step or 0.0)
    if lo is not None and hi is not None:
        parts += _ends(x, lo, hi, step)
    return drawing(_WIDTH, _HEIGHT, title, parts)


def _bars(  # noqa: PLR0913
    values: Bins,
    x: Scale,
    y: Scale,
    lo: float | None,
    hi: float | None,
    step: float,
) -> list[str]:
    """Return bars; a bar across the grid's end counts as inside.

    Args:
        x: scale of the values.
        y: scale of the logarithms (base 10) of the counts.
        lo: least value of the grid; None without a fixed grid.
        hi: greatest value of the grid; None without a fixed grid.
        step: step of the grid; 0 without one.
    """
    inside, beyond = list[str](), list[str]()
    for left, right, count in zip(
        values.edges,
        values.edges[1:],
        values.counts,
        strict=False,
    ):
        if not count:
            continue
        wide = max(0.8, x(right) - x(left) - 0.4)
        bar = f"M{x(left):.1f} {_BOTTOM:.1f}V{y(math.log10(count)):.1f}h{wide:.1f}V{_BOTTOM:.1f}z"
        # Up to half a step beyond the end, a value rounds to the last code.
        outside = (
            lo is not None
            and hi is not None
            and (right < lo - step / 2 or left > hi + step / 2)
        )
        # All bars of a kind form one path, which keeps the page small.
        (beyond if outside else inside).append(bar)
    return [
        tag("path", class_=name, d="".join(bars))
        for name, bars in (("bar", inside), ("bar cut", beyond))
        if bars
    ]


def _common_label(left: float, right: float) -> tuple[float, str]:
    """Return the position and the anchor of one label for two close ends."""
    middle = (left + right) / 2
    if middle < _LEFT + _MARGIN:
        return left, "start"
    if middle > _RIGHT - _MARGIN:
        return right, "end"
    return middle, "middle"


def _ends(x: Scale, lo: float, hi: float, step: float | None) -> list[str]:
    """Return the ends of a grid in a histogram, and the codes between where there are few.

    Args:
        x: scale of the values.
        lo: least value of the grid.
        hi: greatest value of the grid.
        step: step of the grid; None without one.
    """
    parts = [
        tag("line", class_="end", x1=x(end), x2=x(end), y1=_TOP - 6, y2=_BOTTOM)
        for end in (lo, hi)
    ]
    # hi - lo is a multiple of the step, up to float rounding.
    if step and (hi - lo) / step < _CODES:
        marks = "".join(
            f"M{x(lo + i * step):.1f} {_BOTTOM:.0f}v5"
            for i in range(round((hi - lo) / step) + 1)
        )
        parts.append(tag("path", class_="code", d=marks))
    if x(hi) - x(lo) < _NEAR:
        position, anchor = _common_label(x(lo), x(hi))
        return [
            *parts,
            tag(
                "text",
                f"{short(lo)} … {short(hi)}",
                class_="edge",
                x=position,
                y=14,
                text_anchor=anchor,
            ),
        ]
    # Labels at the border of the drawing are not cut off.
    low = max(x(lo), _LEFT + 12)
    anchors = (
        "start" if low < _LEFT + 40 else "middle",
        "end" if x(hi) > _RIGHT - 30 else "middle",
    )
    parts.append(
        tag("text", short(lo), class_="edge", x=low, y=14, text_anchor=anchors[0]),
    )
    parts.append(
        tag(
            "text",
            short(hi),
            class_="edge",
            x=min(x(hi), _RIGHT),
            y=14,
            text_anchor=anchors[1],
        ),
    )
    return parts
