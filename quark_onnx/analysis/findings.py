"""Findings of an analysis: errors of tensors and weights, with causes."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Cause:
    """Cause of a tensor's noise, with its remedy.

    Attributes:
        kind: a fixed word: clipped, outlier-channel, wide-range, unused-range, operator, rounding,
            weight, dead-channels, bias, inputs, amplified, shift, rescaled or inherited.
        text: the cause in words, with its figures.
        share: estimated part of the tensor's noise, 0 to 1.
        remedy: the remedy in words.
        options: options for the command line of ``quark-onnx quantize``; empty if no option helps.
    """

    kind: str
    text: str
    share: float
    remedy: str
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bins:
    """Histogram of float values; bin i counts ``edges[i] <= value < edges[i + 1]``."""

    edges: list[float]
    counts: list[int]


@dataclass(frozen=True)
class TensorError:
    """Error of a tensor over all samples.

    Ratios are in dB: ``10 log10(sum float^2 / sum error^2)``.

    Attributes:
        name: name in the float model.
        counterpart: tensor of the quantized model that consumers read; codes count as their
            dequantized values.
        matched_by: name or structure.
        node: producer in the float model; empty for an input of the model.
        op_type: operator of the producer; "Input" for an input of the model.
        place: position in the order of execution.
        count: number of compared values.
        sqnr: ratio of the counterpart; of a rescaled tensor, without the scales.
        cosine: cosine similarity with the counterpart.
        mean_error: mean of quantized minus float: the bias.
        sqnr_before: ratio of the operator's result before its grid; None if it cannot be observed.
        sqnr_grid: ratio of the grid alone, on float values; None without a grid, or if it cannot be
            observed.
        sqnr_local: ratio with float inputs: noise of the operator's weights, of the grids of its
            inputs and of its own grid; None if it cannot be observed.
        sqnr_inputs: least ratio among the inputs; infinite at inputs of the model.
        added: noise-to-signal ratio that the tensor adds, which orders the ranking: the ratio with
            float inputs less the ratios of the input grids, which count at the inputs. If it cannot
            be observed, the excess over the worst input's ratio.
        source: the tensor with ``sqnr_inputs``; empty at inputs of the model.
        format: uint8, int8, bfloat16, MXQuantizeDequantize, ...; empty if the tensor stays float.
        lo: least float value.
        hi: greatest float value.
        grid_lo: least value of the grid, the widest if channels differ; None for formats without a
            fixed grid.
        grid_hi: greatest value of the grid, likewise.
        step: step of the grid, likewise.
        clipped_low: share of float values below the grid by more than half a step.
        clipped_high: share of float values above the grid by more than half a step.
        clip_noise: share of the grid's noise due to clipped values.
        rescaled: True if the quantized model has other channel scales, as cross-layer equalization
            leaves them.
        causes: causes of the noise, largest share first.
        histogram: histogram of the float values, for the worst tensors.
    """

    name: str
    counterpart: str
    matched_by: str
    node: str
    op_type: str
    place: int
    count: int
    sqnr: float
    cosine: float
    mean_error: float
    sqnr_before: float | None
    sqnr_grid: float | None
    sqnr_local: float | None
    sqnr_inputs: float
    added: float
    source: str
    format: str
    lo: float
    hi: float
    grid_lo: float | None
    grid_hi: float | None
    step: float | None
    clipped_low: float
    clipped_high: float
    clip_noise: float
    rescaled: bool
    causes: list[Cause] = field(default_factory=list)
    histogram: Bins | None = None


@dataclass(frozen=True)
class WeightError:
    """Error of a constant that a node reads.

    Attributes:
        name: name of the constant in the float model.
        node: consumer in the float model.
        op_type: operator of the consumer.
        role: weight or bias.
        format: format of the codes; empty without codes.
        granularity: scope of a scale: tensor, channel or block; empty if unknown.
        depthwise: True for a convolution with a single channel in each group.
        channels: number of output channels.
        sqnr: ratio of the whole constant.
        cosine: cosine similarity of the whole constant.
        worst_channel: output channel with the least ratio.
        worst_sqnr: ratio of the worst channel.
        dead: number of output channels that became all zeros.
        dead_noise: share of the error due to dead channels.
        outlier_channel: output channel with the greatest magnitude.
        outlier_ratio: magnitude of the outlier channel in units of the median channel's.
        saturated: share of codes at an end of the grid.
        clipped: share of float values beyond the grid by more than half a step.
        rescaled: True if the ratio was measured after fitting channel scales, as folding
            BatchNormalization or equalization changes them.
        rms: root mean square of the float values.
        lo: as for a tensor.
        hi: as for a tensor.
        grid_lo: as for a tensor.
        grid_hi: as for a tensor.
        step: as for a tensor.
        histogram: histogram of the float values, if the weight of a ranked tensor.
    """

    name: str
    node: str
    op_type: str
    role: str
    format: str
    granularity: str
    depthwise: bool
    channels: int
    sqnr: float
    cosine: float
    worst_channel: int
    worst_sqnr: float
    dead: list[int]
    dead_noise: float
    outlier_channel: int
    outlier_ratio: float
    saturated: float
    clipped: float
    rescaled: bool
    rms: float
    lo: float
    hi: float
    grid_lo: float | None
    grid_hi: float | None
    step: float | None
    histogram: Bins | None = None


@dataclass(frozen=True)
class Unmatched:
    """A tensor of the float model without a comparison, and the reason."""

    name: str
    reason: str
