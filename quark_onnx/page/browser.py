"""Blocks as a page of a browser, one file that can be mailed and opened offline."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Sequence
from functools import singledispatch
from html import escape
from pathlib import Path

from calibrators.scratch import written
from calibrators.shown import printable
from quark_onnx.page.blocks import (
    Action,
    Block,
    Drawing,
    Facts,
    Figure,
    Gallery,
    Heading,
    Judgement,
    Multiline,
    Names,
    Notes,
    Picture,
    Problems,
    Ranking,
    RankingEntry,
    Reasons,
    Share,
    Strong,
    Terms,
    Text,
    TitledTable,
)
from quark_onnx.page.document import document

#: A number with its unit, and what stands for a missing number.
_NUMBER = re.compile(r"[-−+<>]?\d[\d,.]*(e−?\d+)?( ?(%|×|dB|s|min|bytes|[kMG]i?B))?")
_MISSING = {"", "-", "–", "inf", "failed"}
#: Number of columns of a table up to which it fits a phone.
_SLIM = 3
_NUMERIC = ' class="number"'
#: Number of actions at the top of a page.
_ACTIONS = 3
#: Maximum letters of a word in a line of a phone, and in a cell.
_UNBROKEN, _CELL = 28, 60
_WORDS = {
    "good": "Good",
    "risky": "Risky",
    "poor": "Poor",
    "unclear": "Unclear",
    "unknown": "Not measured",
}


def render_page(title: str, blocks: Iterable[Block]) -> str:
    """Return the text of a page.

    Args:
        title: title of the window.
        blocks: the blocks; empty ones are left out.
    """
    return document(title, [html_of(block) for block in blocks])


def write_blocks(path: Path, title: str, blocks: Iterable[Block]) -> None:
    """Write a page atomically.

    Raises:
        OSError: the folder cannot be written to.
    """
    text = render_page(title, blocks)
    with written(path) as file:
        # Bytes: text mode would write line ends of Windows there.
        file.write(text.encode())


def write_page(
    path: Path | None, title: str, names: str, blocks: Iterable[Block]
) -> None:
    """Write blocks as a page with a heading; nothing without a path."""
    if path is not None:
        page = [Heading(title, names), *blocks]
        write_blocks(path, f"{names}: {title}".removeprefix(": "), page)


@singledispatch
def html_of(block: Block) -> str:
    """Return the HTML of a block; empty for a block without content."""
    raise TypeError(f"{type(block).__name__} is no block")


@html_of.register
def _(block: Heading) -> str:
    names = (
        f'<p class="names">{escape(printable(block.names))}</p>' if block.names else ""
    )
    return f"<header>\n<h1>{escape(block.title)}</h1>\n{names}\n</header>"


@html_of.register
def _(block: Judgement) -> str:
    sentence = block.sentence.rstrip(".")
    measured_on = (f"on {block.measured_on}",) if block.measured_on else ()
    details = "".join(
        f"<small>{escape(printable(_capital(detail)))}.</small>"
        for detail in (*measured_on, *block.details)
    )
    # The most promising actions; the sections of the page have the others.
    actions = "".join(_item(action) for action in block.actions[:_ACTIONS])
    if actions:
        actions = f"<h2>What to do next</h2><ol>{actions}</ol>"
    return (
        f'<section class="verdict {escape(block.band)}"><p><b>{_WORDS[block.band]}</b>'
        f" {escape(printable(_capital(sentence)))}.</p>{details}{actions}</section>"
    )


@html_of.register
def _(block: Facts) -> str:
    if not block.rows:
        return ""
    cells = "".join(
        f"<div><dt>{escape(title)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>"
        for title, value, more in block.rows
    )
    return f'<dl class="facts">{cells}</dl>'


@html_of.register
def _(block: TitledTable) -> str:
    if not block.rows:
        return ""
    columns = list(zip(*(row for row in block.rows if len(row) > 1), strict=False))
    numeric = [*map(_is_numeric, columns)] or [False] * len(block.header)
    head = "".join(
        f"<th{_NUMERIC * number}>{escape(title)}</th>"
        for title, number in zip(block.header, numeric, strict=True)
    )
    rows = "".join(_row(row, block.header, numeric) for row in block.rows)
    # On a phone, a row with a title above becomes a block of lines: see the style sheet.
    layout = "titled" if any(len(row) == 1 for row in block.rows) else ""
    if len(block.header) <= _SLIM:
        layout = "slim"
    table = (
        # tabindex: the keyboard can scroll only what can have the focus.
        '<div class="card scroll" tabindex="0" role="region" aria-label="table"><table'
        f' class="{layout}"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )
    return _section(block.title, _note(block.note) + table)


@html_of.register
def _(block: Problems) -> str:
    if not block.problems:
        return (
            _section(block.title, f"<p>{escape(block.nothing)}</p>")
            if block.nothing
            else ""
        )
    rows = list[tuple[str | Names, ...]]()
    for problem in block.problems:
        places = [": ".join(filter(None, place)) for place in problem.places]
        # Each source is a line of the cell.
        sources = Multiline("\n".join(map(printable, problem.sources)))
        where = Names(problem.label, tuple(places)) if places else problem.label
        rows.append((problem.kind, where, problem.text, problem.remedy, sources))
    return html_of(TitledTable(block.title, block.header, rows))


@html_of.register
def _(block: Reasons) -> str:
    if not block.reasons:
        return ""
    parts = list[str]()
    for reason, names in block.groups:
        noun = block.one if len(names) == 1 else block.many
        text = f"{len(names)} {noun}: {reason}"
        parts.append(_unfolding(text, names))
    return _section(block.title, "".join(parts))


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
    figures = "".join(_figure(picture) for picture in block.pictures)
    gallery = f'<div class="gallery">{figures}</div>'
    return _section(block.title, _note(block.note) + gallery)


@html_of.register
def _(block: Drawing) -> str:
    plots = "".join(block.draw())
    if not plots:
        return ""
    if block.side_by_side:
        plots = f'<div class="pair">{plots}</div>'
    key = "".join(
        f'<li><i class="{escape(mark)}"></i>{escape(printable(text))}</li>'
        for mark, text in block.key
    )
    if key:
        key = f'<ul class="key">{key}</ul>'
    remarks = "".join(
        f'<p class="note {escape(class_)}">{escape(text)}</p>'
        for class_, text in block.remarks
    )
    figure = f'<figure class="card">{plots}{key}</figure>{remarks}'
    return _section(block.title, _note(block.note) + figure)


@html_of.register
def _(block: Ranking) -> str:
    if not block.entries:
        return _section(block.title, f"<p>{escape(block.nothing)}</p>")
    items = "\n".join(
        _entry(rank, entry) for rank, entry in enumerate(block.entries, 1)
    )
    return _section(block.title, f'{_note(block.note)}<ol class="rank">{items}</ol>')


@html_of.register
def _(block: Terms) -> str:
    rows = "".join(
        f"<div><dt>{escape(term)}</dt><dd>{escape(text)}</dd></div>"
        for term, text in block.rows
    )
    return _section(block.title, f'<dl class="read">{rows}</dl>')


def _note(text: str) -> str:
    return f'<p class="note">{escape(_capital(text))}</p>' if text else ""


def _unfolding(text: str, names: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(printable(name))}</li>" for name in names)
    summary = escape(printable(text))
    return f"<details><summary>{summary}</summary><ul>{items}</ul></details>"


def _is_numeric(cells: Iterable[str | Names]) -> bool:
    """Return whether a column holds numbers, which are aligned at the right."""
    present = [cell for cell in cells if cell not in _MISSING]
    return bool(present) and all(
        isinstance(cell, str) and _NUMBER.fullmatch(cell) for cell in present
    )


def _row(
    row: Sequence[str | Names], header: Sequence[str], numeric: Sequence[bool]
) -> str:
    if len(row) == 1:
        title = _cell(row[0])
        return f'<tr><th colspan="{len(header)}" scope="rowgroup">{title}</th></tr>'
    cells = "".join(
        f'<td{_NUMERIC * number} data-column="{escape(title)}">{_cell(cell)}</td>'
        for cell, title, number in zip(row, header, numeric, strict=True)
    )
    # The cells of a row that continues another one have no line above.
    return f"<tr>{cells}</tr>" if row[0] else f'<tr class="more">{cells}</tr>'


def _cell(cell: str | Names) -> str:
    if isinstance(cell, str):
        text = escape(printable(cell, lines=isinstance(cell, Multiline)))
        # The name of a tensor may be longer than the page is wide.
        if any(len(word) > _CELL for word in cell.split()):
            text = f'<span class="long">{text}</span>'
        return f"<b>{text}</b>" if isinstance(cell, Strong) else text
    if len(cell.names) == 1:
        return escape(f"{printable(cell.text)}\n{printable(cell.names[0])}")
    return escape(printable(cell.text)) + _unfolding(
        f"{len(cell.names)} names", cell.names
    )


def _entry(rank: int, entry: RankingEntry) -> str:
    """Return an entry of a ranking: figures, causes and drawings."""
    figures = list[str]()
    for title, value in entry.figures:
        number, _, unit = value.partition(" ")
        figure = f"{escape(number)} <span>{escape(unit)}</span>"
        figures.append(f"<div><dt>{escape(title)}</dt><dd>{figure}</dd></div>")
    shares = "".join(_share(share) for share in entry.shares)
    if shares:
        shares = f'<ul class="causes">{shares}</ul>'
    drawings = "".join(_drawn(figure) for figure in entry.drawings)
    if drawings:
        drawings = f'<div class="plots">{drawings}</div>'
    return (
        f'<li class="card"><div class="head"><span class="place">{rank}</span><div>'
        f"<h3>{escape(printable(entry.name))}</h3>"
        f'<div class="what">{escape(printable(entry.origin))}</div></div>'
        f'<dl class="ratios">{"".join(figures)}</dl></div>{shares}{drawings}</li>'
    )


def _share(share: Share) -> str:
    # A bar of 0 or 1 % would not be visible.
    percent = max(2, round(100 * share.share))
    code = f": <code>{_words(share.code)}</code>" if share.code else ""
    return (
        f'<li><div class="share" title="{percent} %"><i style="width:{percent}%"></i></div>'
        f"<div><p>{escape(printable(share.text))}</p>"
        f'<p class="remedy">{escape(share.remedy)}{code}</p></div></li>'
    )


def _drawn(figure: Figure) -> str:
    complaint = f"; <em>{escape(figure.complaint)}</em>" if figure.complaint else ""
    return (
        f"<figure><figcaption><b>{escape(figure.subject)}</b> {escape(figure.text)}"
        f"{complaint}</figcaption>{figure.plot}</figure>"
    )


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


def _item(action: Action) -> str:
    code = ""
    if action.code:
        code = f": <code>{_words(action.code)}</code>"
    effect = ""
    if action.effect:
        effect = f" <small>{escape(action.effect)}</small>"
    return f"<li>{escape(_capital(action.text))}{code}{effect}</li>"


def _words(code: str) -> str:
    """Return a command without line breaks in short words."""
    words = list[str]()
    for word in code.split(" "):
        text = escape(word)
        # A longer word, such as a path, has to break, or a phone would scroll sideways.
        words.append(f"<span>{text}</span>" if len(word) <= _UNBROKEN else text)
    return " ".join(words)


def _capital(text: str) -> str:
    """Return a sentence with the first letter in upper case."""
    # str.capitalize would lower the rest, names of tensors included.
    return text[:1].upper() + text[1:]
