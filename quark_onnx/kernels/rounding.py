"""Learned rounding: weights are moved by gradient descent until what a layer computes is close to
what it should.

Follows Nagel et al. 2020, "Up or Down? Adaptive Rounding for Post-Training Quantization"
(AdaRound), and Hubara et al. 2020, "Improving Post Training Neural Quantization: Layer-wise
Calibration and Integer Programming" (AdaQuant).

A layer is seen as rows of inputs and of wanted outputs. Its outputs do not depend on each other, so
they are dealt with in parts of fixed size, side by side, each on one core: the result does not
depend on how many there are. The same code runs on numpy arrays and on torch tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from math import cos, pi
from os import cpu_count
from typing import Any

import numpy as np

from quark_onnx.kernels.device import Device
from quark_onnx.kernels.threads import one_thread

#: The stretched sigmoid of AdaRound, eq. 23: its ends.
_GAMMA, _ZETA = -0.1, 1.1
#: Adam's factors.
_BETA1, _BETA2, _EPSILON = 0.9, 0.999, 1e-8
#: How often a descent stops to be judged.
_STAGES = 5
#: Weights that are dealt with at a time, and groups: as many as a core keeps near.
_PART, _GROUPS = 1 << 17, 512
#: Parts that there should be at least, as far as each of them has so many weights; an output counts
#: as so many more.
_PARTS, _LEAST, _ROW = 2, 1 << 15, 256
#: Weights that a GPU deals with at a time.
_WHOLE = 1 << 24


@dataclass(frozen=True)
class Descent:
    """How to descend.

    Attributes:
        iterations: steps.
        rows: of a step.
        rate: learning rate of the weights, relative to their root mean square, or of the sigmoid's
            argument.
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
        inputs: (groups, rows, inputs).
        wanted: (groups, rows, outputs), behind the activation.
        value, derivative: the activation.
        norm: (groups, outputs), what the mean squares of errors are divided by.
    """

    inputs: Any
    wanted: Any
    value: Callable[[Any], Any]
    derivative: Callable[[Any], Any]
    norm: Any

    def on(self, device: Device) -> Part:
        """The part on another device; its functions must be those of the device already."""
        inputs, wanted, norm = map(device.put, (self.inputs, self.wanted, self.norm))
        return Part(inputs, wanted, self.value, self.derivative, norm)

    def gradient(self, weight: Any, bias: Any, size: int, turn: int) -> tuple[Any, Any]:
        """Of half the sum of squares on the next ``size`` rows, by the weight and by what is added.

        It is what ``share`` makes that of the mean square of: to multiply whatever it is multiplied
        with anyway by that is cheaper than all errors.
        """
        count = self.wanted.shape[1]
        size = min(size, count)
        start = turn * size % max(1, count - size + 1)
        x = self.inputs[:, start : start + size]
        z = x @ weight.swapaxes(-1, -2)
        z += bias[:, None]
        slope = self.value(z) - self.wanted[:, start : start + size]
        slope *= self.derivative(z)
        return slope.swapaxes(-1, -2) @ x, slope.sum(1)

    def share(self, size: int) -> Any:
        """(groups, outputs): what makes of ``gradient`` that of the mean square, divided by the
        norm.
        """
        return (2 / max(1, min(size, self.wanted.shape[1]))) / self.norm


def in_parts(  # noqa: PLR0913
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
    largest, most = (_WHOLE, groups) if whole else (_PART, _GROUPS)
    least = (
        1
        if whole
        else max(1, min(_PARTS, groups * outputs * (inputs + _ROW) // _LEAST))
    )
    at_once = max(1, min(most, largest // (outputs * inputs)))
    own = _split(groups, at_once, least)
    each = _split(
        outputs,
        max(1, largest // inputs) if at_once == 1 else outputs,
        -(-least // len(own)),
    )
    parts = [(group, output) for group in own for output in each]
    with (
        one_thread(),
        ThreadPoolExecutor(1 if whole else threads or cpu_count() or 1) as pool,
    ):
        for _ in pool.map(lambda part: work(*part), parts):
            pass


def _split(count: int, size: int, least: int) -> list[slice]:
    """``count`` things in parts of about equal size, at most ``size``: at least so many parts, and
    an even number.
    """
    parts = min(count, max(least, -(-count // size)))
    parts += parts % 2 if 1 < parts < count else 0
    ends = [count * part // parts for part in range(parts + 1)]
    return [slice(*pair) for pair in pairwise(ends)]


def adaround(  # noqa: PLR0913
    part: Part,
    below: Any,
    step: Any,
    share: Any,
    bias: Any,
    settings: Descent,
    xp: Any = np,
) -> Any:
    """Whether each weight is rounded up, as booleans of its shape.

    The sigmoid is written as a hyperbolic tangent of half its argument u, and stretched it is
    ``2 h - 1``: where the weight lies between the middle of its two codes, at 0, and either of
    them. Fewer passes over the weights than the formulas of the paper take are needed then.

    Args:
        below: (groups, outputs, inputs), the value of the code below each weight.
        step: from there to the code above.
        share: where the weight lies between them, in [0, 1].
        bias: (groups, outputs).
    """
    stretch = _ZETA - _GAMMA
    half = step / 2
    middle = below + half
    pull = (
        half * part.share(settings.rows)[..., None] * (stretch / 2)
    )  # the inner derivatives by u / 2
    u = xp.arctanh((xp.clip(share, 0.0, 1.0) * 2 - 1) / stretch)
    adam = _Adam(u, settings.rate / 2, xp)
    warm = int(settings.warm * settings.iterations)
    for turn in range(settings.iterations):
        t = xp.tanh(u)
        square = t * t
        t *= stretch
        t = xp.clip(t, -1.0, 1.0)
        gradient = part.gradient(t * half + middle, bias, settings.rows, turn)[0]
        gradient *= pull
        if turn >= warm:
            done = (turn - warm) / max(1, settings.iterations - warm)
            power = settings.end + (settings.start - settings.end) * (1 - done)
            push = square + 1e-12
            push *= stretch * stretch
            push = xp.log(push)
            push *= power / 2 - 1
            push = xp.exp(push)
            push *= t
            push *= power * settings.push * stretch / 2
            gradient -= push
        slope = 1 - square
        slope *= square < 1 / (stretch * stretch)
        gradient *= slope
        u = adam.moved(u, gradient)
    return u >= 0


class _Adam:
    """Kingma and Ba 2015, with the learning rate as it is given."""

    def __init__(self, like: Any, rate: float, xp: Any) -> None:
        self._first, self._second = (
            like * 0,
            like * 0,
        )  # each a constant times the moment of the paper
        self._rate, self._turn, self._xp = rate, 0, xp

    def moved(self, value: Any, gradient: Any, factor: Any = 1.0) -> Any:
        """The value after a step against the gradient, which is overwritten."""
        self._turn += 1
        self._first *= _BETA1
        self._first += gradient
        self._second *= _BETA2
        gradient *= gradient
        self._second += gradient
        step = self._xp.sqrt(self._second)
        step += _EPSILON / (1 - _BETA2) ** 0.5
        self._xp.divide(self._first, step, out=step)
        bent = (1 - _BETA2**self._turn) / (1 - _BETA2)
        step *= factor * (
            self._rate * bent**0.5 * (1 - _BETA1) / (1 - _BETA1**self._turn)
        )
        return self._xp.subtract(value, step, out=step)


@dataclass(frozen=True)
class Units:
    """The grid of a weight that is in units of its scale.

    Attributes:
        scale: (groups, outputs, inputs), or one number for all.
        least, greatest: the ends of the grid, likewise.
        levels: what there is between them, in ascending order; empty where it is the whole numbers.
    """

    scale: Any
    least: Any
    greatest: Any
    levels: Any

    def rounded(self, weight: Any, xp: Any) -> Any:
        """The nearest level."""
        if not len(self.levels):
            rounded = xp.round(weight)
            return xp.clip(rounded, self.least, self.greatest, out=rounded)
        middles = (self.levels[1:] + self.levels[:-1]) / 2
        return self.levels[xp.searchsorted(middles, weight)]

    def inside(self, weight: Any) -> Any:
        """Where a weight lies within the grid."""
        found = weight >= self.least
        found &= weight <= self.greatest
        return found

    def on(self, device: Device) -> Units:
        """The grid on another device.

        What is the same for all weights as one number, which takes no time to read.
        """
        scale, least, greatest = (
            _single(array) for array in (self.scale, self.least, self.greatest)
        )
        return Units(*map(device.put, (scale, least, greatest, self.levels)))


def _single(array: Any) -> Any:
    """The number that all of an array are, else the array."""
    first = array.reshape(-1)[:1]
    return first.reshape(()) if first.size and (array == first).all() else array


def adaquant(  # noqa: PLR0913
    part: Part,
    weight: Any,
    bias: Any,
    units: Units,
    settings: Descent,
    bias_rate: float,
    xp: Any = np,
) -> Iterator[tuple[Any, Any]]:
    """The weight, in units of its scale and not yet rounded, and the bias, after each stage of the
    descent.

    Args:
        weight: (groups, outputs, inputs), to start from, in units of its scale.
        bias: (groups, outputs).
        bias_rate: learning rate of the bias, relative to the spread of what is wanted.
    """
    adam, other = _Adam(weight, settings.rate, xp), _Adam(bias, bias_rate, xp)
    spread = xp.sqrt(part.norm)
    share = part.share(settings.rows)
    pull = units.scale * share[..., None]
    reach = xp.sqrt((weight * weight).mean(-1))[..., None] + 1e-6
    stage = max(1, settings.iterations // _STAGES)
    for turn in range(settings.iterations):
        rounded = units.rounded(weight, xp)
        rounded *= units.scale
        gradient, shift = part.gradient(rounded, bias, settings.rows, turn)
        cooled = 0.5 * (
            1 + cos(pi * turn / settings.iterations)
        )  # a number of Python leaves float32 what it is
        gradient *= pull
        gradient *= units.inside(weight)
        weight = adam.moved(weight, gradient, cooled * reach)
        if bias_rate:
            bias = other.moved(bias, shift * share * spread, cooled * spread)
        if (turn + 1) % stage == 0 or turn + 1 == settings.iterations:
            yield weight, bias
