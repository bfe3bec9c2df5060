"""Causes of a tensor's noise, with figures and command-line options that fix them.

Noise is a power relative to the float tensor's power. The noise of a tensor is the sum of the noise
of its inputs, of the weights of its operator, of the operator's amplification, and of rounding and
clipping by its own grid. Errors count as independent, so the shares are estimates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from calibrators import Histogram
from quark_onnx.analysis.findings import Cause, TensorError, WeightError
from quark_onnx.analysis.reading import CodeGrid
from quark_onnx.analysis.statistics import TensorStatistic
from quark_onnx.report.figures import percentage
from quark_onnx.report.measure import decibels

#: Minimum share of the noise for a cause.
_LEAST = 0.2
#: Minimum amplification of noise to report.
_AMPLIFIED = 3.0
#: Operators whose results are known to need more bits.
DELICATE = frozenset(
    {
        "Softmax",
        "LayerNormalization",
        "SkipLayerNormalization",
        "InstanceNormalization",
        "GroupNormalization",
        "Exp",
        "Log",
        "Pow",
        "Div",
        "Sqrt",
        "Reciprocal",
        "Sigmoid",
        "HardSigmoid",
    },
)
#: Minimum number of channels for a meaningful median.
_MANY_CHANNELS = 4
#: Ratio of a channel's range to the median range above which the channel is an outlier.
_OUTLYING = 8
_MORE_BITS = ("--preset", "A16W8")
_PER_CHANNEL = ("--per-channel",)


@dataclass(frozen=True)
class TensorEvidence:
    """Observations of a tensor.

    Attributes:
        error: figures of the tensor, without causes.
        grid: grid of the tensor; None if the tensor stays float.
        statistic: statistics of the tensor's values.
        weights: constants that the tensor's operator reads.
        grids_before: sum of the noise-to-signal ratios of the input grids; None if a ratio is
            unknown.
    """

    error: TensorError
    grid: CodeGrid | None
    statistic: TensorStatistic
    weights: list[WeightError]
    grids_before: float | None = 0.0

    @property
    def noise(self) -> float:
        """Return the noise-to-signal ratio of the tensor as seen by consumers."""
        # Errors may cancel in the full run. The maximum keeps every share, a part by this noise, at
        # most 1.
        return max(nsr(self.error.sqnr), self.local)

    @property
    def local(self) -> float:
        """Return the noise-to-signal ratio with float inputs, or an estimate of it."""
        if self.error.sqnr_local is None:
            return self.error.added
        return nsr(self.error.sqnr_local)

    @property
    def added(self) -> float:
        """Return the noise-to-signal ratio with float inputs, less input grids.

        The operator's amplification of the input grids' noise stays included.
        """
        if self.error.sqnr_local is None:
            return self.error.added
        # A difference of two estimates can be slightly negative.
        return self.own + max(0.0, self.operator - (self.grids_before or 0.0))

    @property
    def own(self) -> float:
        """Return the noise-to-signal ratio of the tensor's own grid."""
        if self.grid is None:
            return 0.0
        if self.error.sqnr_grid is not None:
            return nsr(self.error.sqnr_grid)
        # Not observed: what inputs and weights do not explain is left to the grid.
        return max(0.0, self.noise - nsr(self.error.sqnr_inputs) - self.of_weights)

    @property
    def of_weights(self) -> float:
        """Return the mean noise-to-signal ratio due to the weights' errors."""
        return sum(
            nsr(weight.sqnr) for weight in self.weights if weight.role == "weight"
        )

    def of_bias(self, weight: WeightError) -> float:
        """Return the noise-to-signal ratio due to the error of a bias.

        Args:
            weight: error of the bias.

        Returns:
            The ratio, at most 1000; 0 for a tensor of zeros.
        """
        # Mean square of the tensor over all samples and channels.
        signal = self.statistic.total("signal") / max(1, self.statistic.count)
        if not signal:
            return 0.0
        # Mean square of the bias error by the mean square of the tensor to which the bias is
        # added.
        return min(1e3, nsr(weight.sqnr) * weight.rms**2 / signal)

    @property
    def operator(self) -> float:
        """Return the noise-to-signal ratio of the operator's result on float inputs."""
        if self.error.sqnr_local is None:
            return self.of_weights
        return max(0.0, nsr(self.error.sqnr_local) - self.own)

    @property
    def heavier(self) -> float:
        """Return the operator's amplification of the noise of weights and inputs."""
        if self.grids_before is None or self.error.sqnr_local is None:
            return 1.0
        biases = sum(
            self.of_bias(weight) for weight in self.weights if weight.role == "bias"
        )
        # Relative noise powers of independent errors add up. In a product each factor's ratio
        # counts fully, so that a factor of 1 is expected.
        brought = self.of_weights + biases + self.grids_before
        if not brought:
            return 1.0
        return self.operator / brought

    @property
    def inherited(self) -> float:
        """Return the noise-to-signal ratio that comes from further upstream."""
        if self.error.sqnr_local is not None:
            return max(0.0, self.noise - self.local)
        return min(self.noise, nsr(self.error.sqnr_inputs))


