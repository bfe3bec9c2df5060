"""Learned rounding: weights are moved by gradient descent until what a layer computes is close to what it should.

Follows Nagel et al. 2020, "Up or Down? Adaptive Rounding for Post-Training Quantization" (AdaRound), and Hubara et al.
2020, "Improving Post Training Neural Quantization: Layer-wise Calibration and Integer Programming" (AdaQuant).

A layer is seen as rows of inputs and of wanted outputs. Its outputs do not depend on each other, so they are dealt with
in parts of fixed size, side by side, each on one core: the result does not depend on how many there are. The same code
runs on numpy arrays and on torch tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import cos, pi
from os import cpu_count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark_onnx.kernels.device import Device

Floats = NDArray[np.float32]

#: The stretched sigmoid of AdaRound, eq. 23: its ends.
_GAMMA, _ZETA = -0.1, 1.1
#: Adam's factors.
_BETA1, _BETA2, _EPSILON = 0.9, 0.999, 1e-8
#: How often a descent stops to be judged.
_STAGES = 5
#: Weights that are dealt with at a time, and groups: as many as a core keeps near.
_PART, _GROUPS = 1 << 16, 128
#: Weights that a GPU deals with at a time.
_WHOLE = 1 << 24


@dataclass(frozen=True)
class Descent:
    """How to descend.

    Attributes:
        iterations: steps.
        rows: of a step.
        rate: learning rate of the weights, relative to their root mean square, or of the sigmoid's argument.
        warm: share of the iterations before the rounding is pushed to either side.
        start, end: exponents of the push, from soft to hard.
        push: its weight.
    """

    iterations: int
    rows: int
    rate: float
    warm: float = 0.2
    start: float = 20.0
    end: float = 2.0
    push: float = 0.01


@dataclass(frozen=True)
class Part:
    """Some outputs of a layer; groups come first in every array.

    Attributes:
        inputs: (groups, rows, inputs); or (rows, inputs, groups), where each group has one output: many tiny products
            are one long one then.
        wanted: (groups, rows, outputs), behind the activation.
        value, derivative: the activation.
        norm: (groups, 1, outputs), what errors are divided by.
    """

    inputs: Any
    wanted: Any
    value: Callable[[Any], Any]
    derivative: Callable[[Any], Any]
    norm: Any

    @classmethod
    def of(cls, inputs: Floats, wanted: Floats, value: Any, derivative: Any, norm: Floats) -> Part:
        """A part of numpy arrays, laid out for speed; ``inputs`` is (groups, rows, inputs)."""
        if wanted.shape[2] > 1:
            return cls(inputs, np.ascontiguousarray(wanted), value, derivative, norm)
        turned = np.ascontiguousarray(wanted[:, :, 0].T).T[:, :, None]
        return cls(np.ascontiguousarray(inputs.transpose(1, 2, 0)), turned, value, derivative, norm)

    def on(self, device: Device) -> Part:
        """The part on another device; its functions must be those of the device already."""
        inputs, wanted, norm = map(device.put, (self.inputs, self.wanted, self.norm))
        return Part(inputs, wanted, self.value, self.derivative, norm)

    def gradient(self, weight: Any, bias: Any, size: int, turn: int, xp: Any) -> tuple[Any, Any]:
        """Of the mean squared error by the weight, and by what is added, on the next ``size`` rows."""
        count = self.wanted.shape[1]
        size = min(size, count)
        start = turn * size % max(1, count - size + 1)
        now = slice(start, start + size)
        wanted = self.wanted[:, now]
        if wanted.shape[2] == 1:
            x = self.inputs[now]
            z = xp.einsum("nkg,gk->ng", x, weight[:, 0]).swapaxes(0, 1)[:, :, None] + bias[:, None]
        else:
            x = self.inputs[:, now]
            z = x @ weight.swapaxes(-1, -2) + bias[:, None]
        slope = self.value(z)
        slope -= wanted
        slope *= self.derivative(z)
        slope *= (2 / size) / self.norm
        if wanted.shape[2] == 1:
            return xp.einsum("ng,nkg->gk", slope[:, :, 0].swapaxes(0, 1), x)[:, None], slope.sum(1)
        return slope.swapaxes(-1, -2) @ x, slope.sum(1)


def in_parts(
    work: Callable[[slice, slice], None],
    groups: int,
    outputs: int,
    inputs: int,
    *,
    threads: int = 0,
    whole: bool = False,
) -> None:
    """Do some work for all groups and outputs, in parts of about equal size; each on one core.

    Args:
        work: takes slices of groups and of outputs.
        threads: how many at a time; 0 for as many as there are cores.
        whole: in parts that are as large as a GPU likes them, one after the other.
    """
    from threadpoolctl import threadpool_limits

    parts = list[tuple[slice, slice]]()
    size, most = (_WHOLE, groups) if whole else (_PART, _GROUPS)
    group_step = max(1, min(most, size // (outputs * inputs)))
    step = max(1, size // inputs) if group_step == 1 else outputs
    for group in range(0, groups, group_step):
        for start in range(0, outputs, step):
            parts.append((slice(group, min(groups, group + group_step)), slice(start, min(outputs, start + step))))
    with threadpool_limits(1, "blas"), ThreadPoolExecutor(1 if whole else threads or cpu_count() or 1) as pool:
        for _ in pool.map(lambda part: work(*part), parts):
            pass


def adaround(part: Part, below: Any, step: Any, share: Any, bias: Any, settings: Descent, xp: Any = np) -> Any:
    """Whether each weight is rounded up, as booleans of its shape.

    Args:
        below: (groups, outputs, inputs), the value of the code below each weight.
        step: from there to the code above.
        share: where the weight lies between them, in [0, 1].
        bias: (groups, outputs).
    """
    stretch = _ZETA - _GAMMA
    v = -xp.log(stretch / (xp.clip(share, 0.0, 1.0) - _GAMMA) - 1)
    adam = _Adam(v, settings.rate, xp)
    warm = int(settings.warm * settings.iterations)
    for turn in range(settings.iterations):
        gate = 1 / (1 + xp.exp(-v))
        soft = gate * stretch + _GAMMA
        h = xp.clip(soft, 0.0, 1.0)
        gradient = part.gradient(below + h * step, bias, settings.rows, turn, xp)[0] * step
        if turn >= warm:
            done = (turn - warm) / max(1, settings.iterations - warm)
            power = settings.end + (settings.start - settings.end) * max(0.0, 1 - done)
            away = xp.clip(xp.abs(2 * h - 1), 1e-4, 1.0)
            push = xp.exp((power - 1) * xp.log(away)) * (2 * power * settings.push)
            gradient = gradient - xp.where(h > 0.5, push, -push)
        inside = (soft > 0) & (soft < 1)
        v = adam.moved(v, xp.where(inside, gradient * (gate * (1 - gate) * stretch), 0.0))
    return v >= 0


class _Adam:
    """Kingma and Ba 2015, with the learning rate as it is given."""

    def __init__(self, like: Any, rate: float, xp: Any) -> None:
        self._first, self._second = like * 0, like * 0
        self._rate, self._turn, self._xp = rate, 0, xp

    def moved(self, value: Any, gradient: Any, factor: Any = 1.0) -> Any:
        """The value after a step against the gradient."""
        self._turn += 1
        self._first *= _BETA1
        self._first += (1 - _BETA1) * gradient
        self._second *= _BETA2
        self._second += (1 - _BETA2) * gradient * gradient
        spread = self._xp.sqrt(self._second)
        spread += _EPSILON
        rate = self._rate * (1 - _BETA2**self._turn) ** 0.5 / (1 - _BETA1**self._turn)
        return value - self._first / spread * (factor * rate)


@dataclass(frozen=True)
class Units:
    """The grid of a weight that is in units of its scale.

    Attributes:
        scale: (groups, outputs, inputs).
        least, greatest: the ends of the grid.
        levels: what there is between them, in ascending order; empty where it is the whole numbers.
    """

    scale: Any
    least: Any
    greatest: Any
    levels: Any

    def rounded(self, weight: Any, xp: Any) -> Any:
        """The nearest level."""
        if not len(self.levels):
            return xp.clip(xp.round(weight), self.least, self.greatest)
        middles = (self.levels[1:] + self.levels[:-1]) / 2
        return self.levels[xp.searchsorted(middles, weight)]

    def on(self, device: Device) -> Units:
        """The grid on another device."""
        return Units(*map(device.put, (self.scale, self.least, self.greatest, self.levels)))


def adaquant(
    part: Part, weight: Any, bias: Any, units: Units, settings: Descent, bias_rate: float, xp: Any = np
) -> Iterator[tuple[Any, Any]]:
    """The weight, in units of its scale and not yet rounded, and the bias, after each stage of the descent.

    Args:
        weight: (groups, outputs, inputs), to start from, in units of its scale.
        bias: (groups, outputs).
        bias_rate: learning rate of the bias, relative to the spread of what is wanted.
    """
    adam, other = _Adam(weight, settings.rate, xp), _Adam(bias, bias_rate, xp)
    spread = xp.sqrt(part.norm[:, 0])
    reach = xp.sqrt((weight * weight).mean(-1))[..., None] + 1e-6
    stage = max(1, settings.iterations // _STAGES)
    for turn in range(settings.iterations):
        rounded = units.rounded(weight, xp) * units.scale
        gradient, shift = part.gradient(rounded, bias, settings.rows, turn, xp)
        cooled = 0.5 * (1 + cos(pi * turn / settings.iterations))  # a number of Python leaves float32 what it is
        inside = (weight >= units.least) & (weight <= units.greatest)
        weight = adam.moved(weight, xp.where(inside, gradient * units.scale, 0.0), cooled * reach)
        if bias_rate:
            bias = other.moved(bias, shift * spread, cooled * spread)
        if (turn + 1) % stage == 0 or turn + 1 == settings.iterations:
            yield weight, bias
