"""Text from files as it may be shown: names that nobody has chosen to trust reach terminals and
logs.
"""

from __future__ import annotations

from reprlib import Repr

#: Characters of a value that a message shows.
_VALUE = 200

_repr = Repr()
_repr.maxlevel, _repr.maxother, _repr.maxstring, _repr.maxlong = 3, 80, 120, 40
_repr.maxlist = _repr.maxtuple = _repr.maxdict = _repr.maxset = _repr.maxfrozenset = 8


def printable(text: str, *, lines: bool = False) -> str:
    r"""Escape what a terminal would act on: control characters, bidi overrides, and all that
    Unicode calls unprintable.

    Names in a model may hold escape sequences, which recolour a terminal, retitle it or hide what
    stands before them (CWE-150).

    Args:
        text: what is to be shown.
        lines: the text has lines of its own: line ends and tabs are kept.

    >>> printable("a\x1b[31m\u202eb\n"), printable("a\nb", lines=True)
    ('a\\x1b[31m\\u202eb\\n', 'a\nb')
    """
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(
        each if each.isprintable() or each in kept else _escaped(each) for each in text
    )


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def short(value: object) -> str:
    """A value in the notation of Python, cut where it is long.

    >>> short({"a": [1] * 1000})
    "{'a': [1, 1, 1, 1, 1, 1, 1, 1, ...]}"
    """
    text = _repr.repr(value)
    return text if len(text) <= _VALUE else f"{text[:_VALUE]}..."


def clipped(text: str, most: int = 2000) -> str:
    """A text of at most so many characters: the beginning, and where more is cut, the end.

    >>> clipped("0123456789" * 3, 20)
    '012345 ... 456789'
    """
    if len(text) <= most:
        return text
    half = (most - 8) // 2
    return f"{text[:half]} ... {text[-half:]}"
