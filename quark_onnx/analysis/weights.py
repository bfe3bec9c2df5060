"""Errors of quantized constants, channel by channel."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from calibrators import Histogram
from calibrators.layout import rows
from quark_onnx.analysis.findings import Bins, Unmatched, WeightError
from quark_onnx.analysis.match import Matching
from quark_onnx.analysis.reading import FLOATS, CodeGrid, Operand, Reading, Scale
from quark_onnx.graph import Node
from quark_onnx.graph.codes import spread
from quark_onnx.patterns.depthwise import has_depthwise_kernel
from quark_onnx.patterns.weight_axes import WeightAxes, weight_axes
from quark_onnx.report.measure import cosine_similarity, decibels

Floats = NDArray[np.float64]

#: Operators with a bias, and the index of that input.
_BIASED = ("Conv", "ConvTranspose", "Gemm")
_BIAS_INPUT = 2
#: Minimum gain in dB of fitted channel scales for a rescaled constant.
_RESCALED = 6.0
_ROUNDS = 8
_BINS = 96
#: Stands for an input that the quantized node does not have.
_NO_OPERAND = Operand("")


@dataclass(frozen=True)
class _Constant:
    """A constant with its values in both models.

    Attributes:
        name: name in the float model.
        is_weight: False for a bias.
        axes: axes of the output channels of a weight; None without any.
        values: the float values.
        dequantized: the values of the quantized model, of the same shape.
        codes: name and scale of the codes; None without codes, or in another layout.
    """

    name: str
    is_weight: bool
    axes: WeightAxes | None
    values: Floats
    dequantized: Floats
    codes: tuple[str, Scale] | None


def weight_errors(
    reference: Reading,
    other: Reading,
    matching: Matching,
) -> tuple[list[WeightError], list[Unmatched]]:
    """Return the error of each constant that the quantized model stores differently.

    Args:
        reference: the float model.
        other: the quantized model.
        matching: pairs of nodes.

    Returns:
        Errors, and constants without a comparison.
    """
    errors = list[WeightError]()
    missing = list[Unmatched]()
    for node in [node for node in reference.graph.nodes if node in matching.nodes]:
        twin = matching.nodes[node]
        operands = other.operands(twin)[1]
        for index, name in enumerate(node.inputs):
            is_float = reference.graph.elem_type(name) in FLOATS
            if not is_float or not reference.constants.known(name):
                continue
            # A fused operator may have fewer inputs.
            operand = dict(enumerate(operands)).get(index, _NO_OPERAND)
            if not other.constants.known(operand.tensor):
                reason = f"input {index} of {twin!r} is no constant"
                missing.append(Unmatched(name, reason))
                continue
            result = _compared(reference, other, node, index, operand)
            if isinstance(result, WeightError):
                errors.append(result)
            elif result:
                missing.append(Unmatched(name, result))
    return errors, missing


def _compared(
    reference: Reading,
    other: Reading,
    node: Node,
    index: int,
    operand: Operand,
) -> WeightError | str:
    """Return the error of a constant.

    Args:
        other: the quantized model.
        node: node of the float model.
        index: index of the constant among the inputs of ``node``.
        operand: the counterpart in the quantized model, which is constant.

    Returns:
        The error; or a reason why it was not compared; or an empty text without a relevant error.
    """
    # Shapes: the float constant, the dequantized values; a quantized Gemm may store the transpose.
    codes = other.stored(operand)
    values = reference.constants.value(node.inputs[index]).astype(np.float64)
    dequantized = other.reals(operand)
    if values.shape not in (dequantized.shape, dequantized.T.shape):
        return (
            f"its shape is {list(values.shape)}, in the quantized model"
            f" {list(dequantized.shape)}"
        )
    if values.shape != dequantized.shape:
        # the tool changed transB of a Gemm; the channels of the codes are not known then
        dequantized = dequantized.T
        codes = None
    # Constants that stay float have no entry; codes have one even where rounding changed nothing.
    unchanged = codes is None and np.array_equal(values, dequantized)
    if unchanged or not values.size:
        return ""
    is_weight = index != _BIAS_INPUT or node.op_type not in _BIASED
    axes = weight_axes(reference.graph, node, index) if is_weight else None
    if axes is not None and not axes.channels:
        axes = None
    constant = _Constant(
        node.inputs[index], is_weight, axes, values, dequantized, codes
    )
    return _error(other, node, constant)


def _error(other: Reading, node: Node, constant: _Constant) -> WeightError:
    """Return the error of a constant that a node reads.

    Args:
        other: the quantized model.
        node: node of the float model that reads the constant.
        constant: values in both models; not empty.

    Returns:
        The error; its SQNR is that after removal of channel factors, if there are any.
    """
    values = constant.values
    # exact, stored: (channels, values of a channel); a bias has one value in each row.
    exact, stored = (
        _channel_rows(constant, array) for array in (values, constant.dequantized)
    )
    # Equalization and the folding of norms change the weights without an error. Their factors are
    # removed first.
    fitted, rescaled = stored, False
    if constant.is_weight:
        inputs = _inputs_per_channel(node, constant)
        fitted, rescaled = _fitted(exact, stored, inputs)
    grid, saturated, clipped = _grid(other, constant.codes, values, rescaled)
    signal = np.square(exact).sum(axis=1)
    energy = np.square(fitted).sum()
    noise = np.square(fitted - exact).sum(axis=1)
    # Shape (channels,).
    # A channel of zeros has no ratio.
    ratios = np.array(
        [
            decibels(power, error) if power else float("inf")
            for power, error in zip(signal, noise, strict=True)
        ]
    )
    least, greatest, step = grid.extremes()
    reach = np.abs(exact).max(axis=1)
    # A channel with float values, all of which became code 0: its scale is too coarse for it.
    dead = (reach > 0) & ~np.abs(stored).any(axis=1)
    return WeightError(
        name=constant.name,
        node=node.name,
        op_type=node.op_type,
        role="weight" if constant.is_weight else "bias",
        format=grid.format,
        granularity=grid.granularity if constant.codes else "",
        depthwise=constant.is_weight and has_depthwise_kernel(node, values.shape),
        channels=len(reach),
        sqnr=decibels(float(signal.sum()), float(noise.sum())),
        cosine=cosine_similarity((exact * fitted).sum(), signal.sum(), energy),
        worst_channel=int(ratios.argmin()),
        worst_sqnr=float(ratios.min()),
        dead=[int(channel) for channel in np.flatnonzero(dead)],
        dead_noise=_share(noise, dead),
        outlier_channel=int(reach.argmax()),
        outlier_ratio=_outlier_ratio(reach),
        saturated=saturated,
        clipped=clipped,
        rescaled=rescaled,
        rms=float(np.sqrt(np.mean(np.square(values)))),
        lo=float(values.min()),
        hi=float(values.max()),
        grid_lo=least,
        grid_hi=greatest,
        step=step,
    )


def _channel_rows(constant: _Constant, values: Floats) -> Floats:
    """Return a row for each output channel, or for each value of a bias."""
    if constant.axes is not None:
        return constant.axes.rows(values)
    # A scalar has no axis.
    if constant.is_weight or not values.ndim:
        return values.reshape(1, -1)
    return rows(values, 0)


def _inputs_per_channel(node: Node, constant: _Constant) -> int:
    """Return the number of input channels along a row; 1 if factors per input are unknown."""
    values = constant.values
    grouped = int(node.attribute("group", 1)) != 1
    # Grouped convolutions: the same row index is another input channel in each group.
    if constant.axes is None or values.ndim < 2 or grouped:
        return 1
    layout = constant.axes.layout(values.shape)
    if not layout.is_plain or layout.axis > 1:
        return 1
    return int(values.shape[1 - layout.axis])


def _share(noise: Floats, channels: NDArray[np.bool_]) -> float:
    """Return the share of the noise (channels,) that some channels (a mask) have."""
    if not channels.any():
        return 0.0
    # A dead channel with float values has noise, so that the sum is above 0.
    return float(noise[channels].sum() / noise.sum())


def _outlier_ratio(reach: Floats) -> float:
    """Return the greatest magnitude of a channel relative to the median; 1 if that is 0."""
    median = float(np.median(reach))
    if not median:
        return 1.0
    return float(reach.max() / median)


def _fitted(a: Floats, b: Floats, inputs: int) -> tuple[Floats, bool]:
    """Remove channel factors from ``b`` if ``b`` then fits ``a`` much better.

    Folding BatchNormalization changes the scales of output channels, cross-layer equalization those
    of input and output channels.

    Args:
        a: one row for each output channel.
        b: one row for each output channel.
        inputs: number of consecutive input channels in a row.

    Returns:
        The fitted ``b``, and True if factors were removed.
    """
    # (outputs, inputs, kernel): each factor applies to all values of a kernel.
    shape = (a.shape[0], inputs, -1)
    product = (a * b).reshape(shape).sum(axis=2)
    energy = (a * a).reshape(shape).sum(axis=2)
    # b = row_gains * a * column_gains, with a factor per output (rows) and per input channel
    # (columns), of the shapes (outputs, 1) and (1, inputs).
    row_gains = np.ones((shape[0], 1))
    column_gains = np.ones((1, inputs))
    for _ in range(_ROUNDS):  # least squares for one side at a time
        row_gains = _gain(
            (product * column_gains).sum(axis=1, keepdims=True),
            (energy * column_gains**2).sum(axis=1, keepdims=True),
        )
        column_gains = _gain(
            (product * row_gains).sum(axis=0, keepdims=True),
            (energy * row_gains**2).sum(axis=0, keepdims=True),
        )
    fitted = (b.reshape(shape) / (row_gains * column_gains)[:, :, None]).reshape(
        b.shape
    )
    signal = float(energy.sum())
    before = decibels(signal, float(np.square(b - a).sum()))
    after = decibels(signal, float(np.square(fitted - a).sum()))
    # Any fit improves a little; only a large gain shows factors that a tool has applied.
    if after > max(before, 0.0) + _RESCALED:
        return fitted, True
    return b, False


def _gain(product: Floats, energy: Floats) -> Floats:
    """Return the least-squares factors; 1 for empty products.

    Args:
        product: sums of products of both weights.
        energy: sums of squares of the reference, of the same shape.
    """
    gain: Floats = np.divide(
        product,
        energy,
        out=np.ones_like(energy),
        where=(energy > 0) & (product != 0),
    )
    return gain


def _grid(
    other: Reading,
    codes: tuple[str, Scale] | None,
    values: Floats,
    rescaled: bool,
) -> tuple[CodeGrid, float, float]:
    """Return the grid of codes, the share of saturated codes and of clipped values.

    Args:
        other: the quantized model.
        codes: name and scale of the codes; None without codes.
        rescaled: True if the float values have other channel scales.
    """
    if codes is None:
        return CodeGrid("", granularity=""), 0.0, 0.0
    tensor, scale = codes
    grid = other.grid(scale, other.graph.elem_type(tensor))
    ends = grid.ends
    # The tests below compare with the step, which only uniform grids have.
    if ends is None or not grid.uniform or not other.constants.known(tensor):
        return grid, 0.0, 0.0
    reals = other.decoded(other.constants.value(tensor), scale)
    # As in Reading.decoded.
    axis = scale.axis if scale.axis < reals.ndim else reals.ndim - 1
    lo, hi, step = (
        spread(array, reals.shape, axis, scale.block)
        for array in (ends.lo, ends.hi, ends.step)
    )
    # Dequantized values are multiples of the step, up to float rounding: a quarter is safe.
    at_an_end = (reals <= lo + step / 4) | (reals >= hi - step / 4)
    saturated = float(np.mean(at_an_end))
    # Float values of another scale or layout cannot be compared with the ends.
    if rescaled or reals.shape != values.shape:
        return grid, saturated, 0.0
    # Up to half a step beyond the last code, a value rounds to it and is not clipped.
    beyond = (values < lo - step / 2) | (values > hi + step / 2)
    return grid, saturated, float(np.mean(beyond))


def with_histogram(weight: WeightError, reference: Reading) -> WeightError:
    """Return a weight's error with the histogram of its float values.

    Args:
        weight: the error.
        reference: the float model.
    """
    histogram = Histogram()
    histogram.observe(
        # One row: the histogram of the whole weight.
        reference.constants.value(weight.name).reshape(1, -1).astype(np.float32),
    )
    return replace(weight, histogram=bins(histogram))


def bins(histogram: Histogram) -> Bins | None:
    """Reduce a histogram to few equal bins; None for an empty histogram.

    Args:
        histogram: the histogram.

    >>> one = Histogram()
    >>> one.observe(np.float32([[0.0, 0.5, 1.0]]))
    >>> sum(bins(one).counts)
    3
    """
    if not histogram.lo.size:
        return None
    lo, hi = float(histogram.lo[0]), float(histogram.hi[0])
    if hi <= lo:
        # A constant tensor still gets bins of positive width.
        lo, hi = lo - 0.5, hi + 0.5
    centres, counts = histogram.signed(0)
    # Bins narrower than those that were counted would be empty in turn.
    width = max((hi - lo) / _BINS, float(histogram.width[0]))
    edges = np.linspace(lo, hi, max(1, round((hi - lo) / width)) + 1)
    places = np.clip(
        # The value hi lies on the last edge, and belongs to the last bin: hence the clip.
        np.searchsorted(edges, centres, side="right") - 1,
        0,
        len(edges) - 2,
    )
    summed = np.bincount(places, weights=counts, minlength=len(edges) - 1)
    return Bins(list(map(float, edges)), list(map(int, summed)))
