"""Names and patterns of layers; names are looked up, and not compared one by one.

Mixtures have tens of thousands of layers, and configurations may name each of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from itertools import accumulate


class NamePatterns:
    """Names and patterns, of which the first that matches counts.

    Exact names are looked up, patterns are compared one by one.

    Args:
        patterns: the entries in their order.
        is_pattern: returns whether an entry may match other names than itself.
        is_match: returns whether a pattern, the first argument, matches a name.
    """

    def __init__(
        self,
        patterns: Iterable[str],
        is_pattern: Callable[[str], bool],
        is_match: Callable[[str, str], bool],
    ) -> None:
        self._is_match = is_match
        self._places = dict[str, int]()
        self._patterns = list[tuple[int, str]]()
        for place, pattern in enumerate(patterns):
            self._places.setdefault(pattern, place)
            if is_pattern(pattern):
                self._patterns.append((place, pattern))

    def first(self, name: str) -> str | None:
        """Return the first entry that equals or matches a name; None without such an entry."""
        exact = self._places.get(name, len(self._places))
        for place, pattern in self._patterns:
            if place > exact:
                break
            if self._is_match(pattern, name):
                return pattern
        return name if name in self._places else None

    def match(self, name: str) -> bool:
        """Return whether an entry equals or matches a name."""
        return self.first(name) is not None


class LongerTexts:
    """Texts, of which the first that contains a name counts.

    Args:
        texts: the texts in their order, without line breaks.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = list(texts)
        # one search in C replaces a search in each text
        self._joined = "\n".join(self._texts)
        lengths = (len(text) + 1 for text in self._texts)
        self._starts = list(accumulate(lengths, initial=0))

    def first(self, name: str) -> int | None:
        """Return the number of the first text that contains a name; None if there is none."""
        place = self._joined.find(name)
        if place < 0 or not self._texts:
            return None
        return bisect_right(self._starts, place) - 1


class NameParts:
    """Texts that may be anywhere within a name.

    Args:
        parts: the texts.
    """

    def __init__(self, parts: Iterable[str]) -> None:
        self._parts = frozenset(parts)
        self._lengths = sorted(set(map(len, self._parts)))

    def match(self, name: str) -> bool:
        """Return whether one of the texts is a part of a name."""
        for length in self._lengths:
            for start in range(len(name) - length + 1):
                if name[start : start + length] in self._parts:
                    return True
        return False
