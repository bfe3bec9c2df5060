"""Page of a run: figures, errors, a mixture, experts, and a table of layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from quark_onnx.common.wording import counted, first_of, tally
from quark_onnx.page import Action, document, facts, grouped, verdict, write_whole
from quark_onnx.page.svg import short
from quark_onnx.report import percentage
from quark_onnx.report.verdict.verdict import THRESHOLDS
from quark_onnx.torch.algorithms.base import Outcome
from quark_onnx.torch.config.spec import LayerSpec
from quark_onnx.torch.page import mixture as mixed
from quark_onnx.torch.page.errors import errors, shown
from quark_onnx.torch.page.experts import experts, most_tokens, tokens_of
from quark_onnx.torch.page.frame import STYLE, block_of, series
from quark_onnx.torch.pipelines.estimate import size
from quark_onnx.torch.pipelines.mixed_precision import Mixture
from quark_onnx.torch.pipelines.ptq import PtqResult as Found
from quark_onnx.torch.pipelines.report import TorchReport
from quark_onnx.torch.pipelines.verdict import file_size

_STYLE = (
    STYLE
    + "svg .cell { fill: var(--accent); } svg .none { fill: none; stroke: var(--bad);"
    " stroke-width: 1; }\n.key i.most { background: var(--accent); border-radius: 0;"
    " }\n.key i.bad { background: none; border: 1px solid var(--bad); border-radius:"
    " 0; }\nfigure svg + svg.wide { margin-top: 16px; }\ntable.layers { font-size:"
    " 13px; width: 100%; } .layers .number { text-align: right; white-space:"
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
    "table.layers, table.formats { min-width: 0; }\n"
    "table.formats { font-size: 13px; width: 100%; }\n"
    ".formats td, .formats th { overflow-wrap: anywhere; color: var(--soft);"
    " padding: 4px 12px 4px 0; text-align: left; vertical-align: top; }\n"
    ".formats tr > :nth-child(2) { overflow-wrap: normal; white-space: nowrap; }\n"
    # on a phone a row becomes a block of lines, each with the name of its column
    "@media (max-width: 680px) {\n"
    "  table.layers, .layers tbody, .layers tr, .layers td, .layers th { display:"
    " block; }\n"
    "  .layers thead { display: none; }\n"
    "  .layers td, .layers td.name, .layers .number, .layers tr > :nth-child(n), .layers .number +"
    " :not(.number) {"
    " white-space: normal; overflow-wrap: anywhere; text-align: left; min-width: 0;"
    " border: 0; padding: 1px 0; }\n"
    "  .layers td:empty { display: none; }\n"
    '  .layers td[data-column]::before { content: attr(data-column) ": "; color:'
    " var(--soft); }\n"
    "  .layers tr { border-top: 1px solid var(--line); padding: 4px 0; }\n"
    "}\n"
)


#: Maximum number of layer names per format.
_NAMED = 8
#: The columns of the table of layers.
_HEAD = (
    "<th>layer</th><th>other format</th><th>algorithm</th>"
    '<th class="number">before</th><th class="number">after</th><th>note</th>'
)


def write_page(
    found: Found,
    path: Path,
    name: str = "model",
    mixture: Mixture | None = None,
) -> None:
    """Write the page atomically.

    Args:
        found: the result of ``ptq``.
        path: the file.
        name: the name of the model.
        mixture: the result of a mixed-precision search, if there was one.

    Raises:
        OSError: the folder cannot be written to.
    """
    write_whole(path, render(found, name, mixture))


def render(found: Found, name: str = "model", mixture: Mixture | None = None) -> str:
    """Return the text of the page; the arguments are those of ``write_page``."""
    parts = [
        _header(found, name, mixture),
        _errors(found.report),
        _mixture(mixture),
        _experts(found.report),
    ]
    return document(
        f"{name}: quantization report",
        [*parts, _formats(found.report), _layers(found.report), _rest(found.report)],
        _STYLE,
    )


def _header(found: Found, name: str, mixture: Mixture | None) -> str:
    report = found.report
    # Layers with a float weight, whose activations alone are rounded, are not counted.
    weights = Counter(
        str(spec.weight.dtype.name) for spec in report.quantized.values() if spec.weight
    )
    kinds = tally(weights.most_common(3))
    rows = [
        ("Layers quantized", f"{len(report.quantized):,}", kinds),
        ("Stay float", f"{len(report.kept):,}", ""),
    ]
    # Perplexity is measured on request.
    if found.before is not None and found.after is not None:
        more = (
            f"{100 * (found.after / found.before - 1):+.2f} % from {found.before:.4f}"
        )
        rows.append(("Perplexity", f"{found.after:.4f}", more))
    if mixture is not None:
        more = f"{counted(len(mixture.groups), 'group')} of layers"
        rows.append(("Bits per weight", f"{mixture.bits:.3f}", more))
    rows += _verdict_facts(found)
    names = f'<p class="names">{escape(name)}</p>'
    notes = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    if notes:
        noted = f"<details open><summary>Notes</summary><ul>{notes}</ul></details>"
    else:
        noted = ""
    return (
        "<header>\n<h1>Quantization"
        f" report</h1>\n{names}\n{_verdict(found)}\n{facts(rows)}\n{noted}</header>"
    )


def _verdict_facts(found: Found) -> list[tuple[str, str, str]]:
    """Return sizes, and the figures of the comparison with the float model."""
    judged = found.verdict
    # Nothing was compared with the float model, so sizes are estimates.
    if judged is None:
        return [("Size", size(found.estimate.disk), "of the checkpoint, as estimated")]
    # No division by 0 for a model without weights.
    share = 100 * judged.bytes_after / max(judged.bytes_before, 1)
    more = f"{share:.0f} % of {file_size(judged.bytes_before)}"
    rows = [
        ("Size", file_size(judged.bytes_after), more),
        ("Bits per weight", f"{judged.bits:.2f}", "of all layers"),
    ]
    if judged.quantized_bits is not None:
        bits = f"{judged.quantized_bits:.2f}"
        rows.append(("Bits per weight", bits, "of the quantized layers"))
    if judged.divergence is not None:
        more = f"nats a token, on {judged.tokens:,} tokens {judged.text}"
        rows.append(("Divergence", f"{judged.divergence:.4f}", more))
    return rows


def _verdict(found: Found) -> str:
    """Return the verdict: sizes and divergence, what to try next, and the largest errors."""
    judged = found.verdict
    if judged is None:
        return ""
    # Without a divergence, nothing is known of the quality.
    band: str = "unknown"
    if judged.divergence is not None:
        band = THRESHOLDS["language"][0].band(judged.divergence)
    # A good result needs no advice.
    if band == "good":
        return verdict(band, judged.sentence(), [])
    code = judged.command or judged.options
    if judged.advice:
        actions = [Action(judged.advice, code)]
    else:
        actions = []
    for name, error in judged.worst:
        option = f"--layer {name}=SCHEME"
        effect = f"error {percentage(error)}"
        actions.append(Action("use another scheme for a layer:", option, effect))
    return verdict(band, judged.sentence(), actions)


def _figure(
    drawn: Iterable[Callable[[float, float, str], str]],
    key: str,
    heights: tuple[float, float],
) -> str:
    """Render a drawing for wide and for narrow windows, with a legend."""
    wide = narrow = ""
    # Drawn twice. CSS shows one of both, by the width of the window.
    for draw in drawn:
        wide += draw(1000.0, heights[0], "wide")
        narrow += draw(380.0, heights[1], "narrow")
    return f'<figure class="card">{wide}{narrow}<ul class="key">{key}</ul></figure>'


def _key(labels: Iterable[str]) -> str:
    """Render a legend: a label for each series, in the order of their colours."""
    entries = ""
    for place, label in enumerate(labels):
        entries += (
            f'<li class="{series(place)}"><i class="own"></i>{escape(label)}</li>'
        )
    return entries


def _errors(report: TorchReport) -> str:
    if not any(map(shown, report.outcomes)):
        return ""
    # The gains are in the order of the algorithms, as their series are.
    key = _key(map(": ".join, report.gains().items()))
    figure = _figure([lambda *size: errors(report, *size)], key, (340.0, 300.0))
    return (
        '<section>\n<h2>Errors along the model</h2>\n<p class="note">Of what a layer'
        " computes on the data: the mean squared error as a share of the mean square"
        " of what the float one computes. Rings: before an algorithm; dots: behind it."
        f" Lines are those of whole blocks.{_hidden(report)}</p>\n{figure}\n</section>"
    )


def _hidden(report: TorchReport) -> str:
    """Return a note on errors that a logarithmic scale cannot show.

    Errors relative to a baseline may be negative.
    """
    count = len(list(filter(_is_hidden, report.outcomes)))
    if not count:
        return ""
    return f" {count} that are below 0, or no number, are in the table alone."


def _is_hidden(outcome: Outcome) -> bool:
    """Return whether an outcome has measured errors that the plot cannot show."""
    # Errors of 0 before and after mean that none was measured.
    return bool(outcome.before or outcome.after) and not shown(outcome)


def _mixture(mixture: Mixture | None) -> str:
    if mixture is None:
        return ""
    chosen = Counter(group.chosen.scheme for group in mixture.groups)
    count = len(mixture.groups)
    schemes = mixed.schemes_of(mixture)
    key = _key(f"{scheme}: {chosen[scheme]} of {count}" for scheme in schemes)
    drawn = [
        lambda *size: mixed.bits(mixture, *size),
        lambda *size: mixed.divergences(mixture, *size),
    ]
    return (
        '<section>\n<h2>Mixed precision</h2>\n<p class="note">Bits per weight of'
        " a group of layers, scales included; below, how far what the model predicts"
        " moves if that group alone is quantized, at each scheme. What was chosen is"
        f" filled; all groups together: {short(mixture.divergence)} nats for each"
        f" token.</p>\n{_figure(drawn, key, (240.0, 220.0))}\n</section>"
    )


def _experts(report: TorchReport) -> str:
    # CSS shows one of both, by the width of the window.
    drawn = experts(report, 1000.0, "wide") + experts(report, 380.0, "narrow")
    if not drawn:
        return ""
    most = most_tokens(tokens_of(report))
    key = (
        f'<li><i class="most"></i>{most:,} tokens</li><li><i class="bad"></i>none</li>'
    )
    return (
        '<section>\n<h2>Tokens of experts</h2>\n<p class="note">How many tokens of the'
        " data were sent to each expert: the stronger the colour, the more. What an"
        " algorithm knows of an expert, it knows from them.</p>\n<figure"
        f' class="card">{drawn}<ul class="key">{key}</ul></figure>\n</section>'
    )


def _formats(report: TorchReport) -> str:
    """Render a table of the formats with their layers."""
    named = dict[str, list[str]]()
    for name, spec in report.quantized.items():
        named.setdefault(_words(spec), []).append(name)
    if not named:
        return ""
    rows = ""
    # Formats with equal counts stay in the order of the model.
    for words, names in sorted(named.items(), key=lambda item: -len(item[1])):
        # Each block repeats the names of its layers.
        locals_ = dict.fromkeys(map(_local, names))
        own = first_of(list(locals_), _NAMED)
        rows += (
            f"<tr><td>{escape(words)}</td><td>{len(names)}</td>"
            f"<td>{escape(own)}</td></tr>"
        )
    head = "<th>format</th><th>layers</th><th>called</th>"
    return (
        '<section>\n<h2>Formats</h2>\n<div class="card"><table'
        f' class="formats"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>\n'
        "</section>"
    )


def _layers(report: TorchReport) -> str:
    """Render a table of layers; blocks with equal cells share an entry."""
    if not report.quantized:
        return ""
    found = dict[str, list[Outcome]]()
    for outcome in report.outcomes:
        found.setdefault(outcome.layer, []).append(outcome)
    words = Counter(map(_words, report.quantized.values()))
    # The most frequent format is named once, so that cells show exceptions alone.
    usual = words.most_common(1)[0][0]
    bodies = list[str]()
    # Outcomes without a layer belong to the whole model.
    if "" in found:
        bodies.append(f"<tbody>{_rows('the whole model', '', found[''])}</tbody>")
    entries = list[tuple[str, str]]()
    for block, own in groupby(report.quantized, block_of):
        rows = ""
        # A layer outside of blocks is a block of its own, and has its row below.
        if block not in report.quantized:
            rows = _rows("the whole block", "", found.get(block, ()))
        for name in own:
            own_words = _words(report.quantized[name])
            shown_words = own_words
            if own_words == usual:
                shown_words = ""
            # A layer without outcomes has one row.
            rows += _rows(_local(name), shown_words, found.get(name) or [None])
        entries.append((block, rows))
    # Blocks have equal rows if no algorithm has measured their errors.
    for rows, alike in groupby(entries, lambda entry: entry[1]):
        blocks = [block for block, _ in alike]
        if len(blocks) == 1:
            title = blocks[0]
        else:
            title = f"{blocks[0]} to {blocks[-1]}"
        bodies.append(
            '<tbody><tr><th colspan="6"'
            f' scope="rowgroup">{escape(title)}</th></tr>{rows}</tbody>',
        )
    table = (
        f'<table class="layers"><thead><tr>{_HEAD}</tr></thead>{"".join(bodies)}'
        "</table>"
    )
    return (
        '<section>\n<h2>Layers</h2>\n<p class="note">Layers without another format'
        f" have the usual one: {escape(usual)}.</p>\n"
        f'<div class="card scroll">{table}</div>\n</section>'
    )


def _rows(name: str, words: str, outcomes: Sequence[Outcome | None]) -> str:
    """Render the outcomes of a layer, a block or the model, one row each."""
    rows = ""
    for place, outcome in enumerate(outcomes):
        rows += _row(name, words, outcome, place)
    return rows


def _local(name: str) -> str:
    """Return the name of a layer within its block.

    >>> _local("model.layers.3.mlp.up_proj"), _local("lm_head")
    ('mlp.up_proj', 'lm_head')
    """
    return name.removeprefix(f"{block_of(name)}.")


def _row(label: str, words: str, outcome: Outcome | None, place: int) -> str:
    """Render a row of the table; repeated cells are empty.

    Args:
        label: the name of a layer within its block, or a different label.
        words: the format, if it is not the usual one.
        outcome: the outcome of an algorithm.
        place: index of the outcome among those of the layer.
    """
    start = "<tr class='more'><td></td><td></td>"
    if not place:
        start = (
            f'<tr><td class="name">{escape(label)}</td><td'
            f' data-column="format">{escape(words)}</td>'
        )
    if outcome is None:
        return (
            f'{start}<td></td><td class="number"></td><td'
            ' class="number"></td><td></td></tr>'
        )
    before = after = "–"
    # Errors of 0 before and after mean that none was measured.
    if outcome.before or outcome.after:
        before = _number(outcome.before)
        after = _number(outcome.after)
    if outcome.after < outcome.before:
        after = f"<b>{after}</b>"
    return (
        f'{start}<td data-column="algorithm">{escape(outcome.algorithm)}</td><td'
        f' class="number" data-column="before">{before}</td><td class="number"'
        f' data-column="after">{after}</td><td'
        f">{escape(outcome.note)}</td></tr>"
    )


def _number(error: float) -> str:
    """Return an error in three digits, with trailing zeros and a true minus."""
    return f"{error:#.3g}".replace("-", "−")


def _words(spec: LayerSpec) -> str:
    """Describe the specs of a layer; all but the weight's have a prefix."""
    parts = [("", spec.weight), ("input ", spec.input), ("output ", spec.output)]
    parts.append(("probabilities ", spec.probabilities))
    return "; ".join(f"{name}{each}" for name, each in parts if each is not None)


def _rest(report: TorchReport) -> str:
    if not report.kept:
        return ""
    listed = grouped(report.kept.items(), "layer", "layers")
    return f"<section>\n<h2>Stays float</h2>\n{listed}\n</section>"
