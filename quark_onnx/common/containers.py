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


def tie(groups: dict[K, tuple[K, ...]], keys: Iterable[K]) -> None:
    """Merge the groups that share keys with a new group, which each of their keys then has.

    >>> groups = {"a": ("a", "b"), "b": ("a", "b")}
    >>> tie(groups, ["b", "c"])
    >>> groups["a"]
    ('a', 'b', 'c')
    """
    # A dictionary as an ordered set: the results do not depend on hashes.
    joined = dict[K, None]()
    for key in keys:
        joined.update(dict.fromkeys(groups.get(key, (key,))))
    groups.update(dict.fromkeys(joined, tuple(joined)))
