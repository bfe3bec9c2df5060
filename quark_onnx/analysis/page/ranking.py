"""The tensors that add noise, with causes and histograms."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from quark_onnx.analysis.findings import Cause, TensorError, WeightError
from quark_onnx.analysis.page.against_grid import against_grid
from quark_onnx.page.blocks import Figure, Ranking, RankingEntry, Share, Terms
from quark_onnx.page.svg import short
from quark_onnx.report import percentage

#: Maximum number of causes of a tensor.
_CAUSES = 4
_SCOPES = {
    "tensor": ", one scale",
    "channel": ", widest of the channels",
    "block": ", widest of the blocks",
}
READING = Terms(
    "How to read this",
    (
        (
            "SQNR",
            "10 log10(Σ float² / Σ error²), in dB, over all samples. 20 dB is an error of a"
            " tenth of the signal.",
        ),
        ("inputs", "The worst ratio among the tensors that this one is computed of."),
        (
            "alone",
            "The ratio if all tensors before it were float: its operator's weights, the grids"
            " of its inputs and its own grid are left.",
        ),
        ("bar", "The share of the tensor's noise that a cause makes, an estimate."),
        (
            "clipped",
            "Values more than half a step outside what the codes can represent. Histograms"
            " show float values, the shaded range is the grid, counts are on a logarithmic"
            " scale.",
        ),
    ),
)


def noise_ranking(
    ranking: Sequence[TensorError], weights: Sequence[WeightError]
) -> Ranking:
    """Return the ranking of tensors by added noise, with the weights of their operators."""
    return Ranking(
        "Where noise is added",
        "by the noise that a tensor adds, most of it first; 'alone' is its error if all tensors"
        " before it were float",
        [_entry(tensor, weights) for tensor in ranking],
        "No tensor differs from the float model's.",
        "tensor",
        "worst",
    )


def _entry(tensor: TensorError, weights: Sequence[WeightError]) -> RankingEntry:
    ratios = (
        ("SQNR", _ratio(tensor.sqnr)),
        ("inputs", _ratio(tensor.sqnr_inputs)),
        ("alone", _ratio(tensor.sqnr_local)),
    )
    # The weight that the causes cite or the node reads.
    cited = {option for cause in tensor.causes for option in cause.options}
    read = [
        weight
        for weight in weights
        if weight.histogram is not None
        and (weight.node == tensor.node or weight.node in cited)
    ]
    figures = [_activation(tensor)] if tensor.histogram is not None else []
    figures += [_weight(weight) for weight in read[:1]]
    shares = [_share(cause) for cause in tensor.causes[:_CAUSES]]
    return RankingEntry(tensor.name, _origin(tensor), ratios, shares, figures)


def _origin(tensor: TensorError) -> str:
    """Return operator, node and format of a tensor in words."""
    text = f"input of the model, {tensor.format or 'float'}"
    if tensor.node:
        text = f"{tensor.op_type} {tensor.node}, {tensor.format or 'float'}"
    if tensor.rescaled:
        text += (
            "; its channels have other scales in the quantized model, which were taken"
            " out"
        )
    return text


def _share(cause: Cause) -> Share:
    options = " ".join(shlex.quote(option) for option in cause.options)
    return Share(cause.share, cause.text, cause.remedy, options)


def _activation(tensor: TensorError) -> Figure:
    """Return the histogram of an activation against its grid."""
    assert tensor.histogram is not None
    text = f"against {tensor.format}" if tensor.format else "not rounded"
    if tensor.step is not None:
        text += f", step {short(tensor.step)}"
    clipped = tensor.clipped_low + tensor.clipped_high
    plot = against_grid(
        f"Histogram of {tensor.name} against its grid",
        tensor.histogram,
        tensor.grid_lo,
        tensor.grid_hi,
        tensor.step,
    )
    complaint = f"{percentage(clipped)} clipped" if clipped else ""
    return Figure(plot, "Activation", text, complaint)


def _weight(weight: WeightError) -> Figure:
    """Return the histogram of a weight against its grid."""
    assert weight.histogram is not None
    text = f"against {weight.format or 'its rounding'}"
    text += f"{_SCOPES.get(weight.granularity, '')}; {_ratio(weight.sqnr)}"
    ends = (weight.grid_lo, weight.grid_hi, weight.step)
    if weight.rescaled:
        # the histogram has the float model's scales, the grid has others
        ends = (None, None, None)
    title = f"Histogram of {weight.name} against its grid"
    return Figure(against_grid(title, weight.histogram, *ends), "Weight", text)


def _ratio(ratio: float | None) -> str:
    """Return an SQNR in words: a number, "exact" or "lost"."""
    if ratio is None or math.isnan(ratio):
        return "–"
    if math.isinf(ratio):
        return "exact" if ratio > 0 else "lost"
    return f"{ratio:.1f} dB".replace("-", "−")
