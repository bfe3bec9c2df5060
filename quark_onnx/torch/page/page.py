"""The page: figures, errors along the model, a mixture, experts, and a table of all layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from html import escape
from itertools import groupby
from pathlib import Path

from quark_onnx.page import document, facts, write_whole
from quark_onnx.page.svg import short
from quark_onnx.torch.algorithms.base import Outcome
from quark_onnx.torch.config.spec import LayerSpec
from quark_onnx.torch.page import mixture as mixed
from quark_onnx.torch.page.errors import algorithms_of, errors, shown
from quark_onnx.torch.page.experts import experts, tokens_of
from quark_onnx.torch.page.frame import STYLE, block_of, series
from quark_onnx.torch.pipelines.estimate import size
from quark_onnx.torch.pipelines.mixed_precision import Mixture
from quark_onnx.torch.pipelines.ptq import Outcome as Found
from quark_onnx.torch.pipelines.report import TorchReport

_STYLE = (
    STYLE
    + "svg .cell { fill: var(--accent); } svg .none { fill: none; stroke: var(--bad);"
    " stroke-width: 1; }\n.key i.most { background: var(--accent); border-radius: 0;"
    " }\n.key i.bad { background: none; border: 1px solid var(--bad); border-radius:"
    " 0; }\nfigure svg + svg.wide { margin-top: 16px; }\ntable.layers { font-size:"
    " 13px; min-width: 820px; } .layers .number { text-align: right; white-space:"
    " nowrap; }\n.layers .number + :not(.number) { padding-left: 12px; }\n.layers tr"
    " > :nth-child(1):not([colspan]), .layers tr > :nth-child(3) { white-space:"
    " nowrap; }\n.layers tr > :nth-child(6) { min-width: 90px; }\n.layers thead th {"
    " border-bottom: 1px solid var(--faint); }\n.layers td { padding-top: 4px;"
    " padding-bottom: 4px; color: var(--soft); border: 0;\n  border-top: 1px solid"
    " var(--line); } .layers tr.more td { border-top: 0; padding-top: 0; }\n.layers"
    " td.name { color: var(--ink); font: 12px/1.6 ui-monospace, SFMono-Regular,"
    " Menlo, Consolas, monospace; }\n.layers th[scope=rowgroup] { color: var(--ink);"
    " font-weight: 600; padding-top: 16px; }\n.layers b { color: var(--ink);"
    " font-weight: 600; }\n"
)


def write_page(
    found: Found,
    path: Path,
    name: str = "model",
    mixture: Mixture | None = None,
) -> None:
    """Write the page; ``path`` is the whole page or what it was.

    Args:
        name: what the model is called.
        mixture: how schemes were chosen, where they were.

    Raises:
        OSError: the folder cannot be written to.
    """
    write_whole(path, render(found, name, mixture))


def render(found: Found, name: str = "model", mixture: Mixture | None = None) -> str:
    """The text of the page; arguments as of ``write_page``."""
    parts = [
        _header(found, name, mixture),
        _errors(found.report),
        _mixture(mixture),
        _experts(found.report),
    ]
    return document(
        f"{name}: quantization report",
        [*parts, _layers(found.report), _rest(found.report)],
        _STYLE,
    )


def _header(found: Found, name: str, mixture: Mixture | None) -> str:
    report = found.report
    weights = Counter(
        str(spec.weight.dtype.name) for spec in report.quantized.values() if spec.weight
    )
    kinds = ", ".join(f"{count} {kind}" for kind, count in weights.most_common(3))
    rows = [
        ("Layers quantized", f"{len(report.quantized):,}", kinds),
        ("Stay float", f"{len(report.kept):,}", ""),
    ]
    if found.before is not None and found.after is not None:
        more = (
            f"{100 * (found.after / found.before - 1):+.2f} % from {found.before:.4f}"
        )
        rows.append(("Perplexity", f"{found.after:.4f}", more))
    if mixture is not None:
        more = f"{len(mixture.groups)} groups of layers"
        rows.append(("Bits for a weight", f"{mixture.bits:.3f}", more))
    rows.append(("Size", size(found.estimate.disk), "of the checkpoint, as estimated"))
    names = f'<p class="names">{escape(name)}</p>'
    notes = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    noted = (
        f"<details open><summary>Notes</summary><ul>{notes}</ul></details>"
        if notes
        else ""
    )
    return (
        "<header>\n<h1>Quantization"
        f" report</h1>\n{names}\n{facts(rows)}\n{noted}</header>"
    )


def _figure(
    drawn: Iterable[Callable[[float, float, str], str]],
    key: str,
    heights: tuple[float, float],
) -> str:
    """Drawings for wide and for narrow windows, and what their colours stand for."""
    drawn = list(drawn)
    wide = "".join(draw(1000.0, heights[0], "wide") for draw in drawn)
    narrow = "".join(draw(380.0, heights[1], "narrow") for draw in drawn)
    return f'<figure class="card">{wide}{narrow}<ul class="key">{key}</ul></figure>'


def _errors(report: TorchReport) -> str:
    if not any(map(shown, report.outcomes)):
        return ""
    gains = report.gains()
    key = "".join(
        f'<li class="{series(place)}"><i class="own"></i>{escape(each)}:'
        f" {escape(gains[each])}</li>"
        for place, each in enumerate(algorithms_of(report))
    )
    figure = _figure([lambda *size: errors(report, *size)], key, (340.0, 300.0))
    return (
        '<section>\n<h2>Errors along the model</h2>\n<p class="note">Of what a layer'
        " computes on the data: the mean squared error as a share of the mean square"
        " of what the float one computes. Rings: before an algorithm; dots: behind it."
        f" Lines are those of whole blocks.{_hidden(report)}</p>\n{figure}\n</section>"
    )


def _hidden(report: TorchReport) -> str:
    """What a logarithmic scale has no place for: errors that are counted from another one, and may
    be below 0.
    """
    count = sum(
        bool(each.before or each.after) and not shown(each) for each in report.outcomes
    )
    return (
        f" {count} that are below 0, or no number, are in the table alone."
        if count
        else ""
    )


def _mixture(mixture: Mixture | None) -> str:
    if mixture is None:
        return ""
    chosen = Counter(group.chosen.scheme for group in mixture.groups)
    key = "".join(
        f'<li class="{series(place)}"><i class="own"></i>{escape(each)}: {chosen[each]}'
        f" of {len(mixture.groups)}</li>"
        for place, each in enumerate(mixed.schemes_of(mixture))
    )
    drawn = [
        lambda *size: mixed.bits(mixture, *size),
        lambda *size: mixed.divergences(mixture, *size),
    ]
    return (
        '<section>\n<h2>Mixed precision</h2>\n<p class="note">Bits for each weight of'
        " a group of layers, scales included; below, how far what the model predicts"
        " moves if that group alone is quantized, at each scheme. What was chosen is"
        f" filled; all groups together: {short(mixture.divergence)} nats for each"
        f" token.</p>\n{_figure(drawn, key, (240.0, 220.0))}\n</section>"
    )


def _experts(report: TorchReport) -> str:
    drawn = experts(report, 1000.0, "wide") + experts(report, 380.0, "narrow")
    if not drawn:
        return ""
    most = max(tokens for row in tokens_of(report).values() for tokens in row.values())
    key = (
        f'<li><i class="most"></i>{most:,} tokens</li><li><i class="bad"></i>none</li>'
    )
    return (
        '<section>\n<h2>Tokens of experts</h2>\n<p class="note">How many tokens of the'
        " data were sent to each expert: the stronger the colour, the more. What an"
        " algorithm knows of an expert, it knows from them.</p>\n<figure"
        f' class="card">{drawn}<ul class="key">{key}</ul></figure>\n</section>'
    )


def _layers(report: TorchReport) -> str:
    found = dict[str, list[Outcome]]()
    for outcome in report.outcomes:
        found.setdefault(outcome.layer, []).append(outcome)
    names = list(report.quantized)
    whole = "".join(
        _row("", None, each, place) for place, each in enumerate(found.get("", ()))
    )
    bodies = [f"<tbody>{whole}</tbody>"] if whole else []
    for block, own in groupby(names, block_of):
        rows = "".join(
            _row(block, None, each, place)
            for place, each in enumerate(found.get(block, ()))
        )
        rows = "" if block in report.quantized else rows
        for name in own:
            spec = report.quantized[name]
            entries: list[Outcome | None] = list(found.get(name, ())) or [None]
            rows += "".join(
                _row(name, spec, each, place) for place, each in enumerate(entries)
            )
        bodies.append(
            '<tbody><tr><th colspan="6"'
            f' scope="rowgroup">{escape(block)}</th></tr>{rows}</tbody>',
        )
    head = "".join(f"<th>{each}</th>" for each in ("layer", "format", "algorithm"))
    head += '<th class="number">before</th><th class="number">after</th><th>note</th>'
    table = (
        f'<table class="layers"><thead><tr>{head}</tr></thead>{"".join(bodies)}</table>'
    )
    return (
        '<section>\n<h2>Layers</h2>\n<div class="card'
        f' scroll">{table}</div>\n</section>'
        if names
        else ""
    )


def _row(name: str, spec: LayerSpec | None, outcome: Outcome | None, place: int) -> str:
    """A row of the table; what stands in the row above is left out."""
    block = block_of(name)
    local = (
        name.removeprefix(f"{block}.")
        if name != block
        else "the whole block"
        if spec is None
        else name
    )
    local = local if name else "the whole model"
    start = "<tr class='more'><td></td><td></td>"
    if not place:
        start = (
            f'<tr><td class="name">{escape(local)}</td><td>{escape(_words(spec))}</td>'
        )
    if outcome is None:
        return (
            f'{start}<td></td><td class="number"></td><td'
            ' class="number"></td><td></td></tr>'
        )
    told = outcome.before or outcome.after
    numbers = [
        f"{each:#.3g}".replace("-", "−") if told else "–"
        for each in (outcome.before, outcome.after)
    ]
    better = "<b>{}</b>" if outcome.after < outcome.before else "{}"
    return (
        f"{start}<td>{escape(outcome.algorithm)}</td><td"
        f' class="number">{numbers[0]}</td>'
        f'<td class="number">{better.format(numbers[1])}</td><td>{escape(outcome.note)}</td></tr>'
    )


def _words(spec: LayerSpec | None) -> str:
    """How a layer is quantized, its parts by their names but the weight."""
    if spec is None:
        return ""
    parts = [("", spec.weight), ("input ", spec.input), ("output ", spec.output)]
    parts.append(("probabilities ", spec.probabilities))
    return "; ".join(f"{name}{each}" for name, each in parts if each is not None)


def _rest(report: TorchReport) -> str:
    if not report.kept:
        return ""
    entries = "".join(
        f"<li>{escape(name)}: {escape(reason)}</li>"
        for name, reason in report.kept.items()
    )
    count = len(report.kept)
    return (
        f"<section>\n<h2>Stays float</h2>\n<details><summary>{count}"
        f" layer{'s' * (count > 1)}, each with the"
        f" reason</summary><ul>{entries}</ul></details>\n</section>"
    )
