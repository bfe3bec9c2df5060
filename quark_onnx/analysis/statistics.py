"""Streaming statistics of a tensor: sums, extremes and a histogram, merged exactly."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibrators import Histogram
from calibrators.layout import rows
from quark_onnx.analysis.reading import CodeGrid
from quark_onnx.report.measure import cosine_similarity, decibels

#: Values of at least this magnitude are masks. Their squares would dominate every sum.
_MASK = 1e30
#: Above the first ratio, in dB, channels have no other scales; below, a fit has to reach the second
#: and be so much better, and the scales have to be so uneven.
_FAITHFUL, _CLOSE, _BETTER, _UNEVEN = 20.0, 12.0, 4.0, 1.15


@dataclass
class TensorStatistic:
    """Statistics of a float tensor and its quantized counterpart.

    Attributes:
        grid: grid of the quantized tensor; None if it stays float.
        axis: axis of the channels; None for a single channel.
        sums: by channel, sums of float^2, quantized^2, float * quantized, (quantized - float)^2 and
            quantized - float.
        lo: least float value of each channel.
        hi: greatest float value of each channel.
        before: sum of (computed - float)^2; None if the computed value cannot be observed.
        operator: sum of (computed - float)^2 on float inputs; None if it cannot be observed.
        own: sum of (rounded - float)^2 with the grid applied to float values; None if it cannot be
            observed.
        clipped: the part of ``own`` due to values beyond the grid.
        low: number of float values below the grid by more than half a step.
        high: number of float values above the grid by more than half a step.
    """

    grid: CodeGrid | None = None
    axis: int | None = None
    count: int = 0
    sums: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    lo: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    hi: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    before: float | None = None
    operator: float | None = None
    own: float | None = None
    clipped: float = 0.0
    low: int = 0
    high: int = 0
    histogram: Histogram = field(default_factory=Histogram)

    def observe(
        self,
        reference: NDArray[Any],
        seen: NDArray[Any],
        computed: NDArray[Any] | None = None,
    ) -> None:
        """Observe a sample.

        Args:
            reference: the float values.
            seen: the quantized values that consumers read, of the same shape.
            computed: the quantized model's values before the grid, of the same shape.
        """
        if not reference.size:
            return
        # Shapes (channels, values), or (1, values) without channels.
        a, b = self._channel_rows(reference, seen)
        usual = (np.abs(a) < _MASK) & (np.abs(b) < _MASK)
        # Masks count as 0 in both models, and so as no error.
        if not usual.all():
            a = np.where(usual, a, 0.0)
            b = np.where(usual, b, 0.0)
        self._add(a, b)
        self.count += reference.size
        self.histogram.observe(a.reshape(1, -1).astype(np.float32))
        if computed is not None:
            exact, usual = _usual(reference)
            self.before = (self.before or 0.0) + _noise(computed, exact, usual)

    def _channel_rows(
        self,
        reference: NDArray[Any],
        seen: NDArray[Any],
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return two tensors as matrices with a row for each channel, or a single row.

        Args:
            reference: the float values.
            seen: the quantized values, of the same shape.

        Returns:
            Both in float64, of shape (channels, values), or (1, values) without channels. Once the
            number of channels has varied between samples, all later samples are single rows.
        """
        axis = self.axis
        # The rank of a tensor may differ from the inferred one.
        if axis is not None and axis >= reference.ndim:
            axis = None
        # float64: squares of float16 values overflow, and float32 sums over samples lose digits.
        a = rows(reference, axis).astype(np.float64)
        b = rows(seen, axis).astype(np.float64)
        if self.sums and len(self.lo) != len(a):
            # the number of channels depends on the sample
            self._forget_channels()
        # Once forgotten, later samples have to be a single row, too.
        forgotten = bool(self.sums) and len(self.lo) == 1
        if axis is None or forgotten:
            return a.reshape(1, -1), b.reshape(1, -1)
        return a, b

    def _add(self, a: NDArray[np.float64], b: NDArray[np.float64]) -> None:
        """Add float and quantized values to the sums and the extremes of each channel.

        Args:
            a: float values, (channels, values).
            b: quantized values, (channels, values).
        """
        error = b - a
        sums = {
            "signal": _dot(a, a),
            "energy": _dot(b, b),
            "product": _dot(a, b),
            "noise": _dot(error, error),
            "error": error.sum(axis=1),
        }
        lo = a.min(axis=1)
        hi = a.max(axis=1)
        if not self.sums:
            self.lo = lo
            self.hi = hi
            self.sums = sums
            return
        self.lo = np.minimum(self.lo, lo)
        self.hi = np.maximum(self.hi, hi)
        for name, value in sums.items():
            self.sums[name] = self.sums[name] + value

    def observe_alone(
        self,
        reference: NDArray[Any],
        local: NDArray[Any] | None = None,
        rounded: NDArray[Any] | None = None,
    ) -> None:
        """Observe a sample on which operator and grid had float inputs.

        Args:
            reference: the float values.
            local: the operator's result on float inputs.
            rounded: the grid's result on the float values.
        """
        exact, usual = _usual(reference)
        beyond = self._count_clipped(exact, usual)
        if local is not None:
            self.operator = (self.operator or 0.0) + _noise(local, exact, usual)
        if rounded is not None and self.grid is not None:
            # None until the first observation: 0.0 would mean an exact grid.
            self.own = (self.own or 0.0) + _noise(rounded, exact, usual)
            if beyond.any():
                self.clipped += _noise(rounded, exact, beyond)

    def _count_clipped(
        self,
        exact: NDArray[np.float64],
        usual: NDArray[np.bool_],
    ) -> NDArray[np.bool_]:
        """Count the values beyond the grid, and return where they are.

        Args:
            usual: False for masks, which are not counted.

        Returns:
            True for each clipped value, in the shape of ``exact``; all False if the
            limits of the grid are not known.
        """
        bounds = limits(self.grid, exact.ndim) if self.grid is not None else None
        if bounds is None:
            return np.zeros(exact.shape, np.bool_)
        below = usual & (exact < bounds[0])
        above = usual & (exact > bounds[1])
        self.low += int(np.count_nonzero(below))
        self.high += int(np.count_nonzero(above))
        return below | above

    def _forget_channels(self) -> None:
        """Add up the channels, for tensors with a varying number of channels."""
        self.axis = None
        # keepdims keeps the shape (1,), so that later samples add up.
        self.lo, self.hi = self.lo.min(keepdims=True), self.hi.max(keepdims=True)
        self.sums = {
            name: value.sum(keepdims=True) for name, value in self.sums.items()
        }

    # -- results
    # ----------------------------------------------------------------------------------

    def total(self, name: str) -> float:
        """Return a sum over all channels.

        Args:
            name: signal, energy, product, noise or error.

        Returns:
            The sum; 0 before the first sample.
        """
        if not self.sums:
            return 0.0
        return float(self.sums[name].sum())

    @property
    def sqnr(self) -> float:
        # Energies over all channels, so that strong channels weigh more.
        return decibels(self.total("signal"), self.total("noise"))

    @property
    def cosine(self) -> float:
        return cosine_similarity(
            self.total("product"),
            self.total("signal"),
            self.total("energy"),
        )

    @property
    def gains(self) -> NDArray[np.float64]:
        """Return the best factor by quantized channel; 1 for a poor fit.

        The factor minimizes the squared distance to the float channel.
        """
        signal = self.sums["signal"]
        energy = self.sums["energy"]
        product = self.sums["product"]
        # The squared cosine of both channels is above one half. Below it a factor means nothing.
        alike = (product > 0) & (np.square(product) > 0.5 * signal * energy)
        gain: NDArray[np.float64] = np.divide(
            product,
            signal,
            out=np.ones_like(signal),
            where=alike,
        )
        return gain

    @property
    def fitted(self) -> float:
        """Return the SQNR after scaling each channel to fit."""
        if not self.sums:
            return float("inf")
        signal = self.sums["signal"]
        energy = self.sums["energy"]
        product = self.sums["product"]
        gain = self.gains
        # |b - gain a|^2, which rounding can make slightly negative
        # Expanded, because the sums are kept and the values are not.
        distance = np.maximum(
            energy - 2 * gain * product + gain * gain * signal,
            0,
        )
        # Divided by the gain, the error is in units of the float channel.
        noise = distance / np.square(gain)
        return decibels(float(signal.sum()), float(noise.sum()))

    @property
    def rescaled(self) -> bool:
        """Return True if channels have other scales in the quantized model.

        Some channels must be larger and some smaller. Clipping and rounding to zero can only make
        channels smaller.
        """
        if self.axis is None or not self.sums or self.sqnr > _FAITHFUL:
            return False
        # Weak channels are mostly noise, and have factors of any size.
        strong = self.sums["signal"] > 0.01 * self.sums["signal"].mean()
        gain = self.gains[strong]
        # Nearly equal factors are the shrinking of rounding, and no equalization.
        if gain.size < 2 or gain.max() < _UNEVEN**2 * gain.min():
            return False
        both_ways = gain.max() > _UNEVEN and gain.min() < 1 / _UNEVEN
        # Factors to one side alone need twice the evidence.
        improvement = _BETTER if both_ways else 2 * _BETTER
        return self.fitted > max(_CLOSE, self.sqnr + improvement)

    @property
    def shifted(self) -> float:
        """Return the share of the noise due to a constant shift of each channel."""
        noise = self.total("noise")
        # Values of each channel; all channels have as many.
        count = self.count / max(1, len(self.lo))
        if noise <= 0 or not count:
            return 0.0
        # sum(e)**2 / n = n * mean(e)**2: the energy that remains if every error is the mean of
        # its channel.
        return float(np.square(self.sums["error"]).sum() / count / noise)