def nsr(sqnr: float) -> float:
    """Convert SQNR in dB to a noise-to-signal ratio, at most 1000.

    >>> nsr(20.0), nsr(math.inf), nsr(-math.inf)
    (0.01, 0.0, 1000.0)
    """
    if math.isfinite(sqnr):
        noise: float = 10.0 ** (-sqnr / 10)
        # The limit is -30 dB, where nothing of the signal is left. Sums and shares stay finite.
        return min(1e3, noise)
    return 0.0 if sqnr > 0 else 1e3


def causes_of(evidence: TensorEvidence) -> list[Cause]:
    """Return the causes of a tensor's noise, largest share first.

    Args:
        evidence: observations of the tensor.

    Returns:
        Causes; empty without noise.
    """
    # Without noise all shares would be 0 / 0.
    if not evidence.noise:
        return []
    if evidence.error.rescaled:
        text = (
            "the channels were rescaled in the quantized model, so the noise cannot be"
            " split into parts"
        )
        return [
            Cause(
                "rescaled",
                text,
                0.0,
                "analyze against the equalized float model, if there is one",
            ),
        ]
    added = min(1.0, evidence.local / evidence.noise)
    causes = [
        *_added_causes(evidence, added),
        *_of_shift(evidence),
        *_from_upstream(evidence),
    ]
    # A tensor that adds noise itself shows its own causes before the inherited ones, whatever their
    # shares: the inherited ones are fixed elsewhere.
    own_first = added > _LEAST / 2
    return sorted(
        causes,
        key=lambda cause: (own_first and cause.kind == "inherited", -cause.share),
    )


def _added_causes(evidence: TensorEvidence, added: float) -> list[Cause]:
    """Return the causes of the share of the noise that the operator and its grid add.

    Those of less than ``_LEAST`` of that share count only if there are no others.
    """
    causes = list[Cause]()
    for threshold in (_LEAST, _LEAST / 2, 0.0):
        # lower the threshold until a cause exceeds it
        if not causes:
            least = threshold * added
            causes += _of_grid(evidence, least)
            causes += _of_weights(evidence, least)
            causes += _of_operator(evidence, least)
    return causes


# -- its own grid
# --------------------------------------------------------------------------------------


def _of_grid(evidence: TensorEvidence, least: float) -> Iterator[Cause]:
    """Yield the clipping and the rounding of a tensor by its own grid.

    Args:
        evidence: observations of the tensor.
        least: share of the tensor's noise that a cause must exceed.
    """
    error, grid = evidence.error, evidence.grid
    # The parts are measured apart, and may exceed the noise of the full run a little.
    own = min(1.0, evidence.own / evidence.noise)
    if grid is None or own <= least:
        return
    clip_share = error.clip_noise
    if error.sqnr_grid is None:
        # 2 % of clipped values or more count as all of the noise.
        clip_share = min(1.0, 50 * (error.clipped_low + error.clipped_high))
    clipped = own * clip_share
    if clipped > least and (error.clipped_low or error.clipped_high):
        yield _clipping(error, clipped)
    # What is not clipping is rounding: both come from one grid, and their squared errors add up.
    rounded = own - clipped
    if rounded <= least:
        return
    causes = [
        _delicate_operator(error, grid, rounded),
        _outlier_channel(evidence, grid, rounded),
        _spread(evidence, grid, rounded),
    ]
    if not any(causes):
        text = _rounding_text(error, grid)
        remedy = "give activations more bits"
        yield Cause("rounding", text, rounded, remedy, _MORE_BITS)
    yield from [cause for cause in causes if cause is not None]


def _delicate_operator(
    error: TensorError, grid: CodeGrid, share: float
) -> Cause | None:
    """Return the cause for an operator that is known to need more than 8 bits, if it has fewer."""
    if error.op_type not in DELICATE or not 0 < grid.bits <= 8:
        return None
    text = (
        f"operator {error.op_type} at {grid.bits} bits ({grid.format}): its small"
        " values matter"
    )
    remedy = "keep the operator in float"
    return Cause("operator", text, share, remedy, _exclude(error))


