"""Blocks: what a result consists of, from top to bottom of its page.

``html_of`` renders a block for a page, ``text_of`` in ``terminal`` for a terminal, where ``short``
is the title of a block. Blocks without a short title are for the page alone.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import singledispatch
from html import escape
from pathlib import Path

from calibrators.shown import printable
from quark_onnx.page.document import (
    document,
    facts,
    grouped,
    scrolling,
    table_row,
    write_whole,
)
from quark_onnx.page.verdict import Action, verdict

#: Rules of the style sheet for blocks.
STYLE = """
.gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 300px), 1fr)); gap: 16px; margin-top: 12px; }
.gallery figcaption { font-size: 13px; color: var(--soft); margin-bottom: 6px; overflow-wrap: anywhere; }
.gallery .row { display: flex; gap: 8px; } .gallery .row div { flex: 1 1 0; min-width: 0; font-size: 12px; color: var(--soft); }
.gallery img { display: block; width: 100%; image-rendering: auto; border-radius: 4px; }
svg .float { fill: none; stroke: var(--faint); stroke-width: 2.5; } svg .quantized { fill: none; stroke: var(--accent); stroke-width: 1.2; }
.notes { margin: 8px 0 0; padding-left: 20px; } .notes li { margin-bottom: 4px; overflow-wrap: anywhere; }
pre { margin: 0; overflow-x: auto; font-size: 13px; } h2 { scroll-margin-top: 12px; }
"""  # noqa: E501


@dataclass(frozen=True)
class Heading:
    """The title of a page, with the names of the models."""

    title: str
    names: str = ""


@dataclass(frozen=True)
class Judgement:
    """The band of a verdict, its sentence, and what to do next.

    Attributes:
        band: "good", "risky", "poor", "unclear" or "unknown".
        sentence: the verdict.
        actions: changes to try, the most promising first.
        measured_on: the samples in words; empty where the sentence names them.
        details: sentences that explain the verdict.
    """

    band: str
    sentence: str
    actions: tuple[Action, ...] = ()
    measured_on: str = ""
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """A few figures.

    Attributes:
        rows: label, figure and explanation of each.
        lines: the lines of a terminal by their title, which may say more than the figures.
    """

    rows: Sequence[tuple[str, str, str]]
    lines: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Grid:
    """A table with a title.

    Attributes:
        title: title of the section.
        header: titles of the columns.
        rows: the cells of each row.
        note: a sentence before the rows.
        short: title in a terminal.
        lines: the rows as sentences, for a terminal.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    short: str = ""
    lines: Sequence[str] = ()


@dataclass(frozen=True)
class Reasons:
    """Names grouped by reason; the line of a reason unfolds to its names.

    Attributes:
        title: title of the section.
        reasons: the reason of each name.
        one, many: the noun for one name and for several.
        short: title in a terminal.
        kinds: the kind of each name, if numbers of kinds say more than names do.
    """

    title: str
    reasons: Mapping[str, str]
    one: str
    many: str
    short: str = ""
    kinds: Mapping[str, str] = field(default_factory=dict)

    @property
    def groups(self) -> list[tuple[str, list[str]]]:
        """Return each reason with its names, the reason of most names first."""
        groups = dict[str, list[str]]()
        for name, reason in self.reasons.items():
            groups.setdefault(reason, []).append(name)
        # Stable: reasons of equally many names stay in the order of first appearance.
        return sorted(groups.items(), key=lambda group: -len(group[1]))


@dataclass(frozen=True)
class Notes:
    """Sentences with a title."""

    title: str
    lines: Sequence[str]
    short: str = ""


@dataclass(frozen=True)
class Warnings(Notes):
    """Signs of wrong data or settings; a terminal shows them next to the verdict."""

    title: str = "Warnings"
    lines: Sequence[str] = ()
    short: str = "warning"


@dataclass(frozen=True)
class Text:
    """A text of several lines, as it is."""

    title: str
    text: str


@dataclass(frozen=True)
class Picture:
    """Images or drawings side by side.

    Attributes:
        caption: what is to be seen.
        parts: the title of each part with a PNG file, or with a drawing as SVG.
    """

    caption: str
    parts: Sequence[tuple[str, bytes | str]]


@dataclass(frozen=True)
class Gallery:
    """Pictures with a title."""

    title: str
    note: str
    pictures: Sequence[Picture]


Block = Heading | Judgement | Facts | Grid | Reasons | Notes | Text | Gallery


def render_page(title: str, blocks: Iterable[Block]) -> str:
    """Return the text of a page.

    Args:
        title: title of the window.
        blocks: the blocks; empty ones are left out.
    """
    return document(title, map(html_of, blocks), STYLE)


def write_blocks(path: Path, title: str, blocks: Iterable[Block]) -> None:
    """Write a page atomically.

    Raises:
        OSError: the folder cannot be written to.
    """
    write_whole(path, render_page(title, blocks))


@singledispatch
def html_of(block: Block) -> str:
    """Return the HTML of a block; empty for a block without content."""
    raise TypeError(f"{type(block).__name__} is no block")


@html_of.register
def _(block: Heading) -> str:
    names = f'<p class="names">{escape(printable(block.names))}</p>'
    return f"<header>\n<h1>{escape(block.title)}</h1>\n{names}\n</header>"


@html_of.register
def _(block: Judgement) -> str:
    sentence = block.sentence
    if block.measured_on:
        sentence += f", on {block.measured_on}"
    return verdict(block.band, sentence, block.actions, block.details)


@html_of.register
def _(block: Facts) -> str:
    return facts([(title, escape(value), more) for title, value, more in block.rows])


@html_of.register
def _(block: Grid) -> str:
    if not block.rows:
        return ""
    rows = [table_row(escape(printable(cell)) for cell in row) for row in block.rows]
    head = table_row(map(escape, block.header), "th")
    note = f'<p class="note">{escape(block.note)}</p>' if block.note else ""
    table = scrolling(f"<table>{head}{''.join(rows)}</table>")
    return _section(block.title, note + table)


@html_of.register
def _(block: Reasons) -> str:
    if not block.reasons:
        return ""
    return _section(block.title, grouped(block.reasons.items(), block.one, block.many))


@html_of.register
def _(block: Notes) -> str:
    if not block.lines:
        return ""
    items = "".join(f"<li>{escape(printable(line))}</li>" for line in block.lines)
    return _section(block.title, f'<ul class="notes">{items}</ul>')


@html_of.register
def _(block: Text) -> str:
    text = escape(printable(block.text, lines=True))
    return _section(block.title, f'<div class="card"><pre>{text}</pre></div>')


@html_of.register
def _(block: Gallery) -> str:
    if not block.pictures:
        return ""
    figures = "".join(map(_figure, block.pictures))
    note = f'<p class="note">{escape(block.note)}</p>'
    return _section(block.title, f'{note}<div class="gallery">{figures}</div>')


def _figure(picture: Picture) -> str:
    parts = list[str]()
    for title, content in picture.parts:
        if isinstance(content, bytes):
            data = b64encode(content).decode("ascii")
            content = f'<img alt="{escape(title)}" src="data:image/png;base64,{data}">'
        parts.append(f"<div>{content}{escape(title)}</div>")
    return (
        f'<figure class="card"><figcaption>{escape(printable(picture.caption))}'
        f'</figcaption><div class="row">{"".join(parts)}</div></figure>'
    )


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}\n</section>"
