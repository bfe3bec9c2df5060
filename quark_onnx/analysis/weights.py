"""Errors of quantized constants, channel by channel."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from calibrators import Histogram
from calibrators.layout import rows
from quark_onnx.analysis.findings import Bins, Unmatched, WeightError
from quark_onnx.analysis.match import Matching
from quark_onnx.analysis.reading import Grid, Operand, Reading
from quark_onnx.graph import Node
from quark_onnx.graph.codes import spread
from quark_onnx.report.measure import decibels

Floats = NDArray[np.float64]

#: Axis of the output channels by operator; the axis of a Gemm depends on transB.
_AXES = {"Conv": 0, "ConvTranspose": 1, "MatMul": -1}
_BIASED = ("Conv", "ConvTranspose", "Gemm")
#: Minimum gain in dB of fitted channel scales for a rescaled constant.
_RESCALED = 6.0
_ROUNDS = 8
_BINS = 96


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
    found, missing = list[WeightError](), list[Unmatched]()
    for node in reference.graph.nodes:
        twin = matching.nodes.get(node)
        if twin is None:
            continue
        operands = other.operands(twin)[1]
        for place, name in enumerate(node.inputs):
            if (
                not name
                or not reference.constants.known(name)
                or not _real(reference, name)
            ):
                continue
            if place >= len(operands) or not other.constants.known(
                operands[place].tensor,
            ):
                missing.append(
                    Unmatched(name, f"input {place} of {twin!r} is no constant"),
                )
                continue
            result = _compared(reference, other, node, place, operands[place])
            if isinstance(result, WeightError):
                found.append(result)
            elif result:
                missing.append(Unmatched(name, result))
    return found, missing


def _real(reference: Reading, name: str) -> bool:
    return reference.graph.elem_type(name) in (1, 10, 11, 16)


def _compared(
    reference: Reading,
    other: Reading,
    node: Node,
    place: int,
    operand: Operand,
) -> WeightError | str:
    """Return the error of a constant.

    Returns:
        The error; or a reason why it was not compared; or an empty text without a relevant error.
    """
    name, codes = node.inputs[place], other.stored(operand)
    a, b = reference.constants.value(name).astype(np.float64), other.reals(operand)
    if a.shape != b.shape:
        if a.shape != b.T.shape:
            return (
                f"its shape is {list(a.shape)}, in the quantized model {list(b.shape)}"
            )
        b, codes = b.T, None
    if (codes is None and np.array_equal(a, b)) or not a.size:
        return ""
    role = "bias" if place == 2 and node.op_type in _BIASED else "weight"
    axis = _channel_axis(node, a.ndim) if role == "weight" else 0
    wide = (
        (rows(a, axis), rows(b, axis)) if a.ndim else (a.reshape(1, 1), b.reshape(1, 1))
    )
    inputs = (
        a.shape[1 - axis] if role == "weight" and axis in (0, 1) and a.ndim > 1 else 1
    )
    inputs = inputs if int(node.attribute("group", 1)) == 1 else 1
    own, scaled = (
        _fitted(wide[0], wide[1], inputs) if role == "weight" else (wide[1], False)
    )
    grid, saturated, clipped = _grid(other, codes, a, scaled)
    signal = np.square(wide[0]).sum(axis=1)
    noise = np.square(own - wide[0]).sum(axis=1)
    ratios = np.array(
        [
            decibels(s, n) if s else float("inf")
            for s, n in zip(signal, noise, strict=True)
        ],
    )
    reach = np.abs(wide[0]).max(axis=1)
    norm = np.sqrt(signal.sum() * np.square(own).sum())
    median = float(np.median(reach))
    dead = (reach > 0) & ~np.abs(wide[1]).any(axis=1)
    return WeightError(
        name=name,
        node=node.name,
        op_type=node.op_type,
        role=role,
        format=grid.format,
        granularity=grid.granularity if codes else "",
        depthwise=role == "weight"
        and node.op_type == "Conv"
        and a.shape[1] == 1
        and a.shape[0] > 1,
        channels=len(reach),
        sqnr=decibels(float(signal.sum()), float(noise.sum())),
        cosine=float((wide[0] * own).sum() / norm)
        if norm
        else float(signal.sum() == np.square(own).sum()),
        worst_channel=int(ratios.argmin()),
        worst_sqnr=float(ratios.min()),
        dead=[int(i) for i in np.flatnonzero(dead)],
        dead_noise=float(noise[dead].sum() / noise.sum()) if dead.any() else 0.0,
        outlier_channel=int(reach.argmax()),
        outlier_ratio=float(reach.max() / median) if median else 1.0,
        saturated=saturated,
        clipped=clipped,
        rescaled=scaled,
        rms=float(np.sqrt(np.mean(np.square(a)))),
        lo=float(a.min()),
        hi=float(a.max()),
        grid_lo=_end(grid.lo, np.min),
        grid_hi=_end(grid.hi, np.max),
        step=_end(grid.step, np.max),
    )


def _channel_axis(node: Node, rank: int) -> int | None:
    if node.op_type == "Gemm":
        return 0 if node.attribute("transB", 0) else 1
    axis = _AXES.get(node.op_type)
    return axis % rank if axis is not None and rank > 1 else None


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
    shape = (a.shape[0], inputs, -1)
    product, energy = ((a * c).reshape(shape).sum(axis=2) for c in (b, a))
    left, right = np.ones((shape[0], 1)), np.ones((1, inputs))
    for _ in range(_ROUNDS):  # least squares for one side at a time
        left = _gain(
            (product * right).sum(axis=1, keepdims=True),
            (energy * right**2).sum(axis=1, keepdims=True),
        )
        right = _gain(
            (product * left).sum(axis=0, keepdims=True),
            (energy * left**2).sum(axis=0, keepdims=True),
        )
    fitted = (b.reshape(shape) / (left * right)[:, :, None]).reshape(b.shape)
    signal = float(energy.sum())
    before, after = (
        decibels(signal, float(np.square(c - a).sum())) for c in (b, fitted)
    )
    return (fitted, True) if after > max(before, 0.0) + _RESCALED else (b, False)


def _gain(product: Floats, energy: Floats) -> Floats:
    gain: Floats = np.divide(
        product,
        energy,
        out=np.ones_like(energy),
        where=(energy > 0) & (product != 0),
    )
    return gain


def _grid(
    other: Reading,
    codes: object,
    values: Floats,
    scaled: bool,
) -> tuple[Grid, float, float]:
    """Return the grid of codes, the share of saturated codes and of clipped values."""
    if not isinstance(codes, tuple):
        return Grid("", granularity=""), 0.0, 0.0
    tensor, scale = codes
    grid = other.grid(scale, other.graph.elem_type(tensor))
    if grid.lo is None or grid.hi is None or grid.step is None or not grid.uniform:
        return grid, 0.0, 0.0
    if not other.constants.known(tensor):
        return grid, 0.0, 0.0
    reals = other.decoded(other.constants.value(tensor), scale)
    axis = scale.axis if scale.axis < reals.ndim else reals.ndim - 1
    lo, hi, step = (
        spread(part, reals.shape, axis, scale.block)
        for part in (grid.lo, grid.hi, grid.step)
    )
    saturated = float(np.mean((reals <= lo + step / 4) | (reals >= hi - step / 4)))
    if scaled or reals.shape != values.shape:
        return grid, saturated, 0.0
    return (
        grid,
        saturated,
        float(np.mean((values < lo - step / 2) | (values > hi + step / 2))),
    )


def _end(values: Floats | None, pick: object) -> float | None:
    return None if values is None or not callable(pick) else float(pick(values))


def with_histogram(weight: WeightError, reference: Reading) -> WeightError:
    """Return a weight's error with the histogram of its float values.

    Args:
        weight: the error.
        reference: the float model.
    """
    histogram = Histogram()
    histogram.observe(
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
        lo, hi = lo - 0.5, hi + 0.5
    centres, counts = histogram.signed(0)
    width = max((hi - lo) / _BINS, float(histogram.width[0]))
    edges = np.linspace(lo, hi, max(1, round((hi - lo) / width)) + 1)
    places = np.clip(
        np.searchsorted(edges, centres, side="right") - 1,
        0,
        len(edges) - 2,
    )
    summed = np.bincount(places, weights=counts, minlength=len(edges) - 1)
    return Bins([float(e) for e in edges], [int(c) for c in summed])
