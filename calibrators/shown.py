"""Make text from files safe to show in terminals and logs."""

from __future__ import annotations

from itertools import groupby
from reprlib import Repr

#: Most characters of a value that a message shows.
_VALUE = 200
#: Most characters of an error line.
_LINE = 800
#: Most names in the middle of a list in an error line.
_NAMES = 4

_repr = Repr()
_repr.maxlevel = 3
_repr.maxother = 80
_repr.maxstring = 120
_repr.maxlong = 40
_repr.maxlist = _repr.maxtuple = _repr.maxdict = _repr.maxset = _repr.maxfrozenset = 8


def printable(text: str, *, lines: bool = False) -> str:
    r"""Escape terminal control characters.

    Escaped are control characters, bidirectional overrides, and all that Unicode calls unprintable.
    Names in a model may hold escape sequences, which recolour a terminal, retitle it or hide text
    (CWE-150).

    Args:
        text: the text to show.
        lines: keep line ends and tabs.

    >>> printable("a\x1b[31m\u202eb\n"), printable("a\nb", lines=True)
    ('a\\x1b[31m\\u202eb\\n', 'a\nb')
    """
    if text.isprintable():
        return text
    allowed = "\n\t" if lines else ""
    return "".join(
        character
        if character.isprintable() or character in allowed
        else _escaped(character)
        for character in text
    )


def _escaped(character: str) -> str:
    # Lone surrogates stand for undecodable bytes of a file name (PEP 383).
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def short(value: object) -> str:
    """Return a value in Python notation, shortened if it is long.

    >>> short({"a": [1] * 1000})
    "{'a': [1, 1, 1, 1, 1, 1, 1, 1, ...]}"
    """
    text = _repr.repr(value)
    if len(text) <= _VALUE:
        return text
    return f"{text[:_VALUE]}..."


def clipped(text: str, most: int = 2000) -> str:
    """Shorten a text to ``most`` characters: the beginning and the end.

    >>> clipped("0123456789" * 3, 20)
    '012345 ... 456789'
    """
    if len(text) <= most:
        return text
    # Eight characters leave room for the " ... " in the middle.
    half = (most - 8) // 2
    return f"{text[:half]} ... {text[-half:]}"


def shortened(text: str) -> str:
    """Shorten the line of an error or a warning: its lists of names, and then its middle.

    >>> names = ", ".join(f"node{index}" for index in range(1000))
    >>> shortened(f"unknown names {names}; use others")
    'unknown names node0, node1, node2, node3, node4, ... and 994 more, node999; use others (--json has the whole text)'
    """  # noqa: E501
    if len(text) <= _LINE:
        return text
    parts = list[str]()
    # Names without spaces; the first and the last one of a list belong to the text around it.
    for is_name, group in groupby(text.split(", "), lambda part: " " not in part):
        names = list(group)
        if is_name and len(names) > _NAMES:
            more = len(names) - _NAMES
            names[_NAMES:] = [f"... and {more} more"]
        parts += names
    return f"{clipped(', '.join(parts), _LINE)} (--json has the whole text)"
