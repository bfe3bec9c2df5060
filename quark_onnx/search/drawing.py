"""Plots of a search: scores against sizes and runtimes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite

from quark_onnx.page.blocks import Drawing
from quark_onnx.page.svg import axes, drawing, linear, short, tag, ticks
from quark_onnx.search.candidate import Candidate

Position = tuple[float, float]

_WIDTH, _HEIGHT = 460.0, 320.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 44.0, 16.0, 28.0, 44.0
#: Minimum distance of point labels in pixels.
_APART = 16.0
#: Number of candidates up to which all have rank labels.
_LABELLED = 12


def score_plots(
    candidates: Sequence[Candidate], front: Sequence[Candidate], score: str
) -> Drawing:
    """Return the scores against size and runtime; empty for fewer than two candidates.

    Args:
        candidates: the candidates, the best first.
        front: the Pareto front.
        score: name of the score.
    """
    sized = [candidate for candidate in candidates if _is_drawable(candidate)]
    scale = f"{score}, dB" if score == "SQNR" else score
    timed = [candidate for candidate in sized if candidate.runtime is not None]
    measures = (
        (f"{score} against size", "size, MB", _megabytes, sized),
        (
            f"{score} against runtime",
            "runtime, relative to the float model",
            _runtime,
            timed,
        ),
    )
    plots = [
        _plot(title, (unit, scale), measure, drawn, candidates, front)
        for title, unit, measure, drawn in measures
        if len(drawn) > 1
    ]
    key = (
        ("best", "the best"),
        ("front", "front: no other is better, and no larger or slower"),
        ("point", "other candidates"),
    )
    return Drawing(
        "Accuracy against size and runtime",
        "Up and to the left is better. Numbers are places in the table below.",
        lambda: plots,
        key,
        side_by_side=True,
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


def _plot(  # noqa: PLR0913
    title: str,
    units: tuple[str, str],
    measure: Callable[[Candidate], float],
    drawn: Sequence[Candidate],
    candidates: Sequence[Candidate],
    front: Sequence[Candidate],
) -> str:
    """Return a plot of scores by another measure.

    Args:
        units: titles of the horizontal and of the vertical axis, with their units.
        measure: the horizontal value of a candidate.
        candidates: all candidates, which are numbered from 1, the best first.
    """
    xs = [measure(candidate) for candidate in drawn]
    scores = [candidate.score or 0.0 for candidate in drawn]
    across, up = _bounds(xs), _bounds(scores)
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    x, y = linear(*across, _LEFT, right), linear(*up, bottom, _TOP)
    parts = axes(
        (_LEFT, right, bottom),
        {x(value): short(value) for value in ticks(*across, 5)},
        {y(value): short(value) for value in ticks(*up, 5)},
        units,
    )
    labels = list[Position]()
    # from the last to the first, so that the best candidates are drawn on top
    for rank, candidate in reversed(list(enumerate(candidates, 1))):
        if candidate not in drawn:
            continue
        center = x(measure(candidate)), y(candidate.score or 0.0)
        kind = _kind(candidate, candidates[0], front)
        cx, cy = center
        parts.append(tag("circle", cx=cx, cy=cy, r=4.5, class_=f"point {kind}".strip()))
        labelled = kind or len(drawn) <= _LABELLED
        if labelled and _is_apart(center, labels):
            labels.append(center)
            parts.append(_label(rank, center))
    return drawing(_WIDTH, _HEIGHT, title, parts)


def _kind(candidate: Candidate, best: Candidate, front: Sequence[Candidate]) -> str:
    """Return the style of a point; empty for candidates that others surpass."""
    if candidate is best:
        return "best"
    return "front" if candidate in front else ""


def _is_apart(point: Position, labels: list[Position]) -> bool:
    """Return whether a label at a point in pixels would cover no other label."""
    x, y = point
    return all(abs(x - u) > _APART or abs(y - v) > _APART for u, v in labels)


def _label(rank: int, point: Position) -> str:
    x, y = point
    if x > _WIDTH - _RIGHT - _APART:  # no room on the right
        return tag("text", str(rank), x=x - 8.0, y=y - 6, text_anchor="end")
    return tag("text", str(rank), x=x + 8.0, y=y - 6, text_anchor="start")


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of a scale with a margin around the values."""
    low, high = min(values), max(values)
    # Ticks have three digits, which must differ around values that are nearly equal.
    margin = max(0.08 * (high - low), 0.02 * max(abs(low), abs(high)), 1e-6)
    return low - margin, high + margin
