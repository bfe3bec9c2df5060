"""Scales and zero points from ranges, limited by the int32 range of biases."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibrators import Grid, QParams, Range, params_for
from calibrators.affine import octaves_for, round_scale
from calibrators.base import range_of
from calibrators.errors import CalibrationError
from calibrators.grid import SMALLEST_SCALE
from calibrators.layout import parts_of_rows, rows
from calibrators.onnx_runtime.cpu_features import available_cores
from calibrators.shown import short
from quark_onnx.common.errors import ConfigError
from quark_onnx.common.wording import counted
from quark_onnx.config import QuantizationSpec
from quark_onnx.dtypes import INT32, Integer
from quark_onnx.graph import Graph, Node
from quark_onnx.kernels.hqq import half_quadratic
from quark_onnx.kernels.nbits import round_to_nearest
from quark_onnx.kernels.packing import BITS
from quark_onnx.measuring.calibrate import Ranges
from quark_onnx.plan import BiasOf, Entry, Keep, Plan, PlanBuilder, Quantize, Use
from quark_onnx.planning import bounded
from quark_onnx.scales.encoded_constants import EncodedConstants
from quark_onnx.scales.join_ranges import join_ranges, join_time_steps

#: The largest code of a bias. The other half of int32 is reserved for the sum of products.
_LARGEST_CODE = 2.0**30
#: The largest scale of a bias, or of a weight raised for a bias: float32, with room to round up
#: to a power of two.
_LARGEST_SCALE = 2.0**126
#: The least scale that float16 represents to within 2 %, as a denormal number.
_LEAST_HALF = 2.0**-18
#: Number of blocks per call of the solver.
_BLOCKS = 1 << 12
#: Maximum rows, and maximum values, whose statistics are in memory at a time.
_ROWS, _VALUES = 256, 1 << 16


@dataclass
class Params:
    """Scale and zero point of every use with separate parameters.

    Attributes:
        table: parameters by use; a tied use is looked up at its root.
        raised: number of channels whose scale was raised to hold a bias, by weight.
        encoded: codes of constants that were computed with the parameters.
    """

    table: dict[Use, QParams] = field(default_factory=dict)
    raised: dict[str, int] = field(default_factory=dict)
    encoded: EncodedConstants = field(
        default_factory=EncodedConstants, repr=False, compare=False
    )

    def with_scales(self, scales: Mapping[Use, NDArray[np.float32]]) -> Params:
        """Return a copy with other scales and the same zero points.

        Args:
            scales: the new scales, in the shapes of the old ones; uses left out keep their scale.
        """
        table = dict(self.table)
        for use, scale in scales.items():
            # Parameters of an unchanged scale stay the same objects: their codes are known.
            if not np.array_equal(table[use].scale, scale):
                table[use] = table[use].with_scale(scale)
        return replace(self, table=table, raised=dict(self.raised))

    @property
    def notes(self) -> list[str]:
        """Return the notes for the report."""
        return [
            f"scale of {counted(n, 'channel')} of {w!r} raised to hold its bias"
            for w, n in self.raised.items()
        ]


class ResolvedPlan(NamedTuple):
    """A plan with the scales and zero points of its tensors.

    Attributes:
        plan: the plan; tensors whose scale cannot be stored are float, with the reason.
        params: the parameters.
    """

    plan: Plan
    params: Params


def compute_qparams(graph: Graph, plan: Plan, ranges: Ranges) -> ResolvedPlan:
    """Return the scales and zero points of every tensor except biases.

    Args:
        graph: the float graph.
        plan: the plan after calibration; not changed.
        ranges: the statistics of the measured activations; constants are read from the graph.

    Returns:
        The parameters, and the plan in which tensors whose scale float16 cannot hold are float.

    Raises:
        ConfigError: parameters or a range that the user gives do not fit the tensor.
    """
    params = Params()
    changes: dict[Use, Entry] = {}
    zeros: set[Use] = set()
    for use, entry in plan.entries.items():
        if not isinstance(entry, Quantize) or not entry.spec.measured:
            continue
        # The user's parameters precede all others.
        if entry.given is not None and entry.given.scale:
            params.table[use] = _given_params(graph, use, entry)
        elif _beyond_half(graph, ranges, use, entry):
            changes[use] = Keep("its scale is beyond what a float16 holds")
        else:
            params.table[use] = _computed(graph, ranges, use, entry, zeros)
    plan = plan.revised(changes)
    join_time_steps(graph, plan, params.table, zeros)
    # After all parameters are known, because the union needs those of the inputs.
    join_ranges(graph, plan, params.table, zeros)
    return ResolvedPlan(plan, params)


def _computed(
    graph: Graph, ranges: Ranges, use: Use, entry: Quantize, zeros: set[Use]
) -> QParams:
    """Return scale and zero point from the range of a tensor, measured or known.

    Args:
        entry: the decision for the use, without a scale given by the user.
        zeros: gets the use if its range is zero alone.
    """
    spec = entry.spec
    if isinstance(spec.dtype, Integer) and spec.block_size and _all_codes(spec):
        return _in_blocks(graph, use, entry, spec.dtype)
    if entry.bounds is not None and not _ranged(entry):
        return bounded.params(entry.bounds, ranges.get(use), spec.grid)
    ends = _range(graph, ranges, use, entry)
    if not (ends.lo.any() or ends.hi.any()):
        zeros.add(use)
    params = params_for(ends, spec.grid, entry.axis)
    if not spec.block_size:
        return params
    # From one scale per row of ``entry.rows`` to the shape of the blocks in the tensor.
    return entry.placed(params, tuple(graph.initializers[use.tensor].dims))


def _ranged(entry: Quantize) -> bool:
    """Return whether the user configured the range, overriding known bounds."""
    return entry.given is not None and entry.given.ranged


def compute_bias_qparams(graph: Graph, plan: Plan, params: Params) -> Plan:
    """Add the bias scales to ``params``; raise weight scales to avoid int32 overflow.

    Args:
        graph: the float graph.
        plan: the plan; not changed.
        params: the scales of activations and weights; changed in place.

    Returns:
        The plan, in which biases that still overflow are float, with the reason. A weight whose
        scale is raised for one of several readers has an entry of its own for this reader.
    """
    changed = PlanBuilder.of(plan)
    for use, entry in plan.entries.items():
        # Weight scales first: two biases may raise one scale, and bias scales are products of the
        # final ones.
        if isinstance(entry, BiasOf):
            _make_room(graph, changed, params, use, entry)
    plan = changed.build()
    for use, entry in plan.entries.items():
        if isinstance(entry, BiasOf):
            bias = _bias_params(graph, plan, params, use, entry)
            if entry.dtype != INT32:
                bias = _widened(graph, use, bias, entry.dtype)
            params.table[use] = bias
    return plan


def _in_blocks(graph: Graph, use: Use, entry: Quantize, dtype: Integer) -> QParams:
    """Return the scales of a blocked constant, computed by the spec's solver.

    The sign of a scale is the sign of the value with the greatest magnitude.

    Args:
        entry: its decision, with axis and block size.
        dtype: the type of the codes, with 2, 4 or 8 bits.

    Returns:
        Parameters with one scale and zero point per block, as ``entry.placed`` arranges them.
    """
    array = graph.known(use.tensor)
    assert entry.axis is not None
    spec, axis = entry.spec, entry.axis

    # Blocks are rows of (n, block size), each with one scale and zero point.
    def solved(part: NDArray[Any]) -> list[QParams]:
        table = rows(part, axis, spec.block_size)
        qparams = []
        for start in range(0, len(table), _BLOCKS):
            blocks = np.ascontiguousarray(table[start : start + _BLOCKS], np.float32)
            if spec.solver == "hqq":
                qparams.append(half_quadratic(blocks, dtype.bits))
            else:
                qparams.append(
                    round_to_nearest(blocks, dtype.bits, symmetric=spec.symmetric)
                )
        return qparams

    views = parts_of_rows(entry.stored(array), axis, spec.block_size)
    with ThreadPoolExecutor(available_cores()) as pool:  # numpy releases the GIL
        parts = [part for found in pool.map(solved, views) for part in found]
    scale = np.concatenate([part.scale for part in parts])
    zero = np.concatenate([part.zero_point for part in parts])
    # Solvers may return negative scales, and rounding to float16 is defined for positive ones.
    scale = np.sign(scale) * round_scale(np.abs(scale.astype(np.float64)), spec.grid)
    # Solvers count codes from 0; the format's codes begin at qmin.
    flat = QParams(scale.astype(np.float32), zero + dtype.qmin, 0)
    return entry.placed(flat, array.shape)


def _beyond_half(graph: Graph, ranges: Ranges, use: Use, entry: Quantize) -> bool:
    """Return whether float16 cannot store the greatest scale: too large, or too small.

    Args:
        entry: its decision; False for scales stored in float32.
    """
    if entry.spec.scale != "float16":
        return False
    # Unlimited by float16, whose limit is in question.
    plain = replace(entry, spec=entry.spec.with_(scale="float32"))
    ends = _range(graph, ranges, use, plain)
    greatest = params_for(ends, plain.spec.grid, 0).scale.max(initial=0)
    return not _LEAST_HALF <= greatest <= entry.spec.grid.scales[1]


def _all_codes(spec: QuantizationSpec) -> bool:
    """Return whether the block solvers support a spec: 2, 4 or 8 bits, float scale."""
    return spec.codes.bits in BITS and not (
        spec.pow2 or spec.narrow or spec.reduce_range
    )


def _given_params(graph: Graph, use: Use, entry: Quantize) -> QParams:
    """Return the user's scale and zero point.

    Raises:
        ConfigError: the parameters do not fit the format, or their number differs from the
            number of channels.
    """
    given, grid = entry.given, entry.spec.grid
    assert given is not None
    scale = np.asarray(given.scale, np.float32)
    zero = np.asarray(given.zero_point, np.int64)
    if zero.min() < grid.qmin or zero.max() > grid.qmax:
        raise ConfigError(
            f"zero_point of {use} is {short(given.zero_point)}; {entry.spec.dtype.name}"
            f" has codes from {grid.qmin} to {grid.qmax}",
        )
    shape = graph.shape(use.tensor)
    shape = None if shape is None else entry.sizes(shape)
    # One number serves all channels; for an axis of length 1 it is that of its channel.
    axis = (
        entry.axis
        if scale.size > 1
        or (entry.axis is not None and shape and shape[entry.axis] == 1)
        else None
    )
    if scale.size > 1 and (
        entry.axis is None or not shape or shape[entry.axis] != scale.size
    ):
        raise ConfigError(
            f"scale of {use} has {scale.size} numbers; it must be one, or one for each"
            " channel of an axis",
        )
    if axis is None:
        return QParams(scale[0], zero[0])
    return QParams(scale, np.broadcast_to(zero, scale.shape), axis)


def _range(graph: Graph, ranges: Ranges, use: Use, entry: Quantize) -> Range:
    """Return the range of a tensor, within the ends that the user gives.

    Returns:
        Arrays of one value per tensor, or of one per channel or row of ``entry.rows``.

    Raises:
        ConfigError: a range is given for an axis of unknown size.
    """
    ends = _range_before_user(graph, ranges, use, entry)
    if entry.given is None:
        return ends
    # The user may give one end, or limits of both; the data gives the rest.
    low, high = entry.given.bounds(ends.lo, ends.hi)
    if entry.given.snapped and not graph.is_constant(use.tensor):
        low, high = _snapped(low, high, entry.spec.grid)
    shape = graph.shape(use.tensor)
    shape = None if shape is None else entry.sizes(shape)
    if (
        entry.axis is not None
        and shape
        and max(low.size, high.size) == 1
        and not entry.spec.block_size
    ):
        channels = shape[entry.axis]
        if not isinstance(channels, int):
            raise ConfigError(
                f"{use} has a range and axis {entry.axis}, whose size is"
                f" {channels or 'unknown'}; leave out axis, or give the model a fixed size",
            )
        low = np.broadcast_to(low, (channels or 1,))
        high = np.broadcast_to(high, (channels or 1,))
    return Range(low, high)


def _snapped(
    low: NDArray[np.float64], high: NDArray[np.float64], grid: Grid
) -> tuple[Any, Any]:
    """Widen a range that reaches below zero so that zero is the middle code.

    Args:
        low: least values, per tensor or per channel.
        high: greatest values, in the same shape.

    Returns:
        The new ends; ranges without negative values are unchanged.
    """
    # Steps below and above zero: 128 and 127 of 255.
    below = (grid.levels + 1) // 2
    above = grid.levels - below
    scale = np.maximum(-low / below, high / above)
    return np.where(low < 0, -below * scale, low), np.where(
        low < 0, above * scale, high
    )


def _range_before_user(
    graph: Graph, ranges: Ranges, use: Use, entry: Quantize
) -> Range:
    """Return the range of a tensor, known, measured or of a constant, before the user's ends.

    Returns:
        Arrays of one value per tensor, or of one per channel or row of ``entry.rows``; zeros if
        the user gives both ends.
    """
    # Both ends are given: nothing is measured, and zeros stand for the range.
    if entry.given is not None and entry.given.low and entry.given.high:
        return Range(np.zeros(1), np.zeros(1))
    if entry.bounds is not None:
        return bounded.within(entry.bounds, ranges.get(use), entry.spec.grid)
    try:
        return _measured_range(graph, ranges, use, entry)
    except CalibrationError as error:
        raise ConfigError(f"tensor {use.tensor!r}: {error}") from error


def _measured_range(graph: Graph, ranges: Ranges, use: Use, entry: Quantize) -> Range:
    """Return the range that the calibrator of a tensor reads off its statistic."""
    calibrator = entry.spec.calibrator
    array = graph.constant(use.tensor)
    if array is None:
        return range_of(calibrator, ranges[use], entry.spec.grid)
    parts = []
    table = entry.rows(array)
    step = max(_ROWS, _VALUES // max(1, table.shape[1]))
    for start in range(0, len(table), step):
        # Rows are independent, so that parts give the same ranges in less memory.
        statistic = calibrator.statistic()
        statistic.observe(np.asarray(table[start : start + step], np.float32))
        parts.append(range_of(calibrator, statistic, entry.spec.grid))
    return Range(
        np.concatenate([part.lo for part in parts]),
        np.concatenate([part.hi for part in parts]),
    )


def _bias_params(
    graph: Graph, plan: Plan, params: Params, use: Use, entry: BiasOf
) -> QParams:
    """Return the scale of a bias: activation scale times weight scale.

    The scale is per-channel if the weight's scale is.
    """
    x, w = (params.table[plan.root(use)] for use in (entry.x, entry.w))
    scale = (x.scale.astype(np.float64) * w.scale.astype(np.float64)).astype(np.float32)
    if w.axis is not None:
        # ConvTranspose with groups: a scale of the weight may serve a channel of every group.
        outputs = graph.initializers[use.tensor].dims[0]
        if scale.size * entry.repeat == outputs:
            scale = np.tile(scale, entry.repeat)
    axis = None if w.axis is None else 0
    return QParams(scale, np.zeros(scale.shape, np.int64), axis)


def _widened(graph: Graph, use: Use, params: QParams, dtype: Integer) -> QParams:
    """Multiply bias scales by the least powers of two without overflow.

    Args:
        use: the use of the bias, a constant.
        params: the scales of the products, one or one per output.
    """
    magnitude = np.abs(graph.known(use.tensor).astype(np.float64))
    # (outputs,) with a scale per channel, or a single number.
    greatest = magnitude if params.axis is not None else magnitude.max(initial=0.0)
    octaves = octaves_for(greatest / params.scale.astype(np.float64), dtype.qmax)
    return params.with_scale((params.scale * np.exp2(octaves)).astype(np.float32))


def _make_room(
    graph: Graph, plan: PlanBuilder, params: Params, use: Use, entry: BiasOf
) -> None:
    """Raise weight scales until the bias fits int32 with a normal scale.

    A bias exceeds int32 only if the weights are tiny compared with the bias; a coarser weight
    scale then has no visible effect on an 8-bit result. A channel of zeros, which has any scale,
    gets one that keeps the digits of its bias. Keeping the bias of a layer float is no
    alternative: onnxruntime's optimizer quantizes the float bias of a quantized layer without
    an overflow check. A bias that an Add behind a product adds may stay float.

    Args:
        plan: the plan; the bias becomes float, with the reason, if no weight scale makes it fit.
        params: the scales of activations and weights; the weight's scale is replaced.
        entry: the decision for the bias.
    """
    bias = graph.constant(use.tensor)
    source, root = plan.root(entry.x), plan.root(entry.w)
    # A step after the rules may have kept one of both float.
    if bias is None or source not in params.table or root not in params.table:
        plan.entries[use] = Keep(
            "the activation or the weight beside it is not quantized",
        )
        return
    w, weight = params.table[root], plan.entries.get(root)
    room = _Room.of(bias, params.table[source], w, entry)
    reason = room.refusal(w, weight)
    # The result of a product with an Add behind it is not rounded to 8 bits.
    is_float = w.axis is None and _is_added_later(graph, use, entry)
    if not reason and is_float and room.low.any():
        reason = "the scale of the weight that lets an int32 hold it is too coarse"
    if reason:
        plan.entries[use] = Keep(reason)
        return
    unset = room.biased & (room.least < w.scale)
    unset &= _holds_zeros(graph, root, weight)
    if room.low.any() or unset.any():
        changed = _weight_to_raise(graph, plan, use, entry, root)
        if changed is not None:
            _set_scales(plan, params, root, changed, room, unset)
        elif room.low.any():
            plan.entries[use] = Keep(
                "its scale would be that of a weight which is computed or has other"
                " readers",
            )


@dataclass(frozen=True)
class _Room:
    """The weight scales that a bias needs.

    Attributes:
        least: the least scales, (channels,), or () with one scale for the weight.
        low: which scales are below.
        biased: where the bias is not zero.
        largest: the greatest scale of the weight after it is raised.
        step: the scale of the activation.
    """

    least: NDArray[np.float64]
    low: NDArray[np.bool_]
    biased: NDArray[np.bool_]
    largest: float
    step: float

    @classmethod
    def of(cls, bias: NDArray[Any], x: QParams, w: QParams, entry: BiasOf) -> _Room:
        """Return the scales for the values of a bias."""
        magnitude = np.abs(bias.astype(np.float64))
        # The scale of a 16-bit bias is raised by powers of two instead.
        if entry.dtype != INT32:
            magnitude = np.zeros_like(magnitude)
        step = float(x.scale)
        least = np.maximum(magnitude / _LARGEST_CODE, SMALLEST_SCALE) / step
        largest = max(least.max(initial=0.0), float(w.scale.max()))
        if w.axis is None:
            least = np.max(least, initial=0.0, keepdims=True).reshape(())
            magnitude = np.max(magnitude, initial=0.0, keepdims=True).reshape(())
        elif least.size == w.scale.size * entry.repeat:
            # (repeat, channels): a weight scale serves the same channel of every group.
            least = least.reshape(entry.repeat, -1).max(axis=0)
            magnitude = magnitude.reshape(entry.repeat, -1).max(axis=0)
        low = least > w.scale if least.shape == w.scale.shape else np.zeros((), bool)
        return cls(least, np.asarray(low), np.asarray(magnitude > 0), largest, step)

    def refusal(self, w: QParams, weight: Entry | None) -> str:
        """Return why the weight cannot have these scales; empty if it can."""
        half = isinstance(weight, Quantize) and weight.spec.scale == "float16"
        greatest = max(self.largest, self.largest * self.step)
        if greatest > _LARGEST_SCALE or (
            half and self.largest > Grid(0, 1, half=True).scales[1]
        ):
            held = "float16" if half else "float"
            return f"it would need a scale beyond what a {held} holds"
        if self.least.shape != w.scale.shape:
            return "it does not have one value for each channel of the weight"
        given = weight.given if isinstance(weight, Quantize) else None
        if self.low.any() and given is not None and (given.scale or not given.raised):
            return (
                "an int32 does not hold it with the scale of its weight, which is not"
                " to be raised"
            )
        return ""


def _set_scales(  # noqa: PLR0913
    plan: PlanBuilder,
    params: Params,
    root: Use,
    changed: Use,
    room: _Room,
    unset: NDArray[np.bool_],
) -> None:
    """Raise the scales of a weight for a bias, and set those of its channels of zeros.

    Args:
        params: the scales; changed in place.
        root: the use that owned the scales.
        changed: the use of the weight whose scales change.
    """
    w, weight = params.table[root], plan.entries[changed]
    pow2 = isinstance(weight, Quantize) and weight.spec.pow2
    least = np.maximum(room.least, SMALLEST_SCALE)
    least = np.exp2(np.ceil(np.log2(least))) if pow2 else least
    # Channels whose bias fits keep their scale. Rounded up: a scale that rounds down to float32
    # would let the bias overflow after all.
    raised = _up(np.where(room.low | unset, least, w.scale))
    if isinstance(weight, Quantize) and weight.spec.scale == "float16":
        rounded = round_scale(raised.astype(np.float64), weight.spec.grid)
        raised = rounded.astype(np.float32)
    params.table[changed] = w.with_scale(raised)
    if room.low.any():
        count = params.raised.get(root.tensor, 0) + int(room.low.sum())
        params.raised[root.tensor] = count


def _holds_zeros(graph: Graph, root: Use, weight: Entry | None) -> NDArray[np.bool_]:
    """Return which channels of a constant weight hold zeros alone, such as pruned ones.

    Returns:
        (channels,), or (); False for a weight whose scales obey further rules.
    """
    values = graph.constant(root.tensor)
    if values is None or not isinstance(weight, Quantize) or weight.given is not None:
        return np.zeros((), bool)
    if weight.spec.pow2 or weight.spec.scale != "float32":
        return np.zeros((), bool)
    if weight.axis is None:
        return np.asarray(not values.any())
    return np.asarray(~weight.rows(values).any(axis=1))


def _is_added_later(graph: Graph, use: Use, entry: BiasOf) -> bool:
    """Return whether an Add after the product adds a bias, which may then stay float."""
    readers = graph.consumers(use.tensor)
    return all(entry.w.tensor not in reader.inputs for reader in readers)


def _weight_to_raise(
    graph: Graph, plan: PlanBuilder, use: Use, entry: BiasOf, root: Use
) -> Use | None:
    """Return the weight use whose scale may be raised for a bias without side effects.

    A weight with further consumers gets a second entry for the node that multiplies by it.

    Args:
        plan: the plan; changed in place if the weight gets a second entry.
        entry: the decision for the bias.
        root: the use that owns the weight's scale.

    Returns:
        ``root``, or the use with the second entry; None if no such use exists.
    """
    if not graph.is_constant(root.tensor):
        return None
    multiplying = [
        _multiplying(graph, node, use.tensor, entry.w.tensor)
        for node in graph.consumers(use.tensor)
        if plan.use(use.tensor, node) == use
    ]
    readers = [
        node
        for node in graph.consumers(root.tensor)
        if plan.root(plan.use(root.tensor, node)) == root
    ]
    if set(readers) <= set(multiplying) and root == plan.root(entry.w):
        # Nobody else reads the weight, so that its scale may change in place.
        return root
    if len(multiplying) != 1 or entry.w.tensor != root.tensor:
        return None
    [reader] = multiplying
    if reader is None:
        return None
    # The weight is then stored twice, with both scales.
    second = Use(root.tensor, reader.name)
    plan.entries[second] = plan.entries[root]
    plan.entries[use] = replace(entry, w=second)
    return second


def _multiplying(graph: Graph, node: Node, bias: str, weight: str) -> Node | None:
    """Return the node that multiplies by a weight: a reader of the bias, or the MatMul before it.

    None if the reader adds the bias to something else.
    """
    if weight in node.inputs:
        return node
    for name in node.inputs:
        product = graph.producer(name) if name != bias else None
        if product is not None and weight in product.inputs:
            return product
    return None


def _up(scale: NDArray[np.float64]) -> NDArray[np.float32]:
    """Round to float32, never below the given value."""
    rounded = scale.astype(np.float32)
    return np.where(rounded < scale, np.nextafter(rounded, np.float32(np.inf)), rounded)
