"""The beginning of a page: a verdict in one sentence, and the next steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import islice

#: Number of actions at the top of a page.
_SHOWN = 3
#: Maximum letters of a word in a line of a phone.
_UNBROKEN = 28
_WORDS = {
    "good": "Good",
    "risky": "Risky",
    "poor": "Poor",
    "unclear": "Unclear",
    "unknown": "Not measured",
}


@dataclass(frozen=True)
class Action:
    """A proposed action.

    Attributes:
        text: description of the action.
        code: a command or options to copy; empty for none.
        effect: the expected effect; empty if unknown.
    """

    text: str
    code: str = ""
    effect: str = ""

    def lines(self) -> list[str]:
        """Return the action as text; a command is a line of its own, to be pasted."""
        if self.code.startswith("quark-onnx "):
            return [self.text, self.code]
        text = f"{self.code}: {self.text}" if self.code else self.text
        return [f"{text} ({self.effect})" if self.effect else text]


def verdict(
    band: str,
    sentence: str,
    actions: Sequence[Action] = (),
    details: Sequence[str] = (),
) -> str:
    """Return the verdict of a page with the first three actions.

    Args:
        band: "good", "risky", "poor", "unclear" or "unknown".
        sentence: the verdict, as text.
        actions: the actions, the most promising first.
        details: sentences that explain the verdict.
    """
    # The most promising ones; the sections of the page have the others.
    items = "".join(map(_item, islice(actions, _SHOWN)))
    listed = ""
    if items:
        listed = f"<h2>What to do next</h2><ol>{items}</ol>"
    explained = "".join(
        f"<small>{escape(_capital(detail))}.</small>" for detail in details
    )
    return (
        f'<section class="verdict {escape(band)}"><p><b>{_WORDS[band]}</b>'
        f" {escape(_capital(sentence.rstrip('.')))}.</p>{explained}{listed}</section>"
    )


def _item(action: Action) -> str:
    code = ""
    if action.code:
        code = f": <code>{_words(action.code)}</code>"
    effect = ""
    if action.effect:
        effect = f" <small>{escape(action.effect)}</small>"
    return f"<li>{escape(_capital(action.text))}{code}{effect}</li>"


def _words(code: str) -> str:
    """Return a command without line breaks in short words."""
    words = list[str]()
    for word in code.split(" "):
        text = escape(word)
        # A longer word, such as a path, has to break, or a phone would scroll sideways.
        words.append(f"<span>{text}</span>" if len(word) <= _UNBROKEN else text)
    return " ".join(words)


def _capital(text: str) -> str:
    """Return a sentence with the first letter in upper case."""
    # str.capitalize would lower the rest, names of tensors included.
    return text[:1].upper() + text[1:]
