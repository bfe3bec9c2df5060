"""Plot of calibration tokens per expert: a row per block, a column per expert."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from html import escape

from quark_onnx.page.blocks import Drawing
from quark_onnx.page.svg import drawing, tag
from quark_onnx.torch.algorithms.base import UNREACHED, Outcome
from quark_onnx.torch.page.frame import block_of, centred

# The number after a part with "expert", as in mlp.experts.7.up_proj. Parts without digits may lie
# between both.
_EXPERT = re.compile(r".*expert[^.]*(?:\.[^.\d]+)*\.(\d+)\.")
_TOKENS = re.compile(r"(\d+) tokens")
#: Margins of the plot; distance of two expert labels; row height, and row height for many rows.
_LEFT, _TOP, _BOTTOM, _APART, _ROW, _LOW = 48.0, 26.0, 40.0, 26.0, 22.0, 15.0
_MANY = 24


def tokens_of(outcomes: Iterable[Outcome]) -> dict[str, dict[int, int]]:
    """Return the number of tokens per expert of each block, from notes of outcomes."""
    tokens_by_block = dict[str, dict[int, int]]()
    # GPTQ writes the number of its tokens as the note of a layer.
    for outcome in outcomes:
        expert, tokens = _EXPERT.match(outcome.layer), _TOKENS.fullmatch(outcome.note)
        if expert and (tokens or outcome.note == UNREACHED):
            row = tokens_by_block.setdefault(block_of(outcome.layer), {})
            number = int(expert[1])
            # The layers of an expert have a note each, and each algorithm writes its own.
            row[number] = max(row.get(number, 0), int(tokens[1]) if tokens else 0)
    return tokens_by_block


def expert_tokens(outcomes: Iterable[Outcome]) -> Drawing:
    """Return the number of tokens of each expert; empty for a model without experts."""
    rows = tokens_of(outcomes)
    most = max((max(row.values()) for row in rows.values()), default=0)
    widths = ((1000.0, "wide"), (380.0, "narrow"))
    return Drawing(
        "Tokens of experts",
        "How many tokens of the data were sent to each expert: the stronger the colour, the"
        " more. What an algorithm knows of an expert, it knows from them.",
        lambda: [_plot(rows, most, *width) for width in widths if rows],
        (("most", f"{most:,} tokens"), ("bad", "none")),
    )


def _plot(
    rows: Mapping[str, Mapping[int, int]], most: int, width: float, class_: str
) -> str:
    """Draw the number of tokens of each expert as the colour intensity of a cell.

    The maximum has the full intensity. Inactive experts are outlined.

    Args:
        rows: the result of ``tokens_of``, which must not be empty.
        most: number of tokens of the most active expert.
        width: width of the drawing in pixels.
        class_: CSS class of the drawing.

    Returns:
        SVG.
    """
    count = 1 + max(expert for row in rows.values() for expert in row)
    high = _ROW
    if len(rows) > _MANY:
        high = _LOW
    wide, bottom = (width - _LEFT - 12) / count, _TOP + high * len(rows)
    parts = [tag("text", "block", x=0, y=12)]
    for index, (block, row) in enumerate(rows.items()):
        top = _TOP + index * high
        label = block.rpartition(".")[2]
        parts.append(
            tag(
                "text",
                escape(label),
                x=_LEFT - 8,
                y=top + high / 2 + 4,
                text_anchor="end",
            ),
        )
        for number, tokens in row.items():
            hover = tag("title", escape(f"{block}, expert {number}: {tokens:,} tokens"))
            shade: dict[str, str | float] = {"class_": "none"}
            if tokens:
                # An expert with a single token is still visible, and differs from one without.
                shade = {"class_": "cell", "opacity": 0.08 + 0.92 * tokens / most}
            box = {
                "x": _LEFT + number * wide + 0.5,
                "y": top + 1,
                # A model may have more experts than the plot has pixels.
                "width": max(0.6, wide - 1),
                "height": high - 2,
            }
            parts.append(tag("rect", hover, **shade, **box))
    # Every k-th label, so that labels have their distance.
    every = max(1, round(_APART / wide + 0.5))
    for number in range(0, count, every):
        middle = _LEFT + (number + 0.5) * wide
        parts.append(centred(str(number), middle, bottom + 16))
    parts.append(centred("expert", (_LEFT + width) / 2, bottom + _BOTTOM - 6))
    return drawing(
        width,
        bottom + _BOTTOM,
        "Tokens that each expert has seen",
        parts,
        class_,
    )
