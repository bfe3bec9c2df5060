"""Names and patterns of layers; names are looked up, and not compared one by one.

Mixtures have tens of thousands of layers, and configurations may name each of them.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from itertools import accumulate

#: Expression of a single text, in which dots stand for any character: plain and escaped characters.
_LITERAL = re.compile(r"\^?(?P<text>(?:\\\W|[^\\^$*+?{}\[\]()|])*)(?P<end>\$|\\Z)?")


def is_expression(pattern: str) -> bool:
    """Return whether an entry of a list is meant as a regular expression."""
    return pattern.startswith("re:")


def is_glob(pattern: str) -> bool:
    """Return whether a name is a shell pattern, which vLLM does not support."""
    # "*" is common in regular expressions
    return not is_expression(pattern) and _has_marks(pattern)


def _has_marks(pattern: str) -> bool:
    """Return whether a name has characters that stand for others in shell patterns."""
    return any(mark in pattern for mark in "*?[")


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


class ShellPatterns:
    """Names and shell patterns, of which the first that matches counts.

    Exact names are looked up, patterns are compared one by one.

    Args:
        patterns: the entries in their order.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._places = dict[str, int]()
        self._patterns = list[tuple[int, str]]()
        for place, pattern in enumerate(patterns):
            self._places.setdefault(pattern, place)
            if _has_marks(pattern):
                self._patterns.append((place, pattern))

    def first(self, name: str) -> str | None:
        """Return the first entry that equals or matches a name, if any does."""
        exact = self._places.get(name, len(self._places))
        for place, pattern in self._patterns:
            if place > exact:
                break
            if fnmatch(name, pattern):
                return pattern
        return name if name in self._places else None


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
        # places of texts by their form, and by their parts between dots that stand for any
        # character: names of thousands of layers have few forms
        self._forms = dict[_Form, dict[tuple[str, ...], int]]()
        self._expressions = list[tuple[int, re.Pattern[str]]]()
        for place, expression in enumerate(self._texts):
            literal = _LITERAL.fullmatch(expression)
            if literal is None:
                self._expressions.append((place, re.compile(expression)))
                continue
            # each character of the text, escaped or not
            characters = re.findall(r"\\\W|[^\\]", literal["text"])
            dots = tuple(dot for dot, text in enumerate(characters) if text == ".")
            form = (len(characters), dots, literal["end"] is not None)
            text = "".join(character[-1] for character in characters)
            self._forms.setdefault(form, {}).setdefault(_parts(text, dots), place)

    def first(self, name: str) -> str | None:
        """Return the entry of the first expression that matches a name, if any does."""
        if "\n" in name:
            # dots match no line break, and "$" matches before the last one
            for entry, text in zip(self._entries, self._texts, strict=True):
                if re.match(text, name):
                    return entry
            return None
        first = len(self._entries)
        for (length, dots, is_whole), places in self._forms.items():
            if len(name) == length or (len(name) > length and not is_whole):
                first = min(first, places.get(_parts(name[:length], dots), first))
        for place, expression in self._expressions:
            if place > first:
                break
            if expression.match(name):
                return self._entries[place]
        return self._entries[first] if first < len(self._entries) else None

    def match(self, name: str) -> bool:
        """Return whether an expression matches a name."""
        return self.first(name) is not None


def names_and_expressions(patterns: Iterable[str]) -> Expressions:
    """Return names and regular expressions after "re:", as vLLM reads lists of layers."""
    expressions = dict[str, str]()
    for pattern in patterns:
        if not is_expression(pattern):
            expressions[pattern] = re.escape(pattern) + r"\Z"
        elif is_regular(pattern[3:]):
            expressions[pattern] = pattern[3:]
    return Expressions(expressions)


#: Length of a text, places of the dots that stand for any character, and whether nothing may follow
#: the text.
_Form = tuple[int, tuple[int, ...], bool]


def _parts(text: str, dots: tuple[int, ...]) -> tuple[str, ...]:
    """Return the parts of a text between dots, which are given by their places."""
    starts = (0, *(dot + 1 for dot in dots))
    return tuple(text[slice(*ends)] for ends in zip(starts, (*dots, None), strict=True))


class LongerTexts:
    """Texts that contain names; the first match counts.

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
        """Return the index of the first text that contains a name, if any does."""
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
        self._lengths = sorted({len(part) for part in self._parts})

    def match(self, name: str) -> bool:
        """Return whether one of the texts is a part of a name."""
        return any(
            name[start : start + length] in self._parts
            for length in self._lengths
            for start in range(len(name) - length + 1)
        )
