"""Names and patterns of layers; names are looked up, and not compared one by one.

Mixtures have tens of thousands of layers, and configurations may name each of them.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import itemgetter

#: Expression of a single text, in which dots stand for any character: plain and escaped characters.
_LITERAL = re.compile(
    r"\^?(?P<text>(?:\\\W|[^\\^$*+?{}\[\]()|])*)(?P<end>\$|\\Z)?",
)


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


def is_regular(text: str) -> bool:
    """Return whether a text is a regular expression."""
    # configurations name thousands of layers, and a compilation takes 0.1 ms
    if _LITERAL.fullmatch(text):
        return True
    try:
        re.compile(text)
    except re.error:
        return False
    return True


class Expressions:
    r"""Regular expressions, of which the first that matches the start of a name counts.

    Expressions of a single text, such as the escaped name of a layer, are looked up; others are
    compared one by one.

    Args:
        expressions: the expressions in their order, by the entries that they belong to.

    Raises:
        re.error: an entry is no regular expression.

    >>> rules = Expressions({"a": r"layers\.1\.up$", "b": "layers.1", "c": ".*up"})
    >>> rules.first("layers.1.up"), rules.first("layers.10.up"), rules.first("layers.2.up")
    ('a', 'b', 'c')
    """

    def __init__(self, expressions: Mapping[str, str]) -> None:
        self._entries = list(expressions)
        self._texts = list(expressions.values())
        self._literals = dict[_Form, dict[object, int]]()
        self._expressions = list[tuple[int, re.Pattern[str]]]()
        for place, expression in enumerate(self._texts):
            literal = _LITERAL.fullmatch(expression)
            if literal is None:
                self._expressions.append((place, re.compile(expression)))
            else:
                form, text = _form_of(literal)
                places = self._literals.setdefault(form, {})
                places.setdefault(form.key(text), place)

    def first(self, name: str) -> str | None:
        """Return the entry of the first expression that matches a name; None if none does."""
        place = self._first_place(name)
        return self._entries[place] if place < len(self._entries) else None

    def match(self, name: str) -> bool:
        """Return whether an expression matches a name."""
        return self.first(name) is not None

    def _first_place(self, name: str) -> int:
        """Return the place of the first expression that matches; their number if none does."""
        if "\n" in name:
            # dots match no line break, and "$" matches before the last one
            return self._first_place_by_comparison(name)
        first = len(self._entries)
        for form, places in self._literals.items():
            if form.fits(name):
                first = min(first, places.get(form.key(name), first))
        for place, expression in self._expressions:
            if place > first:
                break
            if expression.match(name):
                return place
        return first

    def _first_place_by_comparison(self, name: str) -> int:
        for place, expression in enumerate(self._texts):
            if re.match(expression, name):
                return place
        return len(self._texts)


@dataclass(frozen=True)
class _Form:
    """Form of the texts of some expressions: names of thousands of layers have few forms.

    Attributes:
        length: number of characters.
        dots: places of the dots that stand for any character.
        is_whole: whether nothing may follow the text.
    """

    length: int
    dots: tuple[int, ...]
    is_whole: bool

    @cached_property
    def key(self) -> Callable[[str], object]:
        """Function that returns the parts of a text between the dots."""
        starts = (0, *(dot + 1 for dot in self.dots))
        parts = map(slice, starts, (*self.dots, self.length))
        # one call in C cuts a name
        return itemgetter(*parts)

    def fits(self, name: str) -> bool:
        """Return whether a name is long enough, and not longer than the whole."""
        if self.is_whole:
            return len(name) == self.length
        return len(name) >= self.length


def _form_of(literal: re.Match[str]) -> tuple[_Form, str]:
    """Return the form and the text of an expression of a single text."""
    characters = re.findall(r"\\\W|[^\\]", literal["text"])
    dots = tuple(place for place, char in enumerate(characters) if char == ".")
    text = "".join(char[-1] for char in characters)
    return _Form(len(text), dots, literal["end"] is not None), text


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
