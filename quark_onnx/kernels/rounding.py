"""Learn the rounding of weights by gradient descent on the error of a layer's output.

Follows Nagel et al. 2020, "Up or Down? Adaptive Rounding for Post-Training Quantization"
(AdaRound), and Hubara et al. 2020, "Improving Post Training Neural Quantization: Layer-wise
Calibration and Integer Programming" (AdaQuant).

A layer is given as rows of inputs and of target outputs. Its outputs are independent, so they are
processed in parts of fixed size, each on a single core: the result does not depend on the number of
cores. The same code runs on numpy arrays and on torch tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise, product
from math import cos, pi
from types import ModuleType
from typing import Any

import numpy as np

from calibrators.onnx_runtime.cpu_features import available_cores
from quark_onnx.kernels.device import Device
from quark_onnx.kernels.threads import one_thread

#: Ends of the stretched sigmoid of AdaRound, eq. 23.
_GAMMA = -0.1
_ZETA = 1.1
#: Adam's factors.
_BETA1 = 0.9
_BETA2 = 0.999
_EPSILON = 1e-8
#: Number of evaluations during a descent.
_STAGES = 5
#: Weights and groups in a part: as many as fit a core's cache.
_PART = 1 << 17
_GROUPS = 512
#: Least number of parts, if each has at least so many weights; an output counts as so many more.
_PARTS = 2
_LEAST = 1 << 15
_ROW = 256
#: Weights that a GPU processes at a time.
_WHOLE = 1 << 24


@dataclass(frozen=True)
class Descent:
    """Settings of a descent.

    Attributes:
        iterations: number of steps.
        rows: rows in a step.
        rate: learning rate of the weights, relative to their root mean square, or of the sigmoid's
            argument.
        warm: share of the iterations before the regularizer is active.
        start: first exponent of the regularizer (soft).
        end: last exponent of the regularizer (hard).
        push: weight of the regularizer.
    """

    iterations: int
    rows: int
    rate: float
    warm: float = 0.2
    start: float = 20.0
    end: float = 2.0
    push: float = 0.01


@dataclass(frozen=True)
class OutputPart:
    """Some outputs of a layer; groups come first in every array.

    Attributes:
        inputs: (groups, rows, inputs).
        wanted: target outputs after the activation, (groups, rows, outputs).
        value: the activation.
        derivative: its derivative.
        norm: divisors of mean squared errors, (groups, outputs).
    """

    inputs: Any
    wanted: Any
    value: Callable[[Any], Any]
    derivative: Callable[[Any], Any]
    norm: Any

    def on(self, device: Device) -> OutputPart:
        """Return the part on another device; its functions must be the device's already."""
        return OutputPart(
            device.put(self.inputs),
            device.put(self.wanted),
            self.value,
            self.derivative,
            device.put(self.norm),
        )

    def gradient(self, weight: Any, bias: Any, size: int, turn: int) -> tuple[Any, Any]:
        """Return the gradient of half the squared error on the next rows, by weight and bias.

        ``share`` converts it to the gradient of the mean square: to multiply an existing factor by
        it is cheaper than to scale all errors.
        """
        count = self.wanted.shape[1]
        size = min(size, count)
        # Windows of equal size, which wrap around before the last rows run out.
        start = turn * size % max(1, count - size + 1)
        x = self.inputs[:, start : start + size]
        z = x @ weight.swapaxes(-1, -2)
        z += bias[:, None]
        slope = self.value(z) - self.wanted[:, start : start + size]
        slope *= self.derivative(z)
        return slope.swapaxes(-1, -2) @ x, slope.sum(1)

    def share(self, size: int) -> Any:
        """Return the factor from ``gradient`` to the normalized mean square, (groups, outputs)."""
        rows = max(1, min(size, self.wanted.shape[1]))
        return (2 / rows) / self.norm


