"""Page of a search: size against divergence, and a table of trials."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape
from pathlib import Path

from quark_onnx.page import document, facts, table_row, write_whole
from quark_onnx.page.svg import drawing, linear, logarithmic, power, short, tag, ticks
from quark_onnx.torch.pipelines.scheme_search import SchemeSearchResult, TriedScheme
from quark_onnx.torch.pipelines.verdict import file_size

_LEFT, _RIGHT, _TOP, _BOTTOM = 56.0, 24.0, 32.0, 44.0
_STYLE = (
    "svg .point { fill: none; stroke: var(--soft); } svg .best { fill: var(--accent);"
    " stroke: var(--accent); } svg .front { fill: none; stroke: var(--accent); }\n"
    "table.trials { font-size: 13px; width: 100%; } .trials td, .trials th {"
    " text-align: left; padding: 4px 12px 4px 0; overflow-wrap: anywhere; }\n"
)


def write_search_page(
    found: SchemeSearchResult, path: Path, name: str, bits: float
) -> None:
    """Write the page of a search atomically.

    Args:
        found: the search.
        path: the file.
        name: the name of the model.
        bits: the budget in bits per weight.
    """
    best = found.best
    rows = [
        (
            "Best",
            escape(best.name if best else "none"),
            f"within {bits:g} bits a weight",
        ),
        ("Trials", str(len(found.trials)), f"{len(found.untried)} not tried"),
    ]
    front = found.front
    lines = ""
    for trial in sorted(found.trials, key=lambda each: each.bits):
        lines += _row(trial, trial in front)
    cells = ("candidate", "bits", "size", "divergence", "seconds", "on the front")
    head = table_row(cells, "th")
    sizes = ((1000.0, 380.0, "wide"), (380.0, 320.0, "narrow"))
    plots = ""
    # Without a divergence above 0, the logarithmic scale has nothing to show.
    if _points(found.trials):
        for size in sizes:
            plots += _plot(found, *size)
    figure = ""
    if plots:
        figure = f'<figure class="card">{plots}</figure>'
    parts = [
        f'<header><h1>Search</h1><p class="names">{escape(name)}</p>{facts(rows)}'
        "</header>",
        f"<section><h2>Size against divergence</h2>{figure}</section>",
        '<section><h2>Trials</h2><div class="card scroll"><table class="trials">'
        f"<thead>{head}</thead><tbody>{lines}</tbody></table></div></section>",
    ]
    write_whole(path, document(f"{name}: search", parts, _STYLE))


def _row(trial: TriedScheme, front: bool) -> str:
    # The trial failed: its error takes the place of the figures.
    if trial.divergence is None:
        return (
            f'<tr><td>{escape(trial.candidate.name)}</td><td colspan="5">'
            f"{escape(trial.record.error)}</td></tr>"
        )
    cells = (
        escape(trial.candidate.name),
        f"{trial.bits:.2f}",
        file_size(trial.record.bytes or 0),
        f"{trial.divergence:.4f}",
        f"{trial.record.seconds:.0f}",
        "yes" if front else "",
    )
    return table_row(cells)


def _points(trials: Iterable[TriedScheme]) -> list[tuple[TriedScheme, float]]:
    """Return the trials that a logarithmic scale can show, with their divergence."""
    points = list[tuple[TriedScheme, float]]()
    for trial in trials:
        # A failed trial has no divergence, and the scale has no place for 0.
        if trial.divergence:
            points.append((trial, float(trial.divergence)))
    return points


def _plot(found: SchemeSearchResult, width: float, height: float, class_: str) -> str:
    """Draw bits on x, and divergence on a logarithmic y scale."""
    points = _points(found.trials)
    bits = [trial.bits for trial, _ in points]
    values = [value for _, value in points]
    # Points lie 5 % inside of the frame.
    lo, hi = 0.95 * min(bits), 1.05 * max(bits)
    least = math.floor(math.log10(min(values)))
    # At least one power of ten, so that the ends of the scale differ.
    most = max(math.ceil(math.log10(max(values))), least + 1)
    bottom = height - _BOTTOM
    x = linear(lo, hi, _LEFT, width - _RIGHT)
    y = logarithmic(10.0**least, 10.0**most, bottom, _TOP)
    parts = [
        tag("text", "divergence, nats a token", x=0, y=14),
        tag(
            "text",
            "bits per weight of all layers",
            x=(_LEFT + width - _RIGHT) / 2,
            y=height - 4,
            text_anchor="middle",
        ),
    ]
    for exponent in range(least, most + 1):
        place = y(10.0**exponent)
        parts.append(
            tag("line", class_="grid", x1=_LEFT, x2=width - _RIGHT, y1=place, y2=place)
        )
        parts.append(power(exponent, _LEFT - 8, place + 4))
    for tick in ticks(lo, hi, 5):
        parts.append(
            tag("text", short(tick), x=x(tick), y=bottom + 18, text_anchor="middle")
        )
    front = _points(found.front)
    path = " ".join(f"{x(trial.bits):.1f},{y(value):.1f}" for trial, value in front)
    parts.append(tag("polyline", class_="front", points=path))
    for trial, value in points:
        hover = (
            f"{trial.candidate.name}\n{trial.bits:.2f} bits, {value:.4f} nats a token"
        )
        class_of_point = "point"
        if trial.candidate == found.best:
            class_of_point = "best"
        parts.append(
            tag(
                "circle",
                tag("title", hover),
                class_=class_of_point,
                cx=x(trial.bits),
                cy=y(value),
                r=5,
            )
        )
    return drawing(width, height, "Size against divergence", parts, class_)
