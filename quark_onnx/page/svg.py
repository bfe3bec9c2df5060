"""Parts of SVG for plots: elements, scales and ticks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from html import escape

Scale = Callable[[float], float]


def _written(value: str | float) -> str:
    """Return the value of an attribute; six digits are below a hundredth of a pixel."""
    if isinstance(value, str):
        return escape(value)
    # "x" of 1234.567 keeps two decimals; the shortest form keeps the file small.
    return f"{value:.6g}"


def tag(name: str, content: str = "", **attributes: str | float) -> str:
    """Return an element.

    A trailing underscore of an attribute's name is removed, and inner underscores become
    hyphens.

    Args:
        name: name of the element.
        content: content of the element, as markup.
        attributes: attributes of the element.

    >>> tag("text", "a &lt; b", x=1.25, class_="edge")
    '<text x="1.25" class="edge">a &lt; b</text>'
    """
    pairs = "".join(
        # class_ for the keyword of Python, and text_anchor for text-anchor.
        f' {key.rstrip("_").replace("_", "-")}="{_written(value)}"'
        for key, value in attributes.items()
    )
    if content:
        return f"<{name}{pairs}>{content}</{name}>"
    return f"<{name}{pairs}/>"


def drawing(
    width: float,
    height: float,
    title: str,
    parts: Iterable[str],
    class_: str = "",
) -> str:
    """Return a drawing of the full available width.

    Args:
        width: width in units of the drawing, which is scaled to the page.
        height: height in units of the drawing.
        title: name of the drawing for screen readers.
        parts: elements of the drawing.
        class_: CSS class; empty for none.
    """
    attributes = {"class_": class_} if class_ else {}
    # The first child "title" is the name that screen readers announce.
    label = tag("title", escape(title))
    return tag(
        "svg",
        label + "".join(parts),
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        **attributes,
    )


def linear(lo: float, hi: float, start: float, end: float) -> Scale:
    """Return a linear scale from [lo, hi] to [start, end].

    >>> linear(0, 10, 100, 0)(2.5)
    75.0
    """
    # An empty range maps all values to the start. In SVG y grows downwards: start may exceed end.
    factor = (end - start) / (hi - lo) if hi > lo else 0.0
    return lambda value: start + (value - lo) * factor


def logarithmic(lo: float, hi: float, start: float, end: float) -> Scale:
    """Return a logarithmic scale from [lo, hi], above 0, to [start, end].

    >>> logarithmic(1e-4, 1, 0, 100)(1e-3)
    25.0
    """
    inner = linear(math.log10(lo), math.log10(hi), start, end)
    return lambda value: inner(math.log10(value))


def ticks(lo: float, hi: float, count: int) -> list[float]:
    """Return about ``count`` round numbers between two ends.

    >>> ticks(-2.2, 7.9, 5)
    [-2.0, 0.0, 2.0, 4.0, 6.0]
    """
    # One tick, since log10 of an empty range does not exist.
    if not (math.isfinite(lo) and math.isfinite(hi)) or hi <= lo:
        return [lo]
    raw = (hi - lo) / max(1, count)
    # The step is 1, 2, 5 or 10 times the power of ten below the even spacing.
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(
        (m * power for m in (1, 2, 5, 10) if m * power >= 0.75 * raw),
        10 * power,
    )
    # Multiples of the step inside [lo, hi].
    first, last = math.ceil(lo / step), math.floor(hi / step)
    # round removes 0.30000000000000004, and + 0.0 turns -0.0 into 0.0.
    return [round(i * step, 12) + 0.0 for i in range(first, last + 1)]


def short(value: float) -> str:
    """Return a number in few characters, with a true minus.

    >>> short(-0.25), short(1300.0), short(123456.0), short(1e-7)
    ('−0.25', '1300', '123k', '1e−7')
    """
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-4:
        # 1e-07 becomes 1e-7, 1e+07 becomes 1e7.
        text = f"{value:.2g}".replace("e-0", "e-").replace("e+0", "e")
    elif size >= 1e4:
        text = f"{value / 1e3:.3g}k"
    elif size >= 1e3:
        text = f"{value:.0f}"
    else:
        text = f"{value:.3g}"
    # The minus sign is as wide as a digit; a hyphen is short and low.
    return text.replace("-", "−")


def power_text(exponent: int) -> str:
    """Return a power of ten as the content of a text.

    >>> power_text(0), power_text(-3)
    ('1', '10<tspan dy="-5" font-size="9">−3</tspan>')
    """
    # 0.1, 1 and 10 are shorter than powers.
    if -1 <= exponent < 2:
        return f"{10.0**exponent:g}"
    return "10" + tag("tspan", str(exponent).replace("-", "−"), dy=-5.0, font_size="9")


def axes(
    box: tuple[float, float, float],
    columns: Mapping[float, str],
    rows: Mapping[float, str],
    titles: tuple[str, str],
) -> list[str]:
    """Return the axes of a plot with grid lines, labels and titles.

    Args:
        box: left and right end and the bottom of the plot in pixels.
        columns: the label at each x in pixels.
        rows: the label of the grid line at each y in pixels.
        titles: titles of the horizontal and of the vertical axis, with their units.
    """
    left, right, bottom = box
    parts = [tag("text", titles[1], x=0, y=12)]
    for y, label in rows.items():
        parts.append(tag("line", class_="grid", x1=left, x2=right, y1=y, y2=y))
        parts.append(tag("text", label, x=left - 8, y=y + 4, text_anchor="end"))
    parts.append(tag("line", class_="axis", x1=left, x2=right, y1=bottom, y2=bottom))
    labels = [(x, bottom + 18, label) for x, label in columns.items()]
    for x, y, label in (*labels, ((left + right) / 2, bottom + 36, titles[0])):
        parts.append(tag("text", label, x=x, y=y, text_anchor="middle"))
    return parts
