"""Select from iterables and mappings, in their order."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from itertools import chain
from typing import Protocol, TypeVar

K = TypeVar("K")
T = TypeVar("T")
N = TypeVar("N", bound="Named")


K_contra = TypeVar("K_contra", contravariant=True)
T_co = TypeVar("T_co", covariant=True)


class Named(Protocol):
    """Anything with a name: a node, a tensor, an algorithm, a file."""

    @property
    def name(self) -> str:
        """The name."""


class Indexed(Protocol[K_contra, T_co]):
    """A mapping or a sequence."""

    def __getitem__(self, key: K_contra, /) -> T_co:
        """Return the value under a key, or at a place."""


def names_of(values: Iterable[Named]) -> list[str]:
    """Return the names of values."""
    return [value.name for value in values]


def by_name(values: Iterable[N]) -> dict[str, N]:
    """Return values by their names; of equal names, the last value stays."""
    return {value.name: value for value in values}


def present(values: Iterable[T | None]) -> list[T]:
    """Return the values other than None.

    >>> present([0, None, 2])
    [0, 2]
    """
    return [value for value in values if value is not None]


def excluding(values: Iterable[T], unwanted: Container[T]) -> list[T]:
    """Return the values that are not members of a container, with repetitions.

    >>> excluding(["a", "b", "a"], {"b"})
    ['a', 'a']
    """
    # Pass a set where ``unwanted`` is long: a list is searched for each value.
    return [value for value in values if value not in unwanted]


def among(values: Iterable[T], wanted: Container[T]) -> list[T]:
    """Return the values that are members of a container, with repetitions.

    >>> among(["a", "b", "a"], {"a"})
    ['a', 'a']
    """
    return [value for value in values if value in wanted]


def present_values(values: Mapping[K, T | None]) -> dict[K, T]:
    """Return a mapping without the keys whose value is None.

    >>> present_values({"a": 0, "b": None})
    {'a': 0}
    """
    return {key: value for key, value in values.items() if value is not None}


def of_type(values: Iterable[object], kind: type[T]) -> list[T]:
    """Return the instances of a class.

    >>> of_type((1, "batch", 3, None), int)
    [1, 3]
    """
    return [value for value in values if isinstance(value, kind)]


def flattened(parts: Iterable[Iterable[T]]) -> list[T]:
    """Return the members of the parts, one part after the other.

    >>> flattened([(1, 2), (), (3,)])
    [1, 2, 3]
    """
    return list(chain.from_iterable(parts))


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


def merged(parts: Iterable[Mapping[K, T]]) -> dict[K, T]:
    """Return the entries of several mappings; of equal keys, the last value stays.

    >>> merged([{"a": 1, "b": 2}, {"b": 3}])
    {'a': 1, 'b': 3}
    """
    found = dict[K, T]()
    for part in parts:
        found |= part
    return found


def subset(values: Mapping[K, T], keys: Iterable[K]) -> dict[K, T]:
    """Return the part of a mapping under some keys, in the order of the keys.

    >>> subset({"a": 1, "b": 2}, ["b", "c"])
    {'b': 2}
    """
    # In the order of the keys, unlike ``without``, so that callers decide the order.
    return {key: values[key] for key in keys if key in values}


def values_at(values: Indexed[K, T], keys: Iterable[K]) -> list[T]:
    """Return the values under some keys of a mapping, or at some places of a sequence.

    >>> values_at({"a": 1, "b": 2}, "ba"), values_at([3, 4, 5], (0, 2))
    ([2, 1], [3, 5])
    """
    return list(map(values.__getitem__, keys))


def differing(values: Mapping[K, T], usual: Mapping[K, object]) -> dict[K, T]:
    """Return the part of a mapping whose values are not the usual ones.

    >>> differing({"axis": 1, "bits": 8}, {"axis": 0, "bits": 8, "form": "qdq"})
    {'axis': 1}
    """
    return {
        key: values[key]
        for key, value in usual.items()
        if key in values and values[key] != value
    }


def without(values: Mapping[K, T], keys: Container[K]) -> dict[K, T]:
    """Return a mapping without some keys.

    >>> without({"a": 1, "b": 2}, ["b", "c"])
    {'a': 1}
    """
    return {key: value for key, value in values.items() if key not in keys}
