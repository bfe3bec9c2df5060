"""A forecast as a page: figures, the model drawn in the pieces that it falls into, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from html import escape
from pathlib import Path

from quark_onnx.npu.placement import ABORT, NPU, Verdict
from quark_onnx.npu.preflight import Preflight
from quark_onnx.page import document, facts, write_whole
from quark_onnx.page.svg import drawing, tag
from quark_onnx.report import percentage

_WIDTH, _BOX, _ROW, _GAP = 960.0, 44.0, 74.0, 12.0
#: The widest box, and what is left at the sides for lines.
_WIDEST, _MARGIN = 300.0, 60.0
#: Boxes side by side, and rows of them, that are drawn.
_SIDE, _ROWS = 5, 60
_STYLE = """
svg .npu { fill: var(--arithmetic); opacity: 0.16; } svg .cpu { fill: var(--activation); opacity: 0.2; }
svg .ground { fill: var(--card); } .facts + .note { margin-top: 12px; }
svg .abort { fill: var(--bad); opacity: 0.3; } svg text.name { fill: var(--ink); font-weight: 600; }
svg .link { fill: none; stroke: var(--faint); stroke-width: 1.2; }
td:first-child { white-space: nowrap; }
"""  # noqa: E501


def write_page(found: Preflight, path: Path, name: str = "model") -> None:
    """Write the page; ``path`` is the whole page or what it was.

    Raises:
        OSError: the folder cannot be written to.
    """
    write_whole(path, render(found, name))


def render(found: Preflight, name: str = "model") -> str:
    """The text of the page; ``name`` is what the model is called."""
    parts = [_header(found, name), _reasons(found), _drawing(found)]
    return document(f"{name}: forecast for {found.target.name}", parts, _STYLE)


def _header(found: Preflight, name: str) -> str:
    outside = sum(verdict.device != NPU for verdict in found.verdicts)
    total = sum(found.operations)
    rows = [
        ("On the NPU", percentage(found.share), f"of {total / 1e9:.2f} GOPs"),
        ("Pieces", f"{found.subgraphs}", "each costs a transfer there and back"),
        ("Nodes elsewhere", f"{outside}", f"of {len(found.verdicts)} operators"),
        ("Ends the compiler", f"{len(found.aborts)}", "nodes"),
    ]
    what = f"{found.target.summary}, {found.kind}, Ryzen AI {found.release}"
    names = f'<p class="names">{escape(name)} on {escape(what)}</p>'
    note = (
        '<p class="note">A forecast from documentation, published sources and logs: no'
        " processor was asked.</p>"
    )
    return (
        "<header>\n<h1>What the NPU will"
        f" run</h1>\n{names}\n{facts(rows)}\n{note}</header>"
    )


@dataclass(frozen=True)
class _Box:
    """A piece in the drawing."""

    number: int
    verdicts: tuple[Verdict, ...]
    operations: int
    row: int = 0

    @property
    def device(self) -> str:
        devices = {verdict.device for verdict in self.verdicts}
        return next((device for device in (ABORT, NPU) if device in devices), "CPU")

    @property
    def lines(self) -> tuple[str, str]:
        kinds = Counter(verdict.op_type for verdict in self.verdicts).most_common(3)
        what = ", ".join(
            f"{count} {kind}" if count > 1 else kind for kind, count in kinds
        )
        more = f" · {self.operations / 1e9:.2f} GOPs" if self.operations >= 5e6 else ""
        nodes = f"{len(self.verdicts)} node{'s' if len(self.verdicts) > 1 else ''}"
        return f"{self.device} · {nodes}{more}", what


def _boxes(found: Preflight) -> list[_Box]:
    """The pieces in rows: each below all that it reads from."""
    rows = dict[int, int]()
    for number in dict.fromkeys(found.pieces):
        rows[number] = 0
    for _ in rows:
        moved = False
        for first, second in found.links:
            if rows[second] <= rows[first]:
                rows[second], moved = rows[first] + 1, True
        if not moved:
            break
    boxes = []
    for number in rows:
        places = [place for place, each in enumerate(found.pieces) if each == number]
        verdicts = tuple(found.verdicts[place] for place in places)
        boxes.append(
            _Box(
                number,
                verdicts,
                sum(found.operations[place] for place in places),
                rows[number],
            ),
        )
    return boxes


def _drawing(found: Preflight) -> str:
    boxes = _boxes(found)
    shown = [box for box in boxes if box.row < _ROWS]
    at, parts, links = dict[int, tuple[float, float, float]](), list[str](), list[str]()
    for row in sorted({box.row for box in shown}):
        side = [box for box in shown if box.row == row][:_SIDE]
        width = min(
            _WIDEST,
            (_WIDTH - _GAP * (len(side) - 1) - 2 * _MARGIN) / len(side),
        )
        left = (_WIDTH - len(side) * width - (len(side) - 1) * _GAP) / 2
        for place, box in enumerate(side):
            x, y = left + place * (width + _GAP), row * _ROW + 2
            at[box.number] = (x + width / 2, y, width)
            head, what = (escape(text[: int(width / 6.4)]) for text in box.lines)
            for kind in ("ground", box.device.lower()):
                parts.append(
                    tag("rect", x=x, y=y, width=width, height=_BOX, rx=8, class_=kind),
                )
            parts.append(tag("text", head, x=x + 12, y=y + 18, class_="name"))
            parts.append(tag("text", what, x=x + 12, y=y + 35))
    links += [
        _link(at[first], at[second])
        for first, second in found.links
        if first in at and second in at
    ]
    rows = 1 + max((box.row for box in shown), default=0)
    rest = len(boxes) - len(at)
    note = f'<p class="note">{rest} more pieces are not drawn.</p>' if rest else ""
    picture = drawing(_WIDTH, rows * _ROW, "the model in pieces", [*links, *parts])
    return (
        "<h2>The model in pieces</h2>\n<p>Green runs on the NPU, orange on the CPU, red"
        " ends the compiler. Inputs are "
        f'above.</p>\n<div class="card">{picture}</div>{note}'
    )


def _link(first: tuple[float, float, float], second: tuple[float, float, float]) -> str:
    """A line from a box to one below; around those between, from edge to edge on the right."""
    (x0, y0, width0), (x1, y1, width1) = first, second
    if y1 - y0 <= _ROW:
        middle = (y0 + _BOX + y1) / 2
        path = (
            f"M{x0:.1f} {y0 + _BOX:.1f} C{x0:.1f} {middle:.1f}, {x1:.1f} {middle:.1f},"
            f" {x1:.1f} {y1:.1f}"
        )
        return tag("path", d=path, class_="link")
    start, end, half = x0 + width0 / 2, x1 + width1 / 2, _BOX / 2
    out = max(start, end) + min(90.0, 14 + 0.16 * (y1 - y0))
    path = (
        f"M{start:.1f} {y0 + half:.1f} C{out:.1f} {y0 + half:.1f}, {out:.1f}"
        f" {y1 + half:.1f}, {end:.1f} {y1 + half:.1f}"
    )
    return tag("path", d=path, class_="link")


def _reasons(found: Preflight) -> str:
    outside = [verdict for verdict in found.verdicts if verdict.device != NPU]
    if not outside:
        return "<h2>Why not</h2>\n<p>Every operator is forecast to run on the NPU.</p>"
    groups = dict[tuple[str, ...], list[str]]()
    for each in outside:
        key = (
            each.device,
            each.op_type,
            each.reason,
            each.mend,
            each.confidence,
            each.source,
        )
        groups.setdefault(key, []).append(each.node)
    rows = []
    for (device, kind, reason, mend, confidence, source), names in sorted(
        groups.items(),
        key=lambda g: -len(g[1]),
    ):
        where = escape(names[0]) + (
            f" and {len(names) - 1} more" if len(names) > 1 else ""
        )
        cells = (
            device,
            f"{escape(kind)}<br>{where}",
            escape(reason),
            escape(mend),
            f"{confidence}<br>{escape(source)}",
        )
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "".join(
        f"<th>{title}</th>"
        for title in ("device", "nodes", "why", "what to do", "known from")
    )
    return (
        '<h2>Why not</h2>\n<div class="card'
        f' scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'
    )
