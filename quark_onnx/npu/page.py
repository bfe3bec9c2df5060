"""HTML page of a forecast: figures, a drawing of the subgraphs, and reasons."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from html import escape
from itertools import starmap
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from quark_onnx.common.wording import counted
from quark_onnx.npu.placement import ABORT, NPU, NodePlacement
from quark_onnx.page.blocks import (
    Action,
    Block,
    Drawing,
    Facts,
    Heading,
    Judgement,
    Notes,
    Problem,
    Problems,
)
from quark_onnx.page.browser import write_blocks
from quark_onnx.page.svg import drawing, tag
from quark_onnx.report import percentage

if TYPE_CHECKING:
    from quark_onnx.npu.deploy import Bundle
    from quark_onnx.npu.preflight import Preflight

FORECAST_NOTE = (
    "a forecast from documentation, published sources and logs; nothing was run on a"
    " processor"
)
#: Heights of a box and of a row, the gap between two boxes, and the widest box.
_BOX, _ROW, _GAP, _WIDEST = 44.0, 74.0, 12.0, 300.0
#: Maximum number of rows of boxes.
_ROWS = 60


def write_page(forecast: Preflight, path: Path, name: str = "model") -> None:
    """Write the page of a forecast.

    The file is written atomically.

    Args:
        forecast: the forecast.
        path: path of the HTML file.
        name: title of the model.

    Raises:
        OSError: the folder cannot be written to.
    """
    title = f"{name}: forecast for {forecast.target.name}"
    write_blocks(path, title, [heading(forecast, name), *forecast.blocks()])


def write_bundle_page(bundle: Bundle, path: Path, name: str = "model") -> None:
    """Write the page of a bundle: the forecast, and the report of the quantization.

    The file is written atomically.

    Args:
        bundle: the bundle.
        path: path of the HTML file.
        name: title of the model.

    Raises:
        OSError: the folder cannot be written to.
    """
    title = f"{name}: deployment for {bundle.forecast.target.name}"
    write_blocks(path, title, [heading(bundle.forecast, name), *bundle.blocks()])


def heading(forecast: Preflight, name: str) -> Heading:
    """Return the heading of a page for a model with this name."""
    device = f"{forecast.target.summary}, {forecast.kind}, Ryzen AI {forecast.release}"
    return Heading("What the NPU will run", f"{name} on {device}")


def forecast_blocks(forecast: Preflight) -> list[Block]:
    """Return a forecast as blocks, the verdict first."""
    outside = sum(placed.device not in (NPU, ABORT) for placed in forecast.placements)
    operators = counted(len(forecast.placements), "operator")
    facts = [
        ("On the NPU", percentage(forecast.share), f"of {forecast.amount}"),
        ("Subgraphs", f"{forecast.subgraphs}", "each costs two transfers"),
        ("On the CPU", f"{outside}", f"of {operators}"),
        ("Compiler crashes", f"{len(forecast.aborts)}", "nodes"),
    ]
    counts = [f"{count} on {device}" for device, count in forecast.counts.items()]
    return [
        Judgement(
            forecast.band,
            f"forecast for {forecast.device}: {forecast.sentence}",
            tuple(starmap(_action, forecast.actions)),
            details=(FORECAST_NOTE,),
        ),
        Facts(facts, {"nodes": [", ".join(counts)], "known": [forecast.certainty]}),
        _reasons(forecast),
        Notes("In doubt", list(map(str, forecast.doubts)), "doubt"),
        _drawing(forecast),
    ]


def _action(fix: str, effect: str) -> Action:
    """Return an action; a fix that is a command is set as a command."""
    if fix.startswith("quark-onnx npu "):
        verb = fix.split()[2]
        return Action(f"{verb} the model", fix, effect)
    return Action(fix, effect=effect)


@dataclass(frozen=True)
class _Canvas:
    """Measures of a drawing, in pixels.

    Attributes:
        width: width of the drawing.
        margin: margin for lines at both sides.
        side: number of boxes in a row.
        class_: CSS class of the drawing.
    """

    width: float
    margin: float
    side: int
    class_: str


_WIDE, _NARROW = _Canvas(960.0, 60.0, 5, "wide"), _Canvas(380.0, 36.0, 2, "narrow")


@dataclass(frozen=True)
class _Box:
    """A subgraph partition in the drawing."""

    number: int
    placements: tuple[NodePlacement, ...]
    operations: int
    row: int = 0

    @property
    def device(self) -> str:
        """Device of the partition; a crash at any node decides."""
        devices = set(map(attrgetter("device"), self.placements))
        for device in (ABORT, NPU):
            if device in devices:
                return device
        return "CPU"

    @property
    def lines(self) -> tuple[str, str]:
        """The two lines of text in the box: device and size, and the operators."""
        kinds = list[str]()
        op_types = Counter(map(attrgetter("op_type"), self.placements))
        for kind, count in op_types.most_common(3):
            kinds.append(f"{count} {kind}" if count > 1 else kind)
        what = ", ".join(kinds)
        more = ""
        # Fewer operations would show as 0.00 GOPs.
        if self.operations >= 5e6:
            more = f" · {self.operations / 1e9:.2f} GOPs"
        nodes = counted(len(self.placements), "node")
        return f"{self.device} · {nodes}{more}", what


def _boxes(forecast: Preflight) -> list[_Box]:
    """Arrange the partitions in rows, with consumers below their producers."""
    # Longest-path layering: each pass moves a consumer below its lowest producer.
    rows = dict[int, int]()
    for number in dict.fromkeys(forecast.pieces):
        rows[number] = 0
    # A path has at most as many boxes as there are, so that further passes move nothing.
    for _ in rows:
        moved = False
        for first, second in forecast.links:
            if rows[second] <= rows[first]:
                rows[second], moved = rows[first] + 1, True
        if not moved:
            break
    members = dict[int, list[int]]()
    for place, number in enumerate(forecast.pieces):
        members.setdefault(number, []).append(place)
    boxes = []
    for number, places in members.items():
        placements = tuple([forecast.placements[place] for place in places])
        boxes.append(
            _Box(
                number,
                placements,
                sum(forecast.operations[place] for place in places),
                rows[number],
            ),
        )
    return boxes


def _drawing(forecast: Preflight) -> Drawing:
    boxes = _boxes(forecast)
    plots = list[str]()
    remarks = list[tuple[str, str]]()
    # Both drawings are in the page: the style sheet shows the one that fits the window.
    for canvas in (_WIDE, _NARROW):
        picture, omitted = _picture(forecast, boxes, canvas)
        plots.append(picture)
        if omitted:
            more = counted(omitted, "more subgraph is", "more subgraphs are")
            remarks.append((canvas.class_, f"{more} not drawn."))
    note = (
        "Green runs on the NPU, orange on the CPU, red crashes the compiler. Inputs are at the"
        " top."
    )
    return Drawing("Subgraphs", note, lambda: plots, remarks=remarks)


def _picture(
    forecast: Preflight, boxes: list[_Box], canvas: _Canvas
) -> tuple[str, int]:
    """Return a drawing, and the number of omitted boxes."""
    # A model in hundreds of subgraphs is drawn in part.
    rows = dict[int, list[_Box]]()
    for box in boxes:
        if box.row < _ROWS:
            rows.setdefault(box.row, []).append(box)
    # Middle of the upper edge of a box, and its width, by the number of the box.
    at = dict[int, tuple[float, float, float]]()
    parts = list[str]()
    for row in sorted(rows):
        side = rows[row][: canvas.side]
        width = min(
            _WIDEST,
            (canvas.width - _GAP * (len(side) - 1) - 2 * canvas.margin) / len(side),
        )
        left = (canvas.width - len(side) * width - (len(side) - 1) * _GAP) / 2
        for place, box in enumerate(side):
            x = left + place * (width + _GAP)
            y = row * _ROW + 2
            at[box.number] = (x + width / 2, y, width)
            parts += _drawn_box(box, x, y, width)
    links = list[str]()
    for first, second in forecast.links:
        # Links to boxes that are not drawn are left out.
        if first in at and second in at:
            links.append(_link(at[first], at[second], canvas.width))
    height = (1 + max(rows, default=0)) * _ROW
    title = "the subgraphs of the model"
    picture = drawing(canvas.width, height, title, [*links, *parts], canvas.class_)
    return picture, len(boxes) - len(at)


def _drawn_box(box: _Box, x: float, y: float, width: float) -> list[str]:
    """Return the SVG elements of a box: ground, colour, and two lines of text.

    Args:
        x: left edge in pixels.
        y: upper edge in pixels.
        width: width in pixels.
    """
    parts = list[str]()
    # The device's colour is translucent: an opaque ground hides the lines behind the box.
    for kind in ("ground", box.device.lower()):
        parts.append(
            tag("rect", x=x, y=y, width=width, height=_BOX, rx=8, class_=kind),
        )
    # A character is about 6.4 pixels wide; the box has margins of 8 pixels. Cut before escaping,
    # which would split entities.
    room = int((width - 16) / 6.4)
    head, what = box.lines
    text = escape(head[:room])
    parts.append(tag("text", text, x=x + 12, y=y + 18, class_="name"))
    parts.append(tag("text", escape(what[:room]), x=x + 12, y=y + 35))
    return parts


def _link(
    first: tuple[float, float, float],
    second: tuple[float, float, float],
    right: float,
) -> str:
    """Return a line between boxes; a line across rows runs along the right edge."""
    (x0, y0, width0), (x1, y1, width1) = first, second
    # Adjacent rows: a curve that crosses no box.
    if y1 - y0 <= _ROW:
        middle = (y0 + _BOX + y1) / 2
        path = (
            f"M{x0:.1f} {y0 + _BOX:.1f} C{x0:.1f} {middle:.1f}, {x1:.1f} {middle:.1f},"
            f" {x1:.1f} {y1:.1f}"
        )
        return tag("path", d=path, class_="link")
    start, end, half = x0 + width0 / 2, x1 + width1 / 2, _BOX / 2
    out = min(right, max(start, end) + min(90.0, 14 + 0.16 * (y1 - y0)))
    path = (
        f"M{start:.1f} {y0 + half:.1f} C{out:.1f} {y0 + half:.1f}, {out:.1f}"
        f" {y1 + half:.1f}, {end:.1f} {y1 + half:.1f}"
    )
    return tag("path", d=path, class_="link")


def _reasons(forecast: Preflight) -> Problems:
    problems = [
        Problem(
            "crash" if group.device == ABORT else group.device,
            f"{counted(len(group.placements), 'node')} ({group.kinds})",
            group.cause,
            [(placed.node, "") for placed in group.placements],
            group.fix,
            [
                group.confidence,
                *dict.fromkeys(placed.source for placed in group.placements),
            ],
        )
        for group in forecast.groups
    ]
    header = ("device", "nodes", "why", "what to do", "known from")
    nothing = "Every operator is forecast to run on the NPU."
    return Problems("Why not", header, problems, nothing)
