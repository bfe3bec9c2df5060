"""Plot of the layers' errors before and after each algorithm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from html import escape

from quark_onnx.common.wording import labelled
from quark_onnx.page.blocks import Drawing
from quark_onnx.page.svg import short, tag
from quark_onnx.torch.algorithms.base import Outcome
from quark_onnx.torch.config.spec import LayerSpec
from quark_onnx.torch.page.frame import Frame, for_widths, key_of, series

#: Maximum distance of two algorithms at a layer, and radii of the markers.
_BESIDE, _LEAST, _GREATEST = 7.0, 1.2, 3.6
#: Layers at a smaller distance are drawn without lines, which would fill the plot.
_APART = 3.0


def shown(outcome: Outcome) -> bool:
    """Return whether an outcome has errors that a logarithmic scale can show."""
    # An error of 0 afterwards is drawn at the lower end of the scale.
    return (
        math.isfinite(outcome.before)
        and math.isfinite(outcome.after)
        and outcome.before > 0
        and outcome.after >= 0
    )


def layer_errors(
    outcomes: Sequence[Outcome],
    quantized: Mapping[str, LayerSpec],
    gains: Mapping[str, str],
) -> Drawing:
    """Return the errors of the layers before and after each algorithm.

    Args:
        outcomes: results of algorithms.
        quantized: specs of the quantized layers, in the order of the model.
        gains: the gain of each algorithm, in the order of execution.
    """
    note = (
        "Of what a layer computes on the data: the mean squared error as a share of the mean"
        " square of what the float one computes. Rings: before an algorithm; dots: after it."
        " Lines are those of whole blocks."
    )
    # A logarithmic scale has no place for errors relative to a baseline, which may be negative.
    # Errors of 0 before and after mean that none was measured.
    hidden = [
        outcome
        for outcome in outcomes
        if (outcome.before or outcome.after) and not shown(outcome)
    ]
    if hidden:
        note += (
            f" {len(hidden)} that are below 0, or no number, are in the table alone."
        )

    def draw(width: float, height: float, class_: str) -> str:
        return _plot(outcomes, quantized, list(gains), width, height, class_)

    plots = partial(for_widths, draw, (340.0, 300.0))
    return Drawing("Errors along the model", note, plots, key_of(labelled(gains)))


def _plot(  # noqa: PLR0913
    outcomes: Sequence[Outcome],
    quantized: Mapping[str, LayerSpec],
    algorithms: Sequence[str],
    width: float,
    height: float,
    class_: str,
) -> str:
    """Draw the error of each layer before and after each algorithm, in model order.

    Algorithms that work on a full block are drawn as lines over the block's width. The result is
    empty if no outcome has errors.

    Args:
        algorithms: names of the algorithms, in the order of execution.
        width: width of the drawing in pixels.
        height: height of the drawing in pixels.
        class_: CSS class of the drawing.

    Returns:
        SVG.
    """
    outcomes = [outcome for outcome in outcomes if _is_drawn(outcome)]
    if not outcomes:
        return ""
    names = list(quantized)
    values = list[float]()
    for outcome in outcomes:
        values += (outcome.before, outcome.after)
    frame = Frame.around(names, width, height, values)
    places = dict(zip(names, range(len(names)), strict=True))
    # The markers of all algorithms fit into 80 % of a layer's slot.
    step = min(_BESIDE, 0.8 * frame.slot / len(algorithms))
    parts = []
    for outcome in outcomes:
        rank = algorithms.index(outcome.algorithm)
        if outcome.layer in places:
            # With n algorithms, markers lie from -(n - 1) / 2 to (n - 1) / 2 steps around the
            # layer.
            at = frame.x(places[outcome.layer]) + step * (
                rank - (len(algorithms) - 1) / 2
            )
            drawn = _layer(
                frame,
                outcome,
                at,
                min(max(0.4 * step, _LEAST), _GREATEST),
                stem=frame.slot >= _APART,
            )
        else:
            inside = [
                index
                for name, index in places.items()
                if name.startswith(f"{outcome.layer}.")
            ]
            # A block without quantized layers, or a layer that stays float, has no place on the
            # axis.
            if not inside:
                continue
            # 0.4 slots beyond the centres of the block's first and last quantized layer.
            drawn = _whole(
                frame,
                outcome,
                frame.x(inside[0] - 0.4),
                frame.x(inside[-1] + 0.4),
            )
        # Browsers show the title of a group as its tooltip.
        hover = tag("title", escape(_hover(quantized.get(outcome.layer), outcome)))
        parts.append(tag("g", hover + drawn, class_=series(rank)))
    return frame.drawn(
        "Error before and after each algorithm, in the order of the model",
        "error",
        parts,
        class_,
    )


def _is_drawn(outcome: Outcome) -> bool:
    """Return whether an outcome has errors of a layer or of a block, in the plot's unit."""
    # Outcomes of the whole model are divergences in nats, which do not belong on this axis.
    return bool(outcome.layer) and shown(outcome)


def _layer(
    frame: Frame,
    outcome: Outcome,
    at: float,
    radius: float,
    *,
    stem: bool,
) -> str:
    """Draw a ring for the error before, a dot for the error after, and a stem."""
    before, after = frame.y(outcome.before), frame.y(outcome.after)
    dot = tag("circle", class_="filled", cx=at, cy=after, r=radius)
    # The ring of an equal error would surround the dot, and look like another marker.
    if before == after:
        return dot
    line = ""
    if stem:
        line = tag("line", class_="stem", x1=at, x2=at, y1=before, y2=after)
    return line + tag("circle", class_="hollow", cx=at, cy=before, r=radius) + dot


def _whole(frame: Frame, outcome: Outcome, left: float, right: float) -> str:
    """Draw two lines over a block; the line of the error before is dashed."""
    lines = ""
    for name, error in (("whole was", outcome.before), ("whole", outcome.after)):
        y = frame.y(error)
        lines += tag("line", class_=name, x1=left, x2=right, y1=y, y2=y)
    return lines


def _hover(spec: LayerSpec | None, outcome: Outcome) -> str:
    lines = [
        outcome.layer,
        f"{outcome.algorithm}: {short(outcome.before)} → {short(outcome.after)}",
    ]
    if spec is not None:
        lines.append(str(spec.weight))
    if outcome.note:
        lines.append(outcome.note)
    return "\n".join(lines)
