"""Count the values of held-out samples that the calibrated ranges clip.

A range covers the calibration samples. Rare values of other samples lie outside of it, and their
errors may exceed all rounding errors: the report names the tensors that have such values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibrators import Extremes, Grid, QParams, Range, covered
from calibrators.errors import DataError
from calibrators.extremes import bounds
from calibrators.onnx_runtime.control_flow import Observation
from calibrators.onnx_runtime.runner import Receive, collect
from quark_onnx.graph import Graph
from quark_onnx.measuring.calibrate import Ranges
from quark_onnx.plan import Quantize
from quark_onnx.report.clipping import ClippedTensor, Clipping
from quark_onnx.running.run import Sample
from quark_onnx.scales.compute_qparams import ResolvedPlan


@dataclass
class _Outside(Extremes):
    """Extremes of a stream, and the number of its values outside of an interval."""

    low: float = 0.0
    high: float = 0.0
    outside: int = 0
    count: int = 0

    def observe(self, rows: NDArray[np.float32]) -> None:
        if not rows.size:
            return
        lo, hi, nonfinite = bounds(rows)
        self.observe_bounds(lo, hi, nonfinite)
        # NaN is outside of no interval. Most samples have no value outside.
        if nonfinite or (lo < self.low).any() or (hi > self.high).any():
            self.outside += np.count_nonzero(rows < self.low)
            self.outside += np.count_nonzero(rows > self.high)
        self.count += rows.size

    def merge(self, other: Extremes) -> None:
        super().merge(other)
        if isinstance(other, _Outside):
            self.outside += other.outside
            self.count += other.count


@dataclass(frozen=True)
class _Covered:
    """A calibrator that counts the values outside of the range of known codes.

    Attributes:
        low, high: least and greatest value of the codes.
        step: distance of two codes. Values up to half a step outside are rounded, not clipped.
    """

    low: float
    high: float
    step: float

    def statistic(self) -> _Outside:
        margin = self.step / 2
        return _Outside(low=self.low - margin, high=self.high + margin)

    def range(self, statistic: _Outside, grid: Grid) -> Range:
        """Return the observed range."""
        return Range(statistic.lo, statistic.hi)


def measure_clipping(
    graph: Graph,
    resolved: ResolvedPlan,
    ranges: Ranges,
    samples: Sequence[Sample],
    receive: Receive | None = None,
) -> Clipping | None:
    """Run the float graph on held-out samples, and count the clipped values of its activations.

    Args:
        graph: the float graph.
        resolved: the plan and its scales; scales per channel and formats without a uniform step are
            skipped.
        ranges: the calibrated tensors.
        samples: samples that no range was measured on.
        receive: called with the position of a sample and the float outputs on it.

    Returns:
        The clipping; None without samples, without such tensors, and if a sample does not run.
    """
    plan, params = resolved
    # One interval per tensor: uses of one tensor with different scales count as one each.
    observations = list[Observation]()
    for use in ranges:
        entry = plan.entries[use]
        qparams = params.table.get(plan.root(use))
        if isinstance(entry, Quantize) and qparams is not None:
            calibrator = _calibrator(entry, qparams)
            if calibrator is not None:
                observations.append(Observation(use.tensor, calibrator, None))
    if not observations or not samples:
        return None
    observations = list(dict.fromkeys(observations))
    try:
        statistics = collect(graph.to_model, observations, samples, receive=receive)
    except DataError:
        # The measurement of the outputs fails on this sample, too, and says so.
        return None
    tensors = list[ClippedTensor]()
    for observation, statistic in zip(observations, statistics, strict=True):
        if isinstance(statistic, _Outside) and statistic.outside:
            tensors.append(_clipped(observation, statistic))
    # The name decides between equal shares.
    tensors.sort(key=lambda tensor: (-tensor.share, tensor.name))
    return Clipping(len(samples), len(observations), tuple(tensors))


def _calibrator(entry: Quantize, params: QParams) -> _Covered | None:
    """Return the calibrator that counts clipped values; None without a single uniform step."""
    if params.scale.size != 1 or not entry.spec.dtype.uniform:
        return None
    reached = covered(params, entry.spec.grid)
    return _Covered(reached.lo.item(), reached.hi.item(), params.scale.item())


def _clipped(observation: Observation, statistic: _Outside) -> ClippedTensor:
    calibrator = observation.calibrator
    assert isinstance(calibrator, _Covered)
    return ClippedTensor(
        observation.tensor,
        statistic.outside / statistic.count,
        calibrator.low,
        calibrator.high,
        statistic.lo.item(),
        statistic.hi.item(),
    )
