"""Pools on integers: maxima of windows, and averages as a sum with a divisor.

The engine has no division. It multiplies a sum by k and shifts it by n bits, so that an average of
R inputs is R * k / 2**n times the exact average (amd-quark 0.13,
onnx/postprocess/simulation/simulate_dpu.py). amd-quark writes this factor into its models, as a Mul
after the average. If the Mul exists, the factor is not applied twice.
"""

from __future__ import annotations

from math import ceil, lcm, log2, prod
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from quark_onnx.kernels.im2col import windowed
from quark_onnx.npu.integers.call import NodeCall, Operator, Value
from quark_onnx.npu.integers.fixed import Fixed, Ints, times
from quark_onnx.npu.integers.windows import covered, placed, places

T = TypeVar("T", np.int64, np.float64)

#: Side of a square window -> k, n.
_FACTORS = {3: (7, 6), 5: (10, 8), 6: (7, 8), 7: (21, 10), 14: (21, 12)}
#: Side of a window from which the engine's factor is not imitated.
_WIDE = 256


def max_pool(call: NodeCall) -> list[Value]:
    """Compute MaxPool, without indices."""
    if any(call.node.outputs[1:]):
        raise call.refused("indices of the greatest values are not computed")
    return call.moved(lambda values: _greatest(call, values))


def _greatest(call: NodeCall, values: NDArray[T]) -> NDArray[T]:
    """Return the maximum of each window.

    Args:
        values: (batch, channels, ...).
    """
    # (taps, batch, channels, ...): the maximum runs over the taps.
    rows, _ = _windows(call, values)
    # Padding never is the maximum: the least value of the tensor, or 0 if that is less, stands
    # for minus infinity.
    inside, _ = _windows(call, np.ones((1, 1, *values.shape[2:]), np.int64))
    greatest: NDArray[T] = np.where(inside != 0, rows, values.min(initial=0)).max(
        axis=0,
    )
    return greatest


def average_pool(call: NodeCall) -> list[Value]:
    """Compute AveragePool, with or without counting the padding."""
    x, kernel = call.fixed(0), tuple(call.node.attribute("kernel_shape"))
    rows, output = _windows(call, x.values)
    window, _ = placed(call.node, x.values.shape[2:], kernel)
    # Per output position: windows at the border may hold padding.
    counts = covered(call.node, window, x.values.shape[2:], output)
    sums = Fixed(rows.sum(axis=0), x.position, x.divisor)
    return [_average(call, sums, counts, engine_factor(kernel))]


def global_average(call: NodeCall) -> list[Value]:
    """Compute GlobalAveragePool."""
    # Batch and channels precede the spatial axes.
    size = call.fixed(0).values.shape[2:]
    return [_mean(call, tuple(range(2, 2 + len(size))), True, engine_factor(size))]


def global_max(call: NodeCall) -> list[Value]:
    """Compute GlobalMaxPool."""
    return call.moved(
        lambda values: values.max(axis=tuple(range(2, values.ndim)), keepdims=True),
    )


def reduce_mean(call: NodeCall) -> list[Value]:
    """Compute ReduceMean over constant axes."""
    axes = _reduced(call)
    if not axes:
        return [call.fixed(0)]
    count = prod(call.size()[axis] for axis in axes)
    keepdims = bool(call.node.attribute("keepdims", 1))
    return [_mean(call, axes, keepdims, (count, *searched(count)))]


def reduce_sum(call: NodeCall) -> list[Value]:
    """Compute ReduceSum over constant axes, exactly."""
    axes = _reduced(call)
    keepdims = bool(call.node.attribute("keepdims", 1))
    if not axes:
        return [call.fixed(0)]
    return [call.fixed(0).shaped(lambda values: values.sum(axes, keepdims=keepdims))]