def _clipping(error: TensorError, share: float) -> Cause:
    """Return the clipping of values beyond the grid as a cause.

    Args:
        error: figures of the tensor, of which some values are clipped.
        share: share of clipping in the tensor's noise.
    """
    parts = []
    if error.clipped_high and error.grid_hi is not None:
        parts.append(
            f"{percentage(error.clipped_high)} of the values lie above"
            f" {_figure(error.grid_hi)} (up to {_figure(error.hi)})",
        )
    if error.clipped_low and error.grid_lo is not None:
        parts.append(
            f"{percentage(error.clipped_low)} lie below {_figure(error.grid_lo)} (down to"
            f" {_figure(error.lo)})",
        )
    text = "clipping: " + " and ".join(parts)
    return Cause(
        "clipped",
        text,
        share,
        "use a wider range",
        ("--tensor-calibrator", f"{error.name}=minmax"),
    )


def _outlier_channel(
    evidence: TensorEvidence, grid: CodeGrid, share: float
) -> Cause | None:
    """Return an outlier channel as a cause: its range makes the tensor's scale coarse.

    None if the grid has other scales than one for the tensor, or if no channel is far wider.

    Args:
        evidence: observations of the tensor.
        share: share of rounding in the tensor's noise.
    """
    statistic = evidence.statistic
    if not grid.bits or not grid.uniform or grid.axis is not None:
        return None
    if statistic.axis is None or len(statistic.lo) < _MANY_CHANNELS:
        return None
    # Shape (channels,): the range of each channel over all samples.
    reach: NDArray[np.float64] = statistic.hi - statistic.lo
    median = float(np.median(reach))
    worst = int(reach.argmax())
    ratio = 0.0
    if median > 0:
        ratio = float(reach[worst] / median)
    if ratio < _OUTLYING:
        return None
    outliers = int((reach > _OUTLYING * median).sum())
    which = f"one outlier channel (#{worst}) has"
    if outliers != 1:
        which = f"{outliers} outlier channels (the worst is #{worst}) reach up to"
    # A channel with 1/ratio of the range uses 1/ratio of the codes: log2(ratio) bits fewer.
    kept = max(0.0, grid.bits - math.log2(ratio))
    text = (
        f"{which} {ratio:.0f} times the median range: the others keep {kept:.1f}"
        f" of {grid.bits} bits"
    )
    if not _is_equalizable(evidence.error.op_type):
        remedy = "give activations more bits"
        return Cause("outlier-channel", text, share, remedy, _MORE_BITS)
    options = ("--optimize", "cle")
    return Cause("outlier-channel", text, share, "equalize the channels", options)


def _is_equalizable(op_type: str) -> bool:
    """Return True for operators whose channels cross-layer equalization scales."""
    return "Conv" in op_type or op_type in ("Relu", "BatchNormalization", "Gemm")


def _spread(evidence: TensorEvidence, grid: CodeGrid, share: float) -> Cause | None:
    """Return the cause for a wide range with few values at its ends; None otherwise.

    Args:
        evidence: observations of the tensor.
        share: share of rounding in the tensor's noise.
    """
    error = evidence.error
    histogram = evidence.statistic.histogram
    if not grid.uniform or not grid.bits:
        return None
    if error.grid_lo is None or error.grid_hi is None:
        return None
    if grid.granularity != "tensor" or not histogram.lo.size:
        return None
    # Below a third of the grid, more than 1.5 bits are unused.
    whole = error.grid_hi - error.grid_lo
    used = min(error.hi, error.grid_hi) - max(error.lo, error.grid_lo)
    if 0 < used < whole / 3:
        bits = max(0.0, grid.bits - math.log2(whole / used))
        text = (
            f"the grid reaches from {_figure(error.grid_lo)} to"
            f" {_figure(error.grid_hi)}, the values from {_figure(error.lo)} to"
            f" {_figure(error.hi)}: they use {bits:.1f} of {grid.bits} bits"
        )
        remedy = (
            "calibrate on representative data; if the scale is shared with a wider"
            " tensor, exclude this node"
        )
        return Cause("unused-range", text, share, remedy, _exclude(error))
    # The middle 99.9 % of the values, extended to 0, which every range contains. A sixth costs 2.6
    # bits.
    low = _quantile(histogram, 0.0005)
    high = _quantile(histogram, 0.9995)
    bulk = max(high, 0.0) - min(low, 0.0)
    if 0 < bulk < whole / 6:
        bits = max(0.0, grid.bits - math.log2(whole / bulk))
        text = (
            f"few large values stretch the range: 99.9 % lie between {_figure(low)} and"
            f" {_figure(high)}, the grid reaches from {_figure(error.grid_lo)} to"
            f" {_figure(error.grid_hi)}; they keep {bits:.1f} of {grid.bits} bits"
        )
        remedy = "clip more, or give activations more bits"
        options = ("--tensor-calibrator", f"{error.name}=minmse")
        return Cause("wide-range", text, share, remedy, options)
    return None


