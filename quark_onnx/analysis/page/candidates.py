"""HTML page of a search: candidates, plots, and the best configurations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from math import isfinite
from pathlib import Path

from quark_onnx.common.containers import present
from quark_onnx.common.wording import byte_size, counted
from quark_onnx.page import (
    Action,
    document,
    facts,
    grouped,
    scrolling,
    verdict,
    write_whole,
)
from quark_onnx.page.svg import Scale, drawing, linear, short, tag, ticks
from quark_onnx.report import decibels
from quark_onnx.search.search import Candidate, SearchResult

Position = tuple[float, float]

_WIDTH, _HEIGHT = 460.0, 320.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 44.0, 16.0, 28.0, 44.0
#: Minimum distance of point labels in pixels.
_APART = 16.0
#: Number of candidates up to which all have rank labels.
_LABELLED = 12
#: Maximum loss in dB for recommending a smaller candidate.
_LOSS = 2.0
_STYLE = """
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); gap: 20px 28px; }
svg .point { fill: var(--card); stroke: var(--faint); stroke-width: 1.4; }
svg .front { fill: var(--accent); stroke: var(--accent); } svg .best { fill: var(--good); stroke: var(--good); }
.key i.front { background: var(--accent); } .key i.best { background: var(--good); }
.key i.point { background: none; border: 1.4px solid var(--faint); }
.pair svg { max-width: 520px; }
.number { text-align: right; white-space: nowrap; padding-right: 16px; }
.candidates td:nth-child(2) { overflow-wrap: anywhere; min-width: 200px; } pre { margin: 0; overflow-x: auto; font-size: 13px; }
"""  # noqa: E501


def write_search_page(found: SearchResult, path: Path, name: str = "model") -> None:
    """Write the page of a search.

    The file is written atomically.

    Args:
        found: result of the search.
        path: path of the HTML file.
        name: title of the model.

    Raises:
        OSError: the folder cannot be written to.
    """
    write_whole(path, render_search(found, name))


def render_search(found: SearchResult, name: str = "model") -> str:
    """Return the page's HTML.

    Args:
        found: result of the search.
        name: title of the model.
    """
    parts = [
        _header(found, name),
        _plots(found),
        _table(found),
        _rest(found),
        _best(found),
    ]
    return document(f"{name}: search", parts, _STYLE)


def _header(found: SearchResult, name: str) -> str:
    best = found.best
    seconds = sum(candidate.seconds for candidate in found.candidates)
    rows = [
        ("SQNR of the best", f"{_score(best)} dB", "of the worst output"),
        ("Size of the best", _size(best.bytes), f"of {_span(found)}"),
        (
            "Tried",
            f"{len(found.candidates)}",
            f"of {counted(found.total, 'configuration')}",
        ),
        ("Time", _time(seconds), "quantizing and judging"),
        (
            "Samples",
            f"{found.calibrated} + {found.judged}",
            "for calibration and for judging",
        ),
    ]
    return (
        "<header>\n<h1>Search for a configuration</h1>\n"
        f'<p class="names">{escape(name)}</p>\n{_verdict(found)}\n{facts(rows)}\n</header>'
    )


def _verdict(found: SearchResult) -> str:
    best = found.best
    if best.score is None:
        return verdict("poor", "every candidate failed", [])
    sentence = f"{best.name} is best: {_score(best)} dB SQNR in {_size(best.bytes)}"
    if not found.reached:
        return verdict("poor", f"{sentence}, which misses the target", _actions(found))
    judged = found.verdict
    if judged is None:
        return verdict("unknown", sentence, _actions(found))
    sentence += f"; {judged.sentence}, on {judged.measured_on}"
    return verdict(judged.band, sentence, _actions(found))


def _actions(found: SearchResult) -> list[Action]:
    """Return actions: write the best model, consider a smaller model, try the rest."""
    write = Action("write the best model:", "quark-onnx search ... -o best.onnx")
    actions = present([write, _smaller(found)])
    if found.left:
        count = counted(len(found.left), "configuration")
        actions.append(Action(f"raise --budget: {count} did not fit"))
    return actions


def _smaller(found: SearchResult) -> Action | None:
    """Return the smallest candidate that is hardly worse than the best, if any."""
    best = found.best
    smaller = [
        each
        for each in found.front
        if (each.bytes or 0) < (best.bytes or 0)
        and (best.score or 0.0) - (each.score or 0.0) <= _LOSS
    ]
    if not smaller:
        return None
    candidate = min(smaller, key=lambda each: each.bytes or 0)
    loss = (best.score or 0.0) - (candidate.score or 0.0)
    effect = f"{_size(candidate.bytes)}, {loss:.1f} dB less"
    return Action(f"or a smaller model: {candidate.name}", effect=effect)


def _plots(found: SearchResult) -> str:
    """Return the scores against size and time; empty for fewer than two candidates."""
    sized = list(filter(_is_drawable, found.candidates))
    if len(sized) < 2:
        return ""
    plots = _plot("SQNR against size", "size, MB", sized, _megabytes, found)
    timed = [each for each in sized if each.runtime is not None]
    if len(timed) > 1:
        title = "runtime, relative to the float model"
        plots += _plot("SQNR against runtime", title, timed, _runtime, found)
    key = (
        '<li><i class="best"></i>the best</li><li><i class="front"></i>front: no other is'
        ' better, and no larger or slower</li><li><i class="point"></i>other'
        " candidates</li>"
    )
    return (
        "<section>\n<h2>Accuracy against size and runtime</h2>\n"
        '<p class="note">Up and to the left is better. Numbers are places in the table'
        f' below.</p>\n<div class="card"><div class="pair">{plots}</div>'
        f'<ul class="key">{key}</ul></div>\n</section>'
    )


def _is_drawable(candidate: Candidate) -> bool:
    """Return True if a candidate has a size and a finite score."""
    if candidate.score is None or not candidate.bytes:
        return False
    return isfinite(candidate.score)


def _megabytes(candidate: Candidate) -> float:
    return (candidate.bytes or 0) / 1e6


def _runtime(candidate: Candidate) -> float:
    return candidate.runtime or 0.0


def _plot(
    title: str,
    unit: str,
    candidates: Sequence[Candidate],
    measure: Callable[[Candidate], float],
    found: SearchResult,
) -> str:
    """Return a plot of scores by another measure.

    Args:
        title: title of the plot.
        unit: title of the horizontal axis, with its unit.
        candidates: the candidates of the plot.
        measure: the horizontal value of a candidate.
        found: the search, in which the candidates are numbered from 1.
    """
    xs = list(map(measure, candidates))
    scores = [candidate.score or 0.0 for candidate in candidates]
    x = _scale(xs, _LEFT, _WIDTH - _RIGHT)
    y = _scale(scores, _HEIGHT - _BOTTOM, _TOP)
    parts = _axes(xs, scores, x, y, unit)
    labels = list[Position]()
    front = found.front
    # from the last to the first, so that the best candidates are drawn on top
    for rank, candidate in reversed(list(enumerate(found.candidates, 1))):
        if candidate not in candidates:
            continue
        center = x(measure(candidate)), y(candidate.score or 0.0)
        kind = _kind(candidate, found.best, front)
        cx, cy = center
        parts.append(tag("circle", cx=cx, cy=cy, r=4.5, class_=f"point {kind}".strip()))
        labelled = kind or len(candidates) <= _LABELLED
        if labelled and _is_apart(center, labels):
            labels.append(center)
            parts.append(_label(rank, center))
    return drawing(_WIDTH, _HEIGHT, title, parts)


def _kind(candidate: Candidate, best: Candidate, front: Sequence[Candidate]) -> str:
    """Return the style of a point; empty for candidates that others surpass.

    Args:
        candidate: the candidate.
        best: the best candidate.
        front: the Pareto front.
    """
    if candidate is best:
        return "best"
    return "front" if candidate in front else ""


def _is_apart(point: Position, labels: list[Position]) -> bool:
    """Return True if a label would not cover another one.

    Args:
        point: position of the candidate in pixels.
        labels: positions of the candidates that have labels.
    """
    x, y = point
    return all(abs(x - u) > _APART or abs(y - v) > _APART for u, v in labels)


def _label(rank: int, point: Position) -> str:
    x, y = point
    if x > _WIDTH - _RIGHT - _APART:  # no room on the right
        return tag("text", str(rank), x=x - 8.0, y=y - 6, text_anchor="end")
    return tag("text", str(rank), x=x + 8.0, y=y - 6, text_anchor="start")


def _scale(values: Sequence[float], start: float, end: float) -> Scale:
    """Return a scale with a margin of 8 % around the values.

    Args:
        values: values in the plot, at least one.
        start: pixel of the lower end.
        end: pixel of the upper end.
    """
    lo, hi = _bounds(values)
    return linear(lo, hi, start, end)


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    # Equal values still get a range of positive width.
    margin = 0.08 * (max(values) - min(values)) or max(1e-6, 0.1 * abs(max(values)))
    return min(values) - margin, max(values) + margin


def _axes(
    xs: Sequence[float],
    scores: Sequence[float],
    x: Scale,
    y: Scale,
    unit: str,
) -> list[str]:
    """Return the axes of a plot with ticks and titles.

    Args:
        xs: horizontal values.
        scores: vertical values in dB.
        x: horizontal scale.
        y: vertical scale.
        unit: title of the horizontal axis, with its unit.
    """
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = [tag("text", "SQNR, dB", x=0, y=12)]
    for value in ticks(*_bounds(scores), 5):
        parts.append(
            tag("line", x1=_LEFT, x2=right, y1=y(value), y2=y(value), class_="grid")
        )
        parts.append(
            tag("text", short(value), x=_LEFT - 8, y=y(value) + 4, text_anchor="end"),
        )
    parts.append(tag("line", x1=_LEFT, x2=right, y1=bottom, y2=bottom, class_="axis"))
    for value in ticks(*_bounds(xs), 5):
        place = x(value)
        parts.append(
            tag("text", short(value), x=place, y=bottom + 18, text_anchor="middle"),
        )
    middle = (_LEFT + right) / 2
    parts.append(tag("text", unit, x=middle, y=_HEIGHT - 6, text_anchor="middle"))
    return parts


def _table(found: SearchResult) -> str:
    front = found.front
    # Failed candidates are listed below the table, by reason.
    shown = [candidate for candidate in found.candidates if not candidate.error]
    head = "<th>#</th><th>configuration</th>"
    for title in ("SQNR, dB", "size", "runtime", "time"):
        head += f'<th class="number">{title}</th>'
    head += "<th></th>"
    rows = "".join(
        _row(place, candidate, candidate in front)
        for place, candidate in enumerate(shown, 1)
    )
    table = scrolling(f'<table class="candidates"><tr>{head}</tr>{rows}</table>')
    return f"<section>\n<h2>Candidates</h2>\n{table}\n</section>"


def _row(place: int, candidate: Candidate, on_front: bool) -> str:
    remark = "front" if on_front else ""
    if candidate.pruned:
        remark = f"ended early, after {counted(candidate.judged, 'sample')}"
    if place == 1:
        name = f"<b>{escape(candidate.name)}</b>"
    else:
        name = escape(candidate.name)
    return (
        f'<tr><td>{place}</td><td>{name}</td><td class="number">{_score(candidate)}</td>'
        f'<td class="number">{_size(candidate.bytes)}</td>'
        f'<td class="number">{_times(candidate.runtime)}</td>'
        f'<td class="number">{_time(candidate.seconds)}</td><td>{remark}</td></tr>'
    )


def _rest(found: SearchResult) -> str:
    """Return failed configurations and those beyond the budget, grouped by reason."""
    reasons = [(each.name, each.error) for each in found.candidates if each.error]
    reasons += [(name, "did not fit into --budget") for name in found.left]
    if not reasons:
        return ""
    listed = grouped(reasons, "configuration", "configurations")
    return f"<section>\n<h2>Not measured</h2>\n{listed}\n</section>"


def _best(found: SearchResult) -> str:
    settings = escape(str(found.best.config))
    return (
        "<section>\n<h2>Settings of the best</h2>\n"
        f'<div class="card"><pre>{settings}</pre></div>\n</section>'
    )


def _score(candidate: Candidate) -> str:
    if candidate.score is None:
        return "–"
    return decibels(candidate.score)


def _span(found: SearchResult) -> str:
    """Return the range of sizes of all candidates."""
    sizes = [each.bytes for each in found.candidates if each.bytes is not None]
    if not sizes:
        return "no other"
    return f"{_size(min(sizes))} to {_size(max(sizes))}"


def _size(count: int | None) -> str:
    return "–" if count is None else byte_size(count)


def _times(runtime: float | None) -> str:
    return "–" if runtime is None else f"{runtime:.2f} ×"


def _time(seconds: float) -> str:
    if seconds >= 120:
        return f"{seconds / 60:.0f} min"
    if seconds >= 10:
        return f"{seconds:.0f} s"
    return f"{seconds:.1f} s"
