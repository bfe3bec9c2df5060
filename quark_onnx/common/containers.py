"""Group values, in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

K = TypeVar("K")
T = TypeVar("T")


def grouped(pairs: Iterable[tuple[K, T]]) -> dict[K, list[T]]:
    """Return the values of pairs by their keys, in the order of the pairs.

    >>> grouped([("a", 1), ("b", 2), ("a", 3)])
    {'a': [1, 3], 'b': [2]}
    """
    groups = dict[K, list[T]]()
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def grouped_by(values: Iterable[T], key_of: Callable[[T], K]) -> dict[K, list[T]]:
    """Return values by a property, in the order of the values.

    >>> grouped_by(["up", "gate", "to"], len)
    {2: ['up', 'to'], 4: ['gate']}
    """
    return grouped((key_of(value), value) for value in values)