def in_parts(  # noqa: PLR0913  the sizes of a weight
    work: Callable[[slice, slice], None],
    groups: int,
    outputs: int,
    inputs: int,
    *,
    threads: int = 0,
    whole: bool = False,
) -> None:
    """Call ``work`` for groups and outputs, split evenly over the cores.

    Args:
        work: takes slices of groups and of outputs.
        groups: number of groups.
        outputs: number of outputs of a group.
        inputs: number of inputs of a group.
        threads: number of threads; 0 for the number of cores.
        whole: use parts for a GPU, one after the other.
    """
    if whole:
        largest = _WHOLE
        most = groups
        least = 1
        workers = 1
    else:
        largest = _PART
        most = _GROUPS
        least = max(1, min(_PARTS, groups * outputs * (inputs + _ROW) // _LEAST))
        workers = threads or available_cores()
    groups_at_once = max(1, min(most, largest // (outputs * inputs)))
    outputs_at_once = outputs
    if groups_at_once == 1:
        outputs_at_once = max(1, largest // inputs)
    group_slices = _split(groups, groups_at_once, least)
    output_slices = _split(outputs, outputs_at_once, -(-least // len(group_slices)))
    parts = list(product(group_slices, output_slices))
    # The pool takes all cores, and sums must not depend on the threads of BLAS.
    with one_thread(), ThreadPoolExecutor(workers) as pool:
        # A list, so that an exception of a part is raised.
        list(pool.map(lambda part: work(*part), parts))


def _split(count: int, size: int, least: int) -> list[slice]:
    """Split ``count`` items into parts of similar size, at most ``size``.

    At least so many parts, and an even number.
    """
    parts = min(count, max(least, -(-count // size)))
    if 1 < parts < count:
        parts += parts % 2
    ends = [count * part // parts for part in range(parts + 1)]
    return [slice(*pair) for pair in pairwise(ends)]


def adaround(  # noqa: PLR0913  the arrays of a layer
    part: OutputPart,
    below: Any,
    step: Any,
    share: Any,
    bias: Any,
    settings: Descent,
    xp: ModuleType = np,
) -> Any:
    """Return a mask of the weights to round up.

    The sigmoid is computed as a hyperbolic tangent of half its argument u. Stretched, it is
    ``2 h - 1``: the position of the weight between its two codes, 0 in the middle. This needs fewer
    passes over the weights than the formulas of the paper.

    Args:
        part: inputs and targets.
        below: value of the code below each weight, (groups, outputs, inputs).
        step: distance to the code above.
        share: position of the weight between both codes, in [0, 1].
        bias: (groups, outputs).
        settings: settings of the descent.
        xp: numpy or torch.
    """
    stretch = _ZETA - _GAMMA
    half = step / 2
    middle = below + half
    # Inner derivative by u / 2.
    pull = half * part.share(settings.rows)[..., None] * (stretch / 2)
    # The stretch keeps the argument within 1 / 1.2, where arctanh is finite.
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
            # |2 h - 1|^(power - 2), by logarithms; 1e-12 keeps them finite between two codes.
            push = square + 1e-12
            push *= stretch * stretch
            push = xp.log(push)
            push *= power / 2 - 1
            push = xp.exp(push)
            push *= t
            push *= power * settings.push * stretch / 2
            gradient -= push
        slope = 1 - square
        # Where the stretched sigmoid is clipped, at a code, its slope is 0.
        slope *= square < 1 / (stretch * stretch)
        gradient *= slope
        u = adam.moved(u, gradient)
    return u >= 0


class _Adam:
    """Adam (Kingma and Ba 2015), without a schedule."""

    def __init__(self, like: Any, rate: float, xp: ModuleType) -> None:
        # The moments of the paper, up to constant factors.
        self._first = like * 0
        self._second = like * 0
        self._rate = rate
        self._turn = 0
        self._xp = xp

    def moved(self, value: Any, gradient: Any, factor: Any = 1.0) -> Any:
        """Return the value after a step against the gradient, which is overwritten."""
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
    """The quantization grid of a weight in units of its scale.

    Attributes:
        scale: (groups, outputs, inputs), or a scalar.
        least: lower end of the grid, likewise.
        greatest: upper end of the grid, likewise.
        levels: levels in ascending order; empty for integers.
    """

    scale: Any
    least: Any
    greatest: Any
    levels: Any

    def rounded(self, weight: Any, xp: ModuleType) -> Any:
        """Round to the nearest level."""
        if not len(self.levels):
            rounded = xp.round(weight)
            return xp.clip(rounded, self.least, self.greatest, out=rounded)
        middles = (self.levels[1:] + self.levels[:-1]) / 2
        return self.levels[xp.searchsorted(middles, weight)]

    def inside(self, weight: Any) -> Any:
        """Return a mask of the weights within the grid."""
        mask = weight >= self.least
        mask &= weight <= self.greatest
        return mask

    def on(self, device: Device) -> Units:
        """Return the grid on another device, with constant arrays as scalars."""
        return Units(
            device.put(_single(self.scale)),
            device.put(_single(self.least)),
            device.put(_single(self.greatest)),
            device.put(self.levels),
        )


def _single(array: Any) -> Any:
    """Return the scalar of a constant array, otherwise the array."""
    value = array.reshape(-1)[:1]
    if value.size and (array == value).all():
        return value.reshape(())
    return array


def adaquant(  # noqa: PLR0913  the arrays of a layer
    part: OutputPart,
    weight: Any,
    bias: Any,
    units: Units,
    settings: Descent,
    bias_rate: float,
    xp: ModuleType = np,
) -> Iterator[tuple[Any, Any]]:
    """Yield the unrounded weight, in units of the scale, and the bias, per stage.

    Args:
        part: inputs and targets.
        weight: start, (groups, outputs, inputs), in units of its scale.
        bias: (groups, outputs).
        units: the quantization grid.
        settings: settings of the descent.
        bias_rate: learning rate of the bias, relative to the spread of the targets.
        xp: numpy or torch.
    """
    adam = _Adam(weight, settings.rate, xp)
    bias_adam = _Adam(bias, bias_rate, xp)
    spread = xp.sqrt(part.norm)
    share = part.share(settings.rows)
    pull = units.scale * share[..., None]
    reach = xp.sqrt((weight * weight).mean(-1))[..., None] + 1e-6
    stage = max(1, settings.iterations // _STAGES)
    for turn in range(settings.iterations):
        rounded = units.rounded(weight, xp)
        rounded *= units.scale
        gradient, shift = part.gradient(rounded, bias, settings.rows, turn)
        # A Python number, which does not widen float32.
        cooled = 0.5 * (1 + cos(pi * turn / settings.iterations))
        gradient *= pull
        gradient *= units.inside(weight)
        weight = adam.moved(weight, gradient, cooled * reach)
        if bias_rate:
            bias = bias_adam.moved(bias, shift * share * spread, cooled * spread)
        if (turn + 1) % stage == 0 or turn + 1 == settings.iterations:
            yield weight, bias