def limits(
    grid: CodeGrid,
    rank: int,
) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Return the limits half a step beyond a grid's ends.

    Args:
        grid: the grid.
        rank: number of dimensions of the tensor.

    Returns:
        Lower and upper limits, shaped to broadcast against the tensor; None without ends.
    """
    ends = grid.ends
    if ends is None or not grid.uniform or grid.granularity == "block":
        return None
    low = ends.lo - ends.step / 2
    high = ends.hi + ends.step / 2
    if grid.axis is None:
        return low.reshape(()), high.reshape(())
    if grid.axis >= rank:
        return None
    # (1, ..., C, ..., 1) broadcasts against the tensor.
    shape = [1] * rank
    shape[grid.axis % rank] = -1
    return low.reshape(shape), high.reshape(shape)


def _dot(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    products: NDArray[np.float64] = np.einsum("ij,ij->i", a, b)
    return products


def _usual(values: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    exact = values.astype(np.float64)
    return exact, np.abs(exact) < _MASK


@np.errstate(invalid="ignore")  # the difference of two infinities is NaN, and ignored
def _noise(
    values: NDArray[Any],
    exact: NDArray[np.float64],
    where: NDArray[np.bool_],
) -> float:
    """Return the sum of squared errors where ``where`` is True, without those of masks."""
    error = np.where(where, values.astype(np.float64) - exact, 0.0)
    return float(np.sum(np.square(error), where=np.abs(error) < _MASK))
