"""Counts and names in messages and reports.

Names come from models and files: line ends and control characters in them are escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from calibrators.shown import printable


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun, in the plural except for 1.

    Args:
        count: the number.
        noun: the noun for one, with a verb where one follows.
        plural: the words for other numbers; by default the noun with an ending.

    >>> counted(1, "node"), counted(3, "node"), counted(0, "class")
    ('1 node', '3 nodes', '0 classes')
    >>> counted(1, "layer is", "layers are"), counted(2000, "layer is", "layers are")
    ('1 layer is', '2000 layers are')
    """
    if count == 1:
        return f"{count} {noun}"
    ending = "es" if noun.endswith("s") else "s"
    return f"{count} {plural or noun + ending}"


def first_of(names: Sequence[str], limit: int = 1) -> str:
    """Return the first names of a list, and how many more there are.

    >>> first_of(["a", "b", "c"]), first_of(["a", "b"], 2)
    ('a and 2 more', 'a, b')
    """
    shown = ", ".join(printable(name) for name in names[:limit])
    more = len(names) - limit
    return f"{shown} and {more} more" if more > 0 else shown


def tally(pairs: Iterable[tuple[str, int]]) -> str:
    """Return names with their counts, as ``Counter.most_common`` has them.

    >>> tally([("Conv", 3), ("Relu", 1)])
    '3 Conv, 1 Relu'
    """
    return ", ".join(f"{count} {printable(name)}" for name, count in pairs)


def in_units(count: int, units: Iterable[tuple[str, float]], digits: str) -> str:
    """Return a number in the greatest unit that it reaches; empty below all units.

    Args:
        count: the number.
        units: names and sizes of units, the greatest first.
        digits: format of the number of units.
    """
    for unit, size in units:
        if count >= size:
            return f"{count / size:{digits}} {unit}"
    return ""


def byte_size(count: int) -> str:
    """Return a number of bytes in decimal units.

    >>> byte_size(1_234_000), byte_size(999_700), byte_size(99)
    ('1.23 MB', '1 MB', '99 bytes')
    """
    units = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    # Rounded before the unit is chosen: 999,700 has no three digits in kB.
    rounded = int(float(f"{count:.3g}"))
    return in_units(rounded, units, ".3g") or f"{count} bytes"


def prefixed(start: str, lines: Iterable[str]) -> list[str]:
    """Return lines with a common start.

    >>> prefixed("note: ", ["a", "b"])
    ['note: a', 'note: b']
    """
    return [f"{start}{printable(line)}" for line in lines]


def labelled(texts: Mapping[str, object]) -> list[str]:
    """Return a line for each entry of a mapping.

    >>> labelled({"conv": "excluded", "relu": 3})
    ['conv: excluded', 'relu: 3']
    """
    return [printable(f"{name}: {text}") for name, text in texts.items()]
