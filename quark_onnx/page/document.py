"""The frame of a page, and the output file."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from pathlib import Path

from calibrators.scratch import written
from calibrators.shown import printable
from quark_onnx.page.style import CSS

#: Characters that HTML forbids even when escaped, and those that are invisible or turn the text
#: after them around.
_FORBIDDEN = re.compile(
    "[\ud800-\udfff\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]"
)


def table_row(cells: Iterable[str], kind: str = "td") -> str:
    """Return a row of a table; the kind is "th" in its head.

    >>> table_row(["a", "b"])
    '<tr><td>a</td><td>b</td></tr>'
    """
    return "<tr>" + "".join(f"<{kind}>{cell}</{kind}>" for cell in cells) + "</tr>"


def document(title: str, parts: Iterable[str], style: str = "") -> str:
    """Return the text of a page.

    Args:
        title: title of the page.
        parts: the HTML parts.
        style: additional CSS rules.
    """
    # One style sheet in the page: a page is one file that can be mailed and opened offline.
    text = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(parts)
        + "\n</main>\n</body>\n</html>\n"
    )
    # Names of tensors come from models, and may hold any character.
    return _FORBIDDEN.sub(lambda found: printable(found[0]), text)


def facts(rows: Iterable[tuple[str, str, str]]) -> str:
    """Return figures in columns: label, figure and explanation.

    The figure may contain markup.

    Args:
        rows: label, figure and explanation of each column.
    """
    cells = "".join(
        f"<div><dt>{escape(title)}</dt><dd>{value}<small>{escape(more)}</small></dd></div>"
        for title, value, more in rows
    )
    return f'<dl class="facts">{cells}</dl>'


def grouped(reasons: Iterable[tuple[str, str]], one: str, many: str) -> str:
    """Return names with equal reasons as a line that unfolds to the names.

    Args:
        reasons: a name and its reason, as texts.
        one: the noun for one name.
        many: the noun for several names.
    """
    # In the order of first appearance.
    groups = dict[str, list[str]]()
    for name, reason in reasons:
        groups.setdefault(reason, []).append(name)
    parts = list[str]()
    # The reason of most names first; sorted is stable.
    for reason, names in sorted(groups.items(), key=lambda group: -len(group[1])):
        noun = one if len(names) == 1 else many
        items = "".join(f"<li>{escape(name)}</li>" for name in names)
        parts.append(
            f"<details><summary>{len(names)} {noun}: {escape(reason)}</summary>"
            f"<ul>{items}</ul></details>",
        )
    return "".join(parts)


def scrolling(table: str) -> str:
    """Return a table in a card with sideways scrolling and shadows at hidden parts."""
    return (
        # tabindex: the keyboard can scroll only what can have the focus.
        '<div class="card scroll" tabindex="0" role="region" aria-label="table">'
        f"{table}</div>"
    )


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically, through a temporary file in the target folder.

    Args:
        path: the file to write.
        text: its content.

    Raises:
        OSError: the folder cannot be written to; the error names ``path``.
    """
    with written(path) as file:
        # Bytes: text mode would write line ends of Windows there.
        file.write(text.encode())