def _quantile(histogram: Histogram, share: float) -> float:
    """Return the bin's center below which a share of the observed values lies, 0 to 1."""
    centers, counts = histogram.signed(0)
    order: NDArray[np.float64] = np.cumsum(counts) / counts.sum()
    index = int(np.searchsorted(order, share))
    return float(centers[min(index, len(centers) - 1)])


def _rounding_text(error: TensorError, grid: CodeGrid) -> str:
    """Return number format, granularity and step in words."""
    if error.step is None:
        return f"rounding to {grid.format}"
    step = f"in steps of {_figure(error.step)}"
    if grid.granularity != "tensor":
        return f"rounding to {grid.format}, one scale per {grid.granularity}, {step} at most"
    if not grid.uniform:
        return f"rounding to {grid.format}"
    return (
        f"rounding to {grid.format} {step}, from {_figure(error.grid_lo)} to"
        f" {_figure(error.grid_hi)}"
    )


# -- constants
# --------------------------------------------------------------------------------------


def _of_weights(evidence: TensorEvidence, least: float) -> Iterator[Cause]:
    """Yield the weights and biases whose rounding makes a share of the noise.

    Args:
        evidence: observations of the tensor.
        least: share of the tensor's noise that a cause must exceed.
    """
    for weight in evidence.weights:
        # heavier is 1 where it was not observed.
        share = min(1.0, evidence.heavier * nsr(weight.sqnr) / evidence.noise)
        if weight.role == "bias":
            yield from _of_bias(weight, evidence, least)
        elif share > least:
            yield _of_weight(weight, evidence, share, least)


def _of_weight(
    weight: WeightError,
    evidence: TensorEvidence,
    share: float,
    least: float,
) -> Cause:
    """Return the rounding of a weight as a cause, with the amplification by the operator.

    Args:
        evidence: observations of the tensor that the weight's operator computes.
        share: share of the weight in the tensor's noise.
        least: minimum share of a cause.
    """
    cause = _weight_cause(weight, share)
    # Dead channels name the cause where they make most of the weight's noise.
    of_dead = share * weight.dead_noise
    if of_dead > max(least, share / 2):
        cause = _dead_cause(weight, of_dead)
    if evidence.heavier < _AMPLIFIED:
        return cause
    text = (
        f"{cause.text}; its noise is amplified {evidence.heavier:.0f}x by"
        f" {evidence.error.op_type}"
    )
    return replace(cause, text=text)


def _dead_cause(weight: WeightError, share: float) -> Cause:
    """Return dead channels, with zero codes only, as a cause.

    Args:
        share: share of the dead channels in the tensor's noise.
    """
    text = (
        f"weight: {len(weight.dead)} of {weight.channels} channels are all zero codes"
    )
    if weight.granularity == "tensor":
        remedy = "use one scale per channel"
        return Cause("dead-channels", text, share, remedy, _PER_CHANNEL)
    options = ("--exclude", weight.node)
    return Cause("dead-channels", text, share, "keep the node in float", options)


def _weight_cause(weight: WeightError, share: float) -> Cause:
    """Return the rounding of a weight as a cause, with the remedy for its kind.

    Args:
        share: share of the weight in the tensor's noise.
    """
    ratio = (
        f"{weight.sqnr:.1f} dB, the worst channel (#{weight.worst_channel})"
        f" {weight.worst_sqnr:.1f} dB"
    )
    kind = weight.format or "its format"
    one_scale = weight.granularity == "tensor"
    options: tuple[str, ...] = _PER_CHANNEL
    remedy = "use one scale per channel"
    if one_scale and weight.depthwise:
        text = (
            f"per-tensor scale on a depthwise weight: {ratio}; channels differ up to"
            f" {weight.outlier_ratio:.0f} times"
        )
        remedy += ", or equalize the channels"
    # Above 4 times the median, the median channel loses two bits.
    elif one_scale and weight.outlier_ratio > 4 and weight.channels > 1:
        text = (
            f"weight at {kind}: {ratio}; channel #{weight.outlier_channel} reaches"
            f" {weight.outlier_ratio:.0f} times the median channel under one scale"
            " for all"
        )
    elif weight.clipped > 0.001:
        text = (
            f"weight at {kind}: {percentage(weight.clipped)} of its values are clipped;"
            f" {ratio}"
        )
        remedy = "keep the node in float"
        options = ("--exclude", weight.node)
    elif one_scale and weight.channels > 1:
        text = f"weight at {kind} with one scale for all channels: {ratio}"
    else:
        text = f"weight at {kind}: {ratio}"
        remedy = "keep the node in float, or give its weights more bits"
        options = ("--exclude", weight.node)
    return Cause("weight", text, share, remedy, options)


