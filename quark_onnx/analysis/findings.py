"""What an analysis finds, as values: tensors, weights, causes, and what could not be compared."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from quark_onnx.report.measure import OutputError, least_sqnr


@dataclass(frozen=True)
class Cause:
    """Why a tensor is noisy, and what mends it.

    Attributes:
        kind: a short fixed word: clipped, outlier-channel, wide-range, unused-range, operator,
            rounding, weight, dead-channels, bias, inputs, amplified, shift, rescaled or inherited.
        text: the cause in words, with its figures.
        share: part of the tensor's noise that it makes, estimated; 0 to 1.
        remedy: what to do, in words.
        options: what to add to the command line of ``quark-onnx quantize``; empty where no option
            helps.
    """

    kind: str
    text: str
    share: float
    remedy: str
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bins:
    """A histogram of float values. Bin i holds those in ``[edges[i], edges[i + 1])``."""

    edges: list[float]
    counts: list[int]


@dataclass(frozen=True)
class TensorError:
    """The error of one tensor over all samples.

    A ratio is in dB, ``10 log10(sum float^2 / sum error^2)``.

    Attributes:
        name: in the float model.
        counterpart: the tensor of the quantized model that its readers see; codes count as the
            reals they stand for.
        matched_by: name or structure.
        node, op_type: what computes it in the float model; empty and "Input" for an input of the
        model.
        place: position in the order of execution.
        count: how many values were compared.
        sqnr, cosine: against what readers see; for a rescaled tensor against it with the scales
        taken out.
        mean_error: mean of quantized minus float: the bias.
        sqnr_before: ratio in front of its own grid, of what the operator computes; None where
        nothing is there to see.
        sqnr_grid: ratio of its own grid alone, on float values; None without one, or where that is
        not seen.
        sqnr_local: ratio if all that it is computed of were float: of its operator's weights, the
        grids of its
            inputs and its own grid; None where that is not seen.
        sqnr_inputs: the least ratio among the tensors it is computed of; infinite at inputs of the
            model.
        added: noise-to-signal ratio that it adds, what the ranking goes by: that of sqnr_local less
            those of the grids of its inputs, which count there; where it is not known, what is
            beyond the worst input's.
        source: the tensor with ``sqnr_inputs``; empty at inputs of the model.
        format: uint8, int8, bfloat16, MXQuantizeDequantize, ...; empty where it stays float.
        lo, hi: least and greatest float value.
        grid_lo, grid_hi, step: what the grid can represent and its step, the widest where channels
        differ; None for
            formats without a fixed grid.
        clipped_low, clipped_high: share of float values beyond the grid by more than half a step.
        clip_noise: share of the grid's noise that values beyond it make. rescaled: its channels
        have other scales in the quantized model, as equalization across layers leaves them. causes:
        why, the weightiest first. histogram: of its float values, for the worst tensors.
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
    """The error of a constant that a node reads.

    Attributes:
        name, node, op_type: of the constant and its reader in the float model.
        role: weight or bias.
        format: of its codes; empty where it is not codes.
        granularity: tensor, channel or block: what has a scale of its own; empty where it is not
        known.
        depthwise: a convolution with one channel to a group.
        channels: number of output channels.
        sqnr, cosine: of the whole constant.
        worst_channel, worst_sqnr: the output channel with the least ratio.
        dead: output channels of which nothing but zeros is left.
        dead_noise: share of the error that these make.
        outlier_channel, outlier_ratio: the output channel of the greatest magnitude, and how many
        times the median
            channel's that is.
        saturated: share of codes at an end of the grid.
        clipped: share of float values beyond the grid by more than half a step.
        rescaled: the ratio is what is left after channels were scaled to fit, as a folded
            BatchNormalization or an equalization leaves them.
        rms: root of the mean square of the float values.
        lo, hi, grid_lo, grid_hi, step: as for a tensor.
        histogram: of the float values, where a ranked tensor is computed of it.
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
    """Something of the float model that was not compared, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Analysis:
    """Where a quantized model loses accuracy, and why.

    Attributes:
        samples: on how many samples it was measured.
        bytes_before, bytes_after: sizes of the two models.
        outputs: the error of each output.
        tensors: the error of each tensor that was compared, in the order of execution.
        weights: the error of each quantized constant.
        unmatched: tensors and constants that were not compared.
        steps: the step of each output whose values lie on a grid, in the output's own unit.
    """

    samples: int
    bytes_before: int
    bytes_after: int
    outputs: list[OutputError]
    tensors: list[TensorError]
    weights: list[WeightError]
    unmatched: list[Unmatched]
    steps: dict[str, float] = field(default_factory=dict)

    @property
    def sqnr(self) -> float:
        """The least signal-to-noise ratio of any float output, in dB; infinite if there is none."""
        return least_sqnr(self.outputs, math.inf)

    @property
    def ranking(self) -> list[TensorError]:
        """Tensors by the noise that they add, most of it first.

        Those that add none are left out.
        """
        return sorted((t for t in self.tensors if t.added > 0), key=lambda t: -t.added)

    def to_dict(self) -> dict[str, Any]:
        """Plain values: dictionaries, lists, numbers and texts; numbers may be infinite."""
        return {
            "worst_sqnr": self.sqnr,
            **asdict(self),
            "ranking": [tensor.name for tensor in self.ranking],
        }
