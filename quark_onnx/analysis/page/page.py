"""HTML page of an analysis, in a self-contained file."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from html import escape
from pathlib import Path

from quark_onnx.analysis.findings import (
    Analysis,
    Cause,
    TensorError,
    WeightError,
)
from quark_onnx.analysis.page.against_grid import against_grid
from quark_onnx.analysis.page.along import along, family
from quark_onnx.common.containers import flattened
from quark_onnx.common.wording import byte_size, tally
from quark_onnx.page import Action, document, facts, grouped, verdict, write_whole
from quark_onnx.page.svg import short
from quark_onnx.report import percentage
from quark_onnx.report.measure import OutputError

#: Tensors in the ranking (as many have histograms), and causes shown of each.
_TOP = 12
_CAUSES = 4


def write_page(
    found: Analysis,
    path: Path,
    before: str = "float model",
    after: str = "quantized model",
) -> None:
    """Write the page of an analysis.

    The file is written atomically.

    Args:
        found: the analysis.
        path: path of the HTML file.
        before: title of the float model.
        after: title of the quantized model.

    Raises:
        OSError: the folder cannot be written to.
    """
    write_whole(path, render(found, before, after))


def render(
    found: Analysis,
    before: str = "float model",
    after: str = "quantized model",
) -> str:
    """Return the page's HTML.

    Args:
        found: the analysis.
        before: title of the float model.
        after: title of the quantized model.
    """
    body = [
        _header(found, before, after),
        _graph(found),
        _ranking(found),
        _rest(found),
        _READING,
    ]
    return document(f"{after}: quantization analysis", body)


def _header(found: Analysis, before: str, after: str) -> str:
    formats = Counter(
        tensor.format for tensor in found.tensors if tensor.format
    ).most_common(2)
    kinds = tally(formats) or "none quantized"
    worst = _worst_output(found)
    figures = [
        (
            "Output SQNR",
            _ratio(found.sqnr),
            f"at {worst.name}" if worst else "no float output",
        ),
        ("Size", byte_size(found.bytes_after), _size_before(found)),
        ("Samples", f"{found.samples:,}", "run by both models"),
        ("Tensors compared", f"{len(found.tensors):,}", kinds),
        ("Constants", f"{len(found.weights):,}", "weights and biases"),
    ]
    return (
        f'<header>\n<h1>Quantization analysis</h1>\n<p class="names">{escape(before)} →'
        f" {escape(after)}</p>\n{_verdict(found)}\n{facts(figures)}\n</header>"
    )


def _worst_output(found: Analysis) -> OutputError | None:
    """Return the float output with the least SQNR; None without a float output."""
    measured = [output for output in found.outputs if output.sqnr is not None]
    return min(measured, key=lambda output: output.sqnr or 0.0, default=None)


def _size_before(found: Analysis) -> str:
    """Return the size before; the ratio appears only for a smaller file."""
    before = byte_size(found.bytes_before)
    ratio = f"{found.bytes_before / max(1, found.bytes_after):.2f}"
    if float(ratio) > 1:
        return f"{ratio}× smaller than {before}"
    return f"{before} before"


def _graph(found: Analysis) -> str:
    # The key names the families that occur, in the order of the graph.
    used = dict.fromkeys(family(tensor.op_type) for tensor in found.tensors)
    key = "".join(f'<li><i class="{name}"></i>{title}</li>' for name, title in used)
    if math.isfinite(found.sqnr):
        key += f'<li><i class="dash"></i>output, {_ratio(found.sqnr)}</li>'
    # Both are drawn; the style sheet shows the one that fits the screen.
    plots = along(found, 1000, 330, "wide") + along(found, 380, 300, "narrow")
    return (
        '<section>\n<h2>Error along the graph</h2>\n<p class="note">Filled: the error'
        " with everything before it quantized. Rings: what the tensor&rsquo;s own"
        " operator and grid add, with everything before it float. Numbers are places"
        f' in the ranking below.</p>\n<figure class="card">{plots}<ul'
        f' class="key">{key}<li><i'
        ' class="ring"></i>alone</li></ul></figure>\n</section>'
    )


def _ranking(found: Analysis) -> str:
    worst = found.ranking[:_TOP]
    if not worst:
        nothing = "<p>No tensor differs from the float model&rsquo;s.</p>"
        return f"<section>\n<h2>Where noise is added</h2>\n{nothing}\n</section>"
    items = "\n".join(
        _item(place, tensor, _weights_of(tensor, found))
        for place, tensor in enumerate(worst, 1)
    )
    return (
        '<section>\n<h2>Where noise is added</h2>\n<p class="note">By the noise that a'
        " tensor adds, most of it first. A bar is the share of the tensor&rsquo;s"
        " noise that a cause makes; shares are estimates.</p>\n<ol"
        f' class="rank">{items}</ol>\n</section>'
    )


def _weights_of(tensor: TensorError, found: Analysis) -> list[WeightError]:
    """Return the weight with a histogram that the causes cite or the node reads."""
    cited = set(flattened(cause.options for cause in tensor.causes))
    return [
        w
        for w in found.weights
        if w.histogram is not None and (w.node == tensor.node or w.node in cited)
    ][:1]


def _item(place: int, tensor: TensorError, weights: list[WeightError]) -> str:
    """Return the entry of a tensor in the ranking: ratios, causes and plots.

    Args:
        place: place in the ranking, from 1.
        tensor: error of the tensor.
        weights: weights to plot beside the tensor.
    """
    ratios = {
        "SQNR": tensor.sqnr,
        "inputs": tensor.sqnr_inputs,
        "alone": tensor.sqnr_local,
    }
    figures = "".join(
        f"<div><dt>{title}</dt><dd>{_ratio(ratio)}</dd></div>"
        for title, ratio in ratios.items()
    )
    causes = "".join(map(_cause, tensor.causes[:_CAUSES]))
    if causes:
        causes = f'<ul class="causes">{causes}</ul>'
    plots = _activation_plot(tensor) + "".join(map(_weight_plot, weights))
    if plots:
        plots = f'<div class="plots">{plots}</div>'
    return (
        '<li class="card"><div class="head"><span'
        f' class="place">{place}</span><div><h3>{escape(tensor.name)}</h3><div'
        f' class="what">{escape(_origin(tensor))}</div></div><dl'
        f' class="ratios">{figures}</dl></div>{causes}{plots}</li>'
    )


def _origin(tensor: TensorError) -> str:
    """Return operator, node and format of a tensor in words."""
    text = "input of the model"
    if tensor.node:
        text = f"{tensor.op_type} {tensor.node}, {tensor.format or 'float'}"
    if tensor.rescaled:
        text += (
            "; its channels have other scales in the quantized model, which were taken"
            " out"
        )
    return text


def _cause(cause: Cause) -> str:
    # A bar of 0 or 1 % would not be visible.
    percent = max(2, round(100 * cause.share))
    # One span for each word: the style sheet keeps the option unbroken.
    words = [f"<span>{escape(shlex.quote(word))}</span>" for word in cause.options]
    option = ""
    if words:
        option = f": <code>{' '.join(words)}</code>"
    return (
        f'<li><div class="share" title="{percent} % of the noise"><i'
        f' style="width:{percent}%"></i></div><div><p>{escape(cause.text)}</p><p'
        f' class="remedy">{escape(cause.remedy)}{option}</p></div></li>'
    )


def _activation_plot(tensor: TensorError) -> str:
    """Return the histogram of an activation against its grid; empty without one."""
    if tensor.histogram is None:
        return ""
    clipped = tensor.clipped_low + tensor.clipped_high
    caption = "<b>Activation</b>, not rounded"
    if tensor.format:
        caption = f"<b>Activation</b> against {escape(tensor.format)}"
    if tensor.step is not None:
        caption += f", step {short(tensor.step)}"
    if clipped:
        caption += f"; <em>{percentage(clipped)} clipped</em>"
    title = f"Histogram of {tensor.name} against its grid"
    plot = against_grid(
        title,
        tensor.histogram,
        tensor.grid_lo,
        tensor.grid_hi,
        tensor.step,
    )
    return f"<figure><figcaption>{caption}</figcaption>{plot}</figure>"


def _weight_plot(weight: WeightError) -> str:
    """Return the histogram of a weight against its grid; empty without one."""
    if weight.histogram is None:
        return ""
    scope = {
        "tensor": "one scale",
        "channel": "widest of the channels",
        "block": "widest of the blocks",
    }
    caption = f"<b>Weight</b> against {escape(weight.format) or 'its rounding'}"
    if weight.granularity in scope:
        caption += f", {scope[weight.granularity]}"
    caption += f"; {_ratio(weight.sqnr)}"
    title = f"Histogram of {weight.name} against its grid"
    ends = (weight.grid_lo, weight.grid_hi, weight.step)
    if weight.rescaled:
        # the histogram has the float model's scales, the grid has others
        ends = (None, None, None)
    plot = against_grid(title, weight.histogram, *ends)
    return f"<figure><figcaption>{caption}</figcaption>{plot}</figure>"


def _rest(found: Analysis) -> str:
    if not found.unmatched:
        return ""
    reasons = [(entry.name, entry.reason) for entry in found.unmatched]
    listed = grouped(reasons, "tensor or constant", "tensors and constants")
    return f"<section>\n<h2>Not compared</h2>\n{listed}\n</section>"


def _verdict(found: Analysis) -> str:
    """Return the verdict with the noisiest tensor, and the changes to try."""
    judged = found.verdict
    if judged is None:
        return verdict("unknown", "no sample was run")
    sentence = f"{judged.sentence}, on {judged.measured_on}"
    if found.ranking:
        first = found.ranking[0]
        sentence += (
            f"; {first.op_type} {first.node or first.name} adds most of the noise"
        )
    steps = [
        Action(f"{step.text}:", step.options or step.call) for step in judged.next_steps
    ]
    return verdict(judged.band, sentence, steps)


def _ratio(ratio: float | None) -> str:
    """Return an SQNR in words: a number, "exact" or "lost"."""
    if ratio is None or math.isnan(ratio):
        return "<span>–</span>"
    if math.isinf(ratio):
        return "<span>exact</span>" if ratio > 0 else "<span>lost</span>"
    return f"{ratio:.1f} <span>dB</span>".replace("-", "−")


_READING = """<section>
<h2>How to read this</h2>
<dl class="read">
<div><dt>SQNR</dt><dd>10 log10(Σ float² / Σ error²), in dB, over all samples. 20 dB is an error of a tenth of the
signal.</dd></div>
<div><dt>inputs</dt><dd>The worst ratio among the tensors that this one is computed of.</dd></div>
<div><dt>alone</dt><dd>The ratio if all tensors before it were float: its operator&rsquo;s weights, the grids of its
inputs and its own grid are left.</dd></div>
<div><dt>clipped</dt><dd>Values more than half a step outside what the codes can represent. Histograms show
float values, the shaded range is the grid, counts are on a logarithmic scale.</dd></div>
</dl>
</section>"""  # noqa: E501
