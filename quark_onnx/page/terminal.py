"""Blocks as lines of a terminal: titles in a column of nine letters, the verdict last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import singledispatch

from calibrators.shown import printable
from quark_onnx.common.containers import grouped
from quark_onnx.common.wording import first_of, tally
from quark_onnx.page.blocks import (
    Block,
    Facts,
    Judgement,
    Names,
    Notes,
    Problem,
    Problems,
    Ranking,
    Reasons,
    Text,
    TitledTable,
    Warnings,
)

#: Maximum number of lines of a section, and of rows of a table.
_SHOWN, _ROWS = 12, 40
#: Maximum number of kinds, and of names, in the line of a reason.
_KINDS, _NAMED = 5, 3
#: Maximum number of shares of an entry of a ranking.
_SHARES = 3
#: Maximum number of letters of a cell that the other cells of its column make room for.
_WIDEST = 60
#: Blocks at the end, where a person looks first; all others keep their order.
_LAST = {Warnings: 1, Judgement: 2}


@dataclass(frozen=True)
class Table:
    """Rows of text in columns.

    Attributes:
        rows: the cells of each row; the first row is the header.
        widest: number of letters that a column has room for. The row of a longer cell, such as the
            name of a tensor, goes on in the next line. None for rows of one line each.

    >>> print(Table((("name", "bits"), ("uint16", "16"))))
      name    bits
      uint16  16
    """

    rows: Sequence[Sequence[str]]
    widest: int | None = None

    def __str__(self) -> str:
        lines = [line for row in self.aligned() for line in row]
        return "\n".join(lines)

    def aligned(self) -> list[list[str]]:
        """Return the lines of each row."""
        # Control characters in names of tensors are escaped before their width is measured.
        rows = [[printable(text) for text in row] for row in self.rows]
        widths = list[int]()
        # strict: a row with a missing cell would shift the columns after it.
        for column in zip(*rows, strict=True):
            lengths = [len(cell) for cell in column]
            widest = self.widest or max(lengths)
            widths.append(max([size for size in lengths if size <= widest], default=0))
        aligned = list[list[str]]()
        for row in rows:
            lines, line, start = list[str](), "", 0
            for cell, width in zip(row, widths, strict=True):
                # A gap of two letters before a cell that has text.
                if cell and line and len(line) > start - 2:
                    lines.append(line)
                    line = ""
                line = line.ljust(start) + cell
                start += width + 2
            aligned.append([f"  {text.rstrip()}" for text in (*lines, line)])
        return aligned


def render(
    parts: Iterable[str | Table | Block], complete: bool = False
) -> list[str | Table]:
    """Return blocks as lines and tables; those for a page alone have none.

    Args:
        parts: blocks, and finished texts and tables between them.
        complete: whether long lists are not shortened.
    """
    shown = list[str | Table]()
    for part in sorted(parts, key=lambda part: _LAST.get(type(part), 0)):
        if isinstance(part, str | Table):
            shown.append(part)
            continue
        for line in text_of(part, complete):
            # Names from models may hold control characters; a table escapes its cells.
            shown.append(printable(line) if isinstance(line, str) else line)
    return shown


def render_lines(blocks: Iterable[Block], complete: bool = False) -> list[str]:
    """Return blocks as lines of text; see ``render``."""
    return [line for part in render(blocks, complete) for line in str(part).split("\n")]


@singledispatch
def text_of(block: Block, complete: bool = False) -> list[str | Table]:
    """Return the lines of a block; empty for a block without content or short title."""
    return []


@text_of.register
def _(block: Judgement, complete: bool = False) -> list[str | Table]:
    lines: list[str | Table] = [f"verdict   {block.band}: {block.sentence}"]
    if block.measured_on:
        lines.append(f"{'':<9} on {block.measured_on}")
    lines += [f"{'':<9} {detail}" for detail in block.details]
    for action in block.actions:
        lines += section("try", action.lines())
    return lines


@text_of.register
def _(block: Facts, complete: bool = False) -> list[str | Table]:
    lines = list[str | Table]()
    for title, texts in block.lines.items():
        lines += section(title, texts, complete)
    return lines


@text_of.register
def _(block: TitledTable, complete: bool = False) -> list[str | Table]:
    if not block.short or not block.rows:
        return []
    shown = block.rows if complete else block.rows[:_ROWS]
    rows = [list(block.header)]
    for row in shown:
        cells = [_cell(cell) for cell in row]
        # A row of a single cell is a title.
        rows.append(cells + [""] * (len(block.header) - len(cells)))
    lines: list[str | Table] = [f"{block.short:<9} {block.note}:", Table(rows, _WIDEST)]
    if len(block.rows) > len(shown):
        lines.append(f"  {_and_more(len(block.rows) - len(shown))}")
    return lines


@text_of.register
def _(block: Ranking, complete: bool = False) -> list[str | Table]:
    if not block.short:
        return []
    if not block.entries:
        return [*section(block.short, [block.nothing])]
    titles = [title for title, _ in block.entries[0].figures]
    rows = [("#", block.noun, *titles, "")]
    for rank, entry in enumerate(block.entries, 1):
        figures = [_cell(value) for _, value in entry.figures]
        rows.append((str(rank), entry.name, *figures, entry.origin))
    # All rows are aligned together, and the shares stand between them.
    header, *aligned = Table(rows, _WIDEST).aligned()
    lines: list[str | Table] = [f"{block.short:<9} {block.note}:", *header]
    for entry, row in zip(block.entries, aligned, strict=True):
        lines += row
        for share in entry.shares if complete else entry.shares[:_SHARES]:
            lines.append(f"       {share.text}")
            code = f": {share.code}" if share.code else ""
            lines.append(f"         -> {share.remedy}{code}")
    return lines


@text_of.register
def _(block: Notes, complete: bool = False) -> list[str | Table]:
    return [*section(block.short, block.lines, complete)] if block.short else []


@text_of.register
def _(block: Text, complete: bool = False) -> list[str | Table]:
    return [*section(block.short, block.text.split("\n"), True)] if block.short else []


@text_of.register
def _(block: Reasons, complete: bool = False) -> list[str | Table]:
    if not block.short:
        return []
    lines = list[str]()
    for reason, names in block.groups:
        if complete:
            lines += [f"{name}: {reason}" for name in names]
            continue
        text = first_of(names, _NAMED)
        if block.kinds:
            kinds = Counter(block.kinds.get(name, "other") for name in names)
            text = f"{len(names)} {block.many} ({tally(kinds.most_common(_KINDS))}"
            text += ", ...)" if len(kinds) > _KINDS else ")"
            if len(names) == 1:
                text = f"1 {block.one} ({next(iter(kinds))})"
        lines.append(f"{text}: {reason}")
    return [*section(block.short, lines, complete)]


@text_of.register
def _(block: Problems, complete: bool = False) -> list[str | Table]:
    lines = list[str | Table]()
    for problem in block.problems:
        places = _places(problem, complete)
        texts = [
            f"{problem.label}: {problem.text}",
            *(f"  {place}" for place in places),
        ]
        if problem.remedy:
            texts.append(f"fix: {problem.remedy}")
        if problem.sources:
            texts.append(f"from: {'; '.join(problem.sources)}")
        lines += section(problem.kind, texts, complete)
    return lines


def _places(problem: Problem, complete: bool) -> list[str]:
    """Return the places of a problem, those of the same detail in a line unless complete."""
    if complete:
        return [": ".join(filter(None, place)) for place in problem.places]
    names_by_detail = grouped((detail, name) for name, detail in problem.places)
    lines = [
        ": ".join(filter(None, (first_of(names, _NAMED), detail)))
        for detail, names in names_by_detail.items()
    ]
    if len(lines) > _NAMED:
        lines[_NAMED:] = [_and_more(len(lines) - _NAMED)]
    return lines


def section(title: str, lines: Sequence[str], complete: bool = False) -> list[str]:
    """Return the lines of a section, with the title before the first.

    Args:
        title: title of at most nine letters.
        lines: all lines.
        complete: whether to show them all; beyond a limit their number alone is shown.
    """
    shown = list(lines if complete else lines[:_SHOWN])
    if len(lines) > len(shown):
        shown.append(_and_more(len(lines) - len(shown)))
    titles = [title, *[""] * len(shown)]
    return [f"{head:<9} {line}" for head, line in zip(titles, shown, strict=False)]


def _cell(cell: str | Names) -> str:
    if not isinstance(cell, str):
        return f"{cell.text} ({first_of(cell.names, _NAMED)})"
    # A true minus is not in the encodings of all terminals.
    return f"-{cell[1:]}" if cell.startswith("−") else cell


def _and_more(count: int) -> str:
    return f"and {count} more; the page and the JSON document have them all"