def _of_bias(
    weight: WeightError, evidence: TensorEvidence, least: float
) -> Iterator[Cause]:
    """Yield a saturated bias, or a bias with too coarse a step.

    Args:
        evidence: observations of the tensor that the bias is added to.
        least: minimum share of a cause.
    """
    share = min(1.0, evidence.heavier * evidence.of_bias(weight) / evidence.noise)
    text = (
        f"bias is coarse: {weight.sqnr:.1f} dB, the worst at channel"
        f" #{weight.worst_channel}"
    )
    if weight.clipped:
        text = (
            f"bias saturates: {percentage(weight.clipped)} of it lies beyond what"
            f" {weight.format} holds"
        )
    # A saturated bias is reported from 1 % on: it is an error of the tool, and cheap to fix.
    if share > least or (weight.clipped and share > 0.01):
        yield Cause(
            "bias",
            text,
            share,
            "keep the node in float",
            ("--exclude", weight.node),
        )


# -- the operator and its inputs
# ----------------------------------------------------------------------------------


def _of_operator(evidence: TensorEvidence, least: float) -> Iterator[Cause]:
    """Yield the noise of the input grids, as amplified by the operator.

    Args:
        evidence: observations of the tensor. Without an observation on float inputs nothing is
            yielded.
        least: share of the tensor's noise that a cause must exceed.
    """
    error, noise, times = evidence.error, evidence.noise, evidence.heavier
    brought = evidence.grids_before or 0.0
    share = min(1.0, times * brought / noise)
    if error.sqnr_local is None or not brought or share <= least:
        return
    text, kind = (
        f"input quantization noise ({decibels(1.0, brought):.1f} dB)",
        "inputs",
    )
    if times >= _AMPLIFIED:
        kind = "amplified"
        text += f" is amplified {times:.0f}x by {error.op_type}"
    yield Cause(
        kind,
        text,
        share,
        "keep the operator in float, or give its inputs more bits",
        _exclude(error),
    )


def _of_shift(evidence: TensorEvidence) -> Iterator[Cause]:
    """Yield a constant error of channels, which a correction of biases removes."""
    error, shifted = evidence.error, evidence.statistic.shifted
    # An input of the model has no bias. A shift that comes with the inputs is fixed there.
    if shifted > 0.5 and error.node and evidence.inherited < 0.5 * evidence.noise:
        text = (
            f"a constant shift of channels makes {percentage(shifted)} of its noise (mean"
            f" error {error.mean_error:.2g})"
        )
        yield Cause(
            "shift",
            text,
            # The noise of a shift is counted by the causes of grid and weights already. A fixed,
            # small share puts the shift after them.
            _LEAST / 2,
            "correct the bias, or use more bits",
            ("--optimize", "bias_correction"),
        )


def _from_upstream(evidence: TensorEvidence) -> Iterator[Cause]:
    """Yield the noise of the inputs, with the amplification by the operator."""
    error, share = evidence.error, evidence.inherited / evidence.noise
    if share <= _LEAST or not error.source:
        return
    text = f"input noise from {error.source} ({error.sqnr_inputs:.1f} dB)"
    # The floor stands for inputs without noise (nsr 0), from which nothing should be inherited.
    times = evidence.inherited / max(nsr(error.sqnr_inputs), 1e-30)
    if times >= _AMPLIFIED:
        text += f" is amplified {times:.0f}x by {error.op_type}"
    yield Cause("inherited", text, min(1.0, share), "improve that tensor first")


def _exclude(error: TensorError) -> tuple[str, ...]:
    return ("--exclude", error.node) if error.node else _MORE_BITS


def _figure(value: float | None) -> str:
    """Format a number with three digits, or with all digits before the point.

    >>> _figure(-4096.0), _figure(0.01234)
    ('-4096', '0.0123')
    """
    if value is None:
        return "?"
    if abs(value) >= 1e3:
        return f"{value:.0f}"
    return f"{value:.3g}"
