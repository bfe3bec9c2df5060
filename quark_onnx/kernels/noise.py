"""Model the rounding noise of a chain of layers as a function of factors between them.

A rounding step has a variance of a twelfth of its square. Once its maxima are replaced by p-norms,
noise over signal is a sum of exponentials of linear functions of the factors' logarithms. So it is
convex in them: a geometric program (Boyd et al. 2007, "A Tutorial on Geometric Programming"), whose
minimum one descent finds.

Sums over arrays use einsum, which runs on a single core: their order does not depend on the number
of cores.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]

#: Exponent of the p-norm in place of the maximum of weights, which are all known.
_POWER = 16
#: Exponent of the p-norm for activations. New data exceeds the observed extremes: if the channels'
#: extremes follow a Frechet distribution with this index, the extreme of all channels is the p-norm
#: of theirs. A greater p aligns all channels at one extreme, so that each may be clipped; 4 to 8
#: gave the least noise on held-out images.
_TAIL = 6
#: Most steps of the descent, greatest change of a logarithm in a step, and remembered steps.
_STEPS = 500
_STRIDE = 1.0
_PAST = 20
#: Share of the expected gain that a step must bring, and share of the noise that is worth a step.
_ENOUGH = 1e-4
_CONVERGED = 1e-11
#: Limit of the logarithms of factors.
_LIMIT = float(np.log(1e4))
_LEAST = 1e-300


@dataclass(frozen=True)
class Rounding:
    """Resolution of a model's quantization.

    Attributes:
        weight: steps from one end of a weight's range to the other; 0 if weights stay float.
        per_channel: each output of a weight has its own scale.
        activation: steps of an activation's range; 0 if activations stay float.
        symmetric: the range of activations is symmetric around zero.
    """

    weight: int = 254
    per_channel: bool = True
    activation: int = 255
    symmetric: bool = False


#: Per-channel weights and per-tensor activations.
EIGHT_BITS = Rounding()


@dataclass(frozen=True)
class _Norm:
    """The p-norm of sizes times exponentials.

    Attributes:
        top: the greatest size.
        shares: powers of the sizes as shares of the greatest.
    """

    top: float
    shares: Doubles

    @classmethod
    def of(cls, size: Doubles) -> _Norm:
        """Return the norm of sizes."""
        top = size.max(initial=0.0)
        # Relative to the greatest, as powers of the sizes could overflow or vanish.
        return cls(top, (size / (top or 1.0)) ** _TAIL)

    def at(self, x: Doubles) -> tuple[Doubles, Doubles]:
        """Return the norm at logarithms of factors, and its gradient."""
        if self.top <= 0:
            return np.zeros(()), np.zeros(x.shape)
        parts = self.shares * np.exp(_TAIL * x)
        total = parts.sum()
        norm = np.asarray(self.top * total ** (1 / _TAIL))
        return norm, norm * parts / total


@dataclass(frozen=True)
class Spread:
    """Channels of a tensor with a per-tensor scale.

    Channels are divided by factors, and multiplied back where they are read.

    Attributes:
        low: range of each channel below zero.
        high: range of each channel above zero.
        matter: weight of the noise variance of each channel.
        outputs: the channels are outputs of a layer, not inputs.
        inverse: the channels are multiplied by the factors, and divided back.
    """

    low: Doubles
    high: Doubles
    matter: Doubles
    outputs: bool = False
    inverse: bool = False

    def noise(self, logarithm: Doubles, rounding: Rounding) -> tuple[float, Doubles]:
        """Return the noise at the logarithms of the factors, and its gradient."""
        if not rounding.activation or not self._matters:
            return 0.0, np.zeros(logarithm.shape)
        x = -logarithm if self.inverse else logarithm
        if rounding.symmetric:
            width, slope = self._greatest.at(-x)
            width = 2 * width
            slope = 2 * slope
        else:
            low, low_slope = self._lowest.at(-x)
            high, high_slope = self._highest.at(-x)
            width = low + high
            slope = low_slope + high_slope
        # Where they are read, channels are multiplied by exp(x), and so is their noise.
        parts = self.matter * np.exp(2 * x)
        # Rounding to steps adds noise of a variance of step^2 / 12, with steps of width / levels.
        unit = 1 / (12 * rounding.activation**2)
        total = parts.sum()
        gradient = 2 * unit * (width**2 * parts - width * slope * total)
        noise = float(unit * width**2 * total)
        return noise, -gradient if self.inverse else gradient

    @cached_property
    def _matters(self) -> bool:
        return bool(self.matter.any())

    @cached_property
    def _lowest(self) -> _Norm:
        return _Norm.of(self.low)

    @cached_property
    def _highest(self) -> _Norm:
        return _Norm.of(self.high)

    @cached_property
    def _greatest(self) -> _Norm:
        return _Norm.of(np.maximum(self.low, self.high))


@dataclass(frozen=True)
class Term:
    """The noise in the results of a layer.

    Attributes:
        source: index of the logarithm of each input.
        target: index of the logarithm of each output.
        peak: greatest absolute weight per output and input, (groups, outputs, inputs).
        energy: mean square of an input times the number of its weights, (groups, inputs).
        matter: weight of the noise variance of each output, (groups, outputs).
        spreads: the tensors that are rounded.
    """

    source: NDArray[np.intp]
    target: NDArray[np.intp]
    peak: Doubles
    energy: Doubles
    matter: Doubles
    spreads: tuple[Spread, ...]

    def noise(self, logarithm: Doubles, gradient: Doubles, rounding: Rounding) -> float:
        """Return the noise at the logarithms; add the gradient to ``gradient``."""
        u = logarithm[self.source]
        v = logarithm[self.target]
        noise, by_input, by_output = self._weights(
            u.reshape(self.energy.shape), v.reshape(self.matter.shape), rounding
        )
        by_input = by_input.ravel()
        by_output = by_output.ravel()
        for spread in self.spreads:
            spread_noise, slope = spread.noise(v if spread.outputs else u, rounding)
            noise += spread_noise
            if spread.outputs:
                by_output = by_output + slope
            else:
                by_input = by_input + slope
        read, sources, targets = self._touched
        size = len(read)
        from_inputs = np.bincount(sources, by_input, size)
        from_outputs = np.bincount(targets, by_output, size)
        gradient[read] += from_inputs + from_outputs
        return noise

    def reads(self, place: slice) -> bool:
        """Return whether the noise depends on any logarithm of a slice."""
        read, _, _ = self._touched
        return bool(((read >= place.start) & (read < place.stop)).any())

    def _weights(
        self, u: Doubles, v: Doubles, rounding: Rounding
    ) -> tuple[float, Doubles, Doubles]:
        """Return the noise of the weights, and its gradients by inputs and by outputs."""
        top = self._top
        if not rounding.weight or not top:
            return 0.0, np.zeros(u.shape), np.zeros(v.shape)
        # Weights have symmetric ranges: steps of twice the greatest magnitude / levels.
        unit = (2 * top / rounding.weight) ** 2 / 12
        reach = self._reach
        # A p-norm stands for the greatest magnitude of an output, as a maximum has no gradient in
        # all but one input.
        grown = np.exp(_POWER * u)
        read = self.energy * np.exp(-2 * u)
        sums = read.sum(axis=1, keepdims=True)
        along = np.einsum("goi,gi->go", reach, grown)
        # Per-channel scales cancel the factors of outputs.
        if rounding.per_channel:
            parts = unit * self.matter * along ** (2 / _POWER) * sums
            relative = parts / np.maximum(along, _LEAST)
            shares = np.einsum("goi,go->gi", reach, relative) * grown
            whole = parts.sum(axis=1, keepdims=True) / np.maximum(sums, _LEAST)
            by_input = 2 * (shares - whole * read)
            return float(parts.sum()), by_input, np.zeros(v.shape)
        shrunk = np.exp(-_POWER * v)
        counted = self.matter * np.exp(2 * v)
        across = np.einsum("goi,go->gi", reach, shrunk)
        whole = counted.sum(axis=1, keepdims=True)
        total = (across * grown).sum()
        step = unit * total ** (2 / _POWER)
        noise = step * (whole * sums).sum()
        by_input = 2 * (noise * across * grown / total - step * whole * read)
        by_output = 2 * (step * sums * counted - noise * along * shrunk / total)
        return float(noise), by_input, by_output

    @cached_property
    def _touched(self) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
        """The indices of the logarithms that the term reads, and places of each in them."""
        both = np.concatenate([self.source, self.target])
        read, places = np.unique(both, return_inverse=True)
        return read, places[: self.source.size], places[self.source.size :]

    @cached_property
    def _top(self) -> float:
        return float(self.peak.max(initial=0.0))

    @cached_property
    def _reach(self) -> Doubles:
        reach: Doubles = (self.peak / self.peak.max(initial=_LEAST)) ** _POWER
        return reach


def total_noise(
    terms: Sequence[Term], logarithm: Doubles, rounding: Rounding
) -> tuple[float, Doubles]:
    """Return the noise of all layers at the logarithms of the factors, and its gradient."""
    gradient = np.zeros(logarithm.size)
    noise = sum(term.noise(logarithm, gradient, rounding) for term in terms)
    return noise, gradient


def minimize_noise(
    terms: Sequence[Term], fixed: NDArray[np.bool_], rounding: Rounding
) -> tuple[Doubles, float, float]:
    """Return the logarithms with the least total noise, and the noise before and after.

    The descent is L-BFGS with backtracking (Nocedal & Wright 2006, algorithms 7.4 and 3.1).

    Args:
        terms: noise terms of all layers.
        fixed: logarithms that stay zero.
        rounding: resolution of the quantization.
    """

    def at(point: Doubles) -> tuple[float, Doubles]:
        noise, gradient = total_noise(terms, point, rounding)
        gradient[fixed] = 0.0
        return noise, gradient

    here = np.zeros(fixed.size)
    before, gradient = at(here)
    least = before
    past = deque[_PastStep](maxlen=_PAST)
    for _ in range(_STEPS):
        step = -_newton_step(gradient, past)
        step *= min(1.0, _STRIDE / max(np.abs(step).max(), _LEAST))
        fall = _dot(gradient, step)
        while -fall > _CONVERGED * least:
            there = (here + step).clip(-_LIMIT, _LIMIT)
            noise, slope = at(there)
            if noise <= least + _ENOUGH * fall:
                break
            step = step / 2
            fall = fall / 2
        else:
            break  # nothing to gain
        moved = there - here
        changed = slope - gradient
        curvature = _dot(moved, changed)
        if curvature > 0:
            past.append(_PastStep(moved, changed, curvature))
        here = there
        least = noise
        gradient = slope
    return here, before, least


class _PastStep(NamedTuple):
    """A step, the change of the gradient along it, and their product."""

    moved: Doubles
    changed: Doubles
    curvature: float


def _newton_step(gradient: Doubles, past: Sequence[_PastStep]) -> Doubles:
    """Multiply the gradient by an estimate of the inverse Hessian from past steps."""
    result = gradient
    shares = list[float]()
    for moved, changed, curvature in reversed(past):
        shares.append(_dot(moved, result) / curvature)
        result = result - shares[-1] * changed
    if past:
        _, changed, curvature = past[-1]
        result = result * (curvature / _dot(changed, changed))
    for moved, changed, curvature in past:
        share = shares.pop() - _dot(changed, result) / curvature
        result = result + share * moved
    return result


def _dot(a: Doubles, b: Doubles) -> float:
    return float(np.einsum("i,i->", a, b))