def _reduced(call: NodeCall) -> tuple[int, ...]:
    """Return the axes of a reduction, in order; none where nothing is reduced."""
    rank = len(call.fixed(0).values.shape)
    axes = call.known(1).tolist() if call.has(1) else call.node.attribute("axes", [])
    # An empty list of axes means all of them, unless this attribute is set.
    if not axes and call.node.attribute("noop_with_empty_axes", 0):
        return ()
    return tuple(sorted({axis % rank for axis in axes or range(rank)}))


def engine_factor(kernel: tuple[int, ...]) -> tuple[int, int, int]:
    """Return R, k and n of the engine's average: ``R * k / 2**n`` of the exact average.

    Args:
        kernel: sizes of the window.

    Returns:
        R, k and n; 1, 1, 0 if the engine's average is exact.

    >>> engine_factor((7, 7)), engine_factor((2, 2)), engine_factor((3, 5))
    ((49, 21, 10), (4, 1, 2), (1, 1, 0))
    """
    # amd-quark corrects averages over square windows alone.
    if len(kernel) != 2 or kernel[0] != kernel[1] or kernel[0] >= _WIDE:
        return 1, 1, 0
    count = kernel[0] * kernel[1]
    return count, *_FACTORS.get(kernel[0], searched(count))


def searched(count: int) -> tuple[int, int]:
    """Search k and n such that ``k / 2**n`` is closest to ``1 / count``.

    Of equally close pairs the least n wins, within 6 bits of ``log2(count)``.
    """
    pairs = [(round(2**n / count), n) for n in range(7 + ceil(log2(count)))]
    return min(pairs, key=lambda pair: abs(pair[0] / 2 ** pair[1] - 1 / count))


def _windows(call: NodeCall, values: NDArray[T]) -> tuple[NDArray[T], tuple[int, ...]]:
    """Return the inputs of each window, with zeros outside the input.

    Returns:
        The inputs, (taps, batch, channels, ...), and the spatial sizes of the output.
    """
    kernel = tuple(call.node.attribute("kernel_shape"))
    batch, channels = values.shape[:2]
    window, output = placed(call.node, values.shape[2:], kernel)
    positions = np.arange(places(batch, output))[None]
    [rows] = windowed([values], positions, output, window, channels)
    taps = rows.transpose(2, 1, 0).reshape(-1, batch, *output, channels)
    return np.moveaxis(taps, -1, 2), output


def _mean(
    call: NodeCall, axes: tuple[int, ...], keepdims: bool, factor: tuple[int, int, int]
) -> Fixed:
    """Return the average over some axes, exactly or with the engine's factor.

    Args:
        axes: axes to average over, counted from the front.
        factor: R, k and n of ``engine_factor``.
    """
    x = call.fixed(0)
    count = prod(x.values.shape[axis] for axis in axes)
    sums = Fixed(x.values.sum(axis=axes, keepdims=keepdims), x.position, x.divisor)
    return _average(call, sums, np.array(count), factor)


def _average(
    call: NodeCall, sums: Fixed, counts: Ints, factor: tuple[int, int, int]
) -> Fixed:
    """Divide sums by their counts, or apply the engine's factor."""
    # Windows at the border may average fewer inputs. A common multiple of the counts keeps a
    # single divisor, and the averages exact.
    common = lcm(*np.unique(counts).tolist())
    # Each sum over its count is (sum * common / count) / common, an integer over one divisor.
    scaled = times(sums, Fixed(common // counts, 0))
    average = Fixed(scaled.values, scaled.position, scaled.divisor * common)
    if "average" not in call.engine or call.corrected:
        return average
    inputs, k, n = factor
    return times(average, Fixed(np.array(inputs * k), n))


POOLS: dict[str, Operator] = {
    "AveragePool": average_pool,
    "GlobalAveragePool": global_average,
    "GlobalMaxPool": global_max,
    "MaxPool": max_pool,
    "ReduceMean": reduce_mean,
    "ReduceSum": reduce_sum,
}
