"""Blocks as lines of a terminal: titles in a column of nine letters, the verdict last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import singledispatch

from quark_onnx.common.wording import first_of, prefixed, tally
from quark_onnx.page.blocks import (
    Action,
    Block,
    Facts,
    Grid,
    Judgement,
    Notes,
    Ranking,
    Reasons,
    Warnings,
)

#: Maximum number of lines of a section.
_SHOWN = 12
#: Maximum number of kinds, and of names, in the line of a reason.
_KINDS, _NAMED = 5, 3
#: Blocks at the end, where a person looks first; all others keep their order.
_LAST = {Warnings: 1, Judgement: 2}


def render_lines(blocks: Iterable[Block]) -> list[str]:
    """Return blocks as lines; those for a page alone have none."""
    lines = list[str]()
    for block in sorted(blocks, key=lambda block: _LAST.get(type(block), 0)):
        lines += text_of(block)
    return lines


@singledispatch
def text_of(block: Block) -> list[str]:
    """Return the lines of a block; empty for a block without content or short title."""
    return []


@text_of.register
def _(block: Judgement) -> list[str]:
    lines = [f"verdict   {block.band}: {block.sentence}"]
    if block.measured_on:
        lines.append(f"{'':<9} on {block.measured_on}")
    lines += prefixed(" " * 10, block.details)
    return lines + action_lines(block.actions)


@text_of.register
def _(block: Facts) -> list[str]:
    lines = list[str]()
    for title, texts in block.lines.items():
        lines += section(title, texts)
    return lines


@text_of.register
def _(block: Grid) -> list[str]:
    if not block.note or not block.lines:
        return section(block.short, block.lines)
    return [f"{block.short:<9} {block.note}:", *prefixed("  ", block.lines)]


@text_of.register
def _(block: Ranking) -> list[str]:
    return section(block.short, block.lines) if block.short else []


@text_of.register
def _(block: Notes) -> list[str]:
    return section(block.short, block.lines) if block.short else []


@text_of.register
def _(block: Reasons) -> list[str]:
    if not block.short:
        return []
    lines = list[str]()
    for reason, names in block.groups:
        text = first_of(names, _NAMED)
        if block.kinds:
            kinds = Counter(block.kinds.get(name, "other") for name in names)
            text = f"{len(names)} {block.many} ({tally(kinds.most_common(_KINDS))}"
            text += ", ...)" if len(kinds) > _KINDS else ")"
            if len(names) == 1:
                text = f"1 {block.one} ({next(iter(kinds))})"
        lines.append(f"{text}: {reason}")
    return section(block.short, lines)


def action_lines(actions: Iterable[Action]) -> list[str]:
    """Return changes to try as lines."""
    lines = list[str]()
    for action in actions:
        lines += section("try", action.lines())
    return lines


def section(title: str, lines: Sequence[str]) -> list[str]:
    """Return the first lines of a section, with the title before the first.

    Args:
        title: title of at most nine letters.
        lines: all lines; beyond a limit their number alone is shown.
    """
    titles = [title, *[""] * _SHOWN]
    shown = [
        f"{head:<9} {line}" for head, line in zip(titles, lines[:_SHOWN], strict=False)
    ]
    if len(lines) > _SHOWN:
        shown.append(f"{'':<9} and {len(lines) - _SHOWN} more")
    return shown
