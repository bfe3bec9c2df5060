"""solve: from ranges to scales and zero points, with the int32 range of the biases minded."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from calibrators import QParams, Range, params_for, rows
from calibrators.grid import SMALLEST_SCALE
from quark_onnx.graph import Graph
from quark_onnx.plan import BiasOf, Keep, Plan, Quantize, Use
from quark_onnx.steps.calibrate import Ranges

_INT32 = 2.0**31 - 1
#: The largest scale of a bias, or of a weight for its sake: a float32, with room to round up to a power of two.
_LARGEST_SCALE = 2.0**126
#: Rows whose statistics are alive at a time.
_ROWS = 256


@dataclass
class Params:
    """Scale and zero point of every use that has its own.

    Attributes:
        table: by use; a use that is the same as another is looked up at its root.
        raised: for each weight whose scale was raised to hold a bias, the number of channels.
    """

    table: dict[Use, QParams] = field(default_factory=dict)
    raised: dict[str, int] = field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        """What a report says of it."""
        return [f"scale of {n} channels of {w!r} raised to hold its bias" for w, n in self.raised.items()]


def solve(graph: Graph, plan: Plan, ranges: Ranges) -> Params:
    """The scales and zero points of everything but biases."""
    params = Params()
    for use, entry in plan.entries.items():
        if isinstance(entry, Quantize):
            params.table[use] = params_for(_range(graph, ranges, use, entry), entry.spec.grid, entry.axis)
    return params


def solve_biases(graph: Graph, plan: Plan, params: Params) -> None:
    """Add the scales of the biases to ``params``, raising those of weights where an int32 would not hold them.

    Biases that cannot be held are kept float in ``plan``, with the reason.
    """
    for use, entry in list(plan.entries.items()):
        if isinstance(entry, BiasOf):
            _make_room(graph, plan, params, use, entry)
    for use, entry in plan.entries.items():
        if isinstance(entry, BiasOf):
            params.table[use] = _bias_params(plan, params, entry)


def _range(graph: Graph, ranges: Ranges, use: Use, entry: Quantize) -> Range:
    if entry.bounds is not None:
        return Range(np.array([entry.bounds[0]]), np.array([entry.bounds[1]]))
    calibrator = entry.spec.calibrator
    array = graph.constant(use.tensor)
    if array is None:
        return calibrator.range(ranges[use], entry.spec.grid)
    parts = []
    table = rows(array, entry.axis)
    for start in range(0, len(table), _ROWS):
        statistic = calibrator.statistic()
        statistic.observe(table[start : start + _ROWS])
        parts.append(calibrator.range(statistic, entry.spec.grid))
    return Range(np.concatenate([part.lo for part in parts]), np.concatenate([part.hi for part in parts]))


def _bias_params(plan: Plan, params: Params, entry: BiasOf) -> QParams:
    """Scale of a bias: activation scale times weight scale, for each channel if the weight has channels."""
    x, w = (params.table[plan.root(use)] for use in (entry.x, entry.w))
    scale = (x.scale.astype(np.float64) * w.scale.astype(np.float64)).astype(np.float32)
    if w.axis is not None:
        scale = np.tile(scale, entry.repeat)
    return QParams(scale, np.zeros(scale.shape, np.int64), None if w.axis is None else entry.axis)


def _make_room(graph: Graph, plan: Plan, params: Params, use: Use, entry: BiasOf) -> None:
    """Raise weight scales until the bias fits into int32 and its scale is a normal number.

    Where a bias exceeds int32, the weights are so small beside it that a coarser scale costs nothing that an 8-bit
    result would show. To leave the bias float would not do: onnxruntime's optimizer quantizes the float bias of a
    quantized layer by itself, and does not mind the overflow.
    """
    bias = graph.constant(use.tensor)
    source, root = plan.root(entry.x), plan.root(entry.w)
    if bias is None or source not in params.table or root not in params.table:
        plan.entries[use] = Keep("the activation or the weight beside it is not quantized")
        return
    x, w = params.table[source], params.table[root]
    magnitude = np.abs(bias.astype(np.float64))
    least = np.maximum(magnitude / _INT32 * (1 + 1e-6), SMALLEST_SCALE) / x.scale.astype(np.float64)
    largest = max(least.max(initial=0.0), float(w.scale.max()))
    if max(largest, largest * float(x.scale)) > _LARGEST_SCALE:
        plan.entries[use] = Keep("it would need a scale beyond what a float holds")
        return
    if w.axis is not None:
        if least.size != w.scale.size * entry.repeat:
            plan.entries[use] = Keep("it does not have one value for each channel of the weight")
            return
        least = least.reshape(entry.repeat, -1).max(axis=0)
    short = least > w.scale
    if short.any():
        weight = plan.entries[root]
        pow2 = isinstance(weight, Quantize) and weight.spec.pow2
        least = np.exp2(np.ceil(np.log2(least))) if pow2 else least
        raised = np.where(short, least, w.scale)
        params.table[root] = w.with_scale(_up(raised if w.axis is not None else raised.max()))
        params.raised[root.tensor] = params.raised.get(root.tensor, 0) + int(short.sum())


def _up(scale: NDArray[np.float64]) -> NDArray[np.float32]:
    """float32, never below the value given."""
    rounded = scale.astype(np.float32)
    return np.where(rounded < scale, np.nextafter(rounded, np.float32(np.inf)), rounded)
