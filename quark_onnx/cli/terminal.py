"""Colour and tables on a terminal; plain text in pipes and files."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from calibrators.shown import printable
from quark_onnx.cli.output import escaped, say
from quark_onnx.page.terminal import Table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

#: Title of a report line with its padding, as ``output.entry`` writes it.
#: At most nine letters, followed by the padding.
_TITLE = re.compile(r"^[a-z][a-z ]{0,8}(?= )")
_TITLE_WIDTH = 10
#: Style by the band of a verdict.
_BANDS = {
    "good": "bold green",
    "risky": "bold yellow",
    "poor": "bold red",
    "unclear": "bold yellow",
}
_BAND = re.compile(rf"\b({'|'.join(_BANDS)})(?=:)")
#: Label of a remedy, at the start of a line below a finding.
_REMEDY = re.compile(r"^ +(-> |fix: |try: )")
_COMPLAINT = re.compile(r"^quark-onnx: (error|warning)(?=:)")
_NUMBER = re.compile(r"^[-+<>]?[\d.,]+( ?%)?$|^(-|inf|failed|)$")


def show(parts: Sequence[str | Table], stream: TextIO | None) -> None:
    """Print text and tables, with colour on a terminal, otherwise as plain text.

    Args:
        parts: texts of one or more lines, and tables.
        stream: the stream; None if the process was started without it.
    """
    console = _console(stream)
    if console is None:
        say("\n".join(map(str, parts)), stream)
        return
    for part in parts:
        if isinstance(part, Table):
            console.print(_table(part))
        else:
            # soft_wrap: rich would break long lines, and a broken command cannot be pasted.
            console.print(_styled(escaped(part, stream)), soft_wrap=True)


def complain(text: str) -> None:
    """Print an error or a warning to stderr, in colour on a terminal."""
    console = _console(sys.stderr)
    if console is None:
        say(text, sys.stderr)
    else:
        console.print(_styled(escaped(text, sys.stderr)), soft_wrap=True)


def _console(stream: TextIO | None) -> Console | None:
    """Return a rich console for a terminal; None for other streams."""
    if stream is None or not stream.isatty():
        return None
    from rich.console import Console

    # Names such as "[bold]" or ":x:" are text, and no markup.
    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    # A dumb terminal (TERM=dumb, as in editors) shows escape sequences as characters.
    return None if console.is_dumb_terminal else console


def _styled(text: str) -> Text:
    from rich.text import Text

    styled = Text()
    for index, line in enumerate(text.split("\n")):
        # A newline between the lines, none after the last.
        styled.append_text(Text("\n" if index else ""))
        styled.append_text(_styled_line(line))
    return styled


def _styled_line(line: str) -> Text:
    from rich.text import Text

    styled = Text(line)
    title = _TITLE.match(line)
    # Prose that begins with a short word has no padding up to the column.
    if title is not None and line[title.end() : _TITLE_WIDTH].isspace():
        styled.stylize("bold cyan", 0, title.end())
        if title[0].strip() == "verdict":
            for band in _BAND.finditer(line):
                styled.stylize(_BANDS[band[1]], *band.span(1))
    if remedy := _REMEDY.match(line):
        styled.stylize("green", *remedy.span(1))
    if complaint := _COMPLAINT.match(line):
        style = "bold red" if complaint[1] == "error" else "bold yellow"
        styled.stylize(style, *complaint.span(1))
    return styled


def _table(table: Table) -> RichTable:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    header, *rows = table.rows
    drawn = RichTable(box=box.SIMPLE_HEAD, header_style="bold", show_edge=False)
    for index, title in enumerate(header):
        cells = [row[index] for row in rows]
        # Numbers are aligned at the right; "-", "inf" and "failed" stand for numbers.
        numeric = bool(cells) and all(_NUMBER.match(cell) for cell in cells)
        drawn.add_column(
            Text(printable(title)),
            justify="right" if numeric else "left",
            # A long name goes on in the next line, and is not cut off.
            overflow="fold",
        )
    for row in rows:
        drawn.add_row(*(Text(printable(cell)) for cell in row))
    return drawn
