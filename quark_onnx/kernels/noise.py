"""The noise of rounding in a chain of layers, as a function of the factors that channels between
them are divided by.

A step of rounding has a variance of a twelfth of its square. Noise over signal is a sum of
exponentials of linear functions of the factors' logarithms once its maxima are replaced by p-norms,
and so it is convex in them: a geometric program (Boyd et al. 2007, "A Tutorial on Geometric
Programming"), whose least value one descent finds.

Sums over arrays are those of einsum, which keeps to one core: their order does not depend on how
many there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]

#: The p-norm in place of the maximum of weights, which are all known.
_POWER = 16
#: That of activations. Data that was not seen goes beyond the extremes that were: where each
#: channel's are those of a Frechet distribution with this index, the extreme of all channels is the
#: p-norm of theirs. A greater p lines all of them up at one extreme, so that each may be clipped; 4
#: to 8 gave the least noise on images held out.
_TAIL = 6
#: Steps of the descent at most, how far one may move a logarithm, and how many are remembered.
_STEPS, _STRIDE, _PAST = 500, 1.0, 20
#: The share of the expected gain that a step has to bring, and the share of the noise that is worth
#: another one.
_ENOUGH, _CONVERGED = 1e-4, 1e-11
#: Logarithms of factors stay within this.
_LIMIT = float(np.log(1e4))
_LEAST = 1e-300


@dataclass(frozen=True)
class Rounding:
    """How finely a model will be rounded.

    Attributes:
        weight: steps from one end of a weight's range to the other; 0 if weights stay float.
        per_channel: whether each output of a weight has a scale of its own.
        activation: steps of an activation's range; 0 if activations stay float.
        symmetric: whether that range reaches as far below zero as above.
    """

    weight: int = 254
    per_channel: bool = True
    activation: int = 255
    symmetric: bool = False


#: Weights with a scale for each output and activations with one for all.
EIGHT_BITS = Rounding()


@dataclass(frozen=True)
class Spread:
    """Channels of a tensor that share one scale.

    They are divided by factors, and multiplied back where they are read.

    Attributes:
        low, high: how far each channel reaches below and above zero.
        matter: what the variance of a channel's noise counts.
        outputs: whether they are the outputs of a layer, or its inputs.
        inverse: whether they are multiplied by the factors, and divided back.
    """

    low: Doubles
    high: Doubles
    matter: Doubles
    outputs: bool = False
    inverse: bool = False

    def noise(self, logarithm: Doubles, rounding: Rounding) -> tuple[float, Doubles]:
        """The noise at the logarithms of the factors, and its gradient."""
        if not rounding.activation or not self.matter.any():
            return 0.0, np.zeros(logarithm.shape)
        x = -logarithm if self.inverse else logarithm
        if rounding.symmetric:
            width, slope = (
                2 * part for part in _norm(np.maximum(self.low, self.high), -x)
            )
        else:
            width, slope = (
                a + b
                for a, b in zip(_norm(self.low, -x), _norm(self.high, -x), strict=True)
            )
        parts = self.matter * np.exp(2 * x)
        unit, total = 1 / (12 * rounding.activation**2), parts.sum()
        gradient = 2 * unit * (width**2 * parts - width * slope * total)
        return float(unit * width**2 * total), -gradient if self.inverse else gradient


def _norm(size: Doubles, x: Doubles) -> tuple[Doubles, Doubles]:
    """The p-norm of sizes times exponentials, and its gradient."""
    top = size.max(initial=0.0)
    if top <= 0:
        return np.zeros(()), np.zeros(x.shape)
    parts = (size / top) ** _TAIL * np.exp(_TAIL * x)
    total = parts.sum()
    norm = np.asarray(top * total ** (1 / _TAIL))
    return norm, norm * parts / total


@dataclass(frozen=True)
class Term:
    """The noise in the results of a layer.

    Attributes:
        source, target: the place, among all logarithms, of that of each input and output. peak: the
        greatest absolute weight of each output and input, (groups, outputs, inputs). energy: mean
        square of an input, times the weights that it is multiplied with, (groups, inputs). matter:
        what the variance of an output's noise counts, (groups, outputs). spreads: the tensors that
        are rounded.
    """

    source: NDArray[np.intp]
    target: NDArray[np.intp]
    peak: Doubles
    energy: Doubles
    matter: Doubles
    spreads: tuple[Spread, ...]

    def noise(self, logarithm: Doubles, gradient: Doubles, rounding: Rounding) -> float:
        """The noise at all logarithms; its gradient is added to ``gradient``."""
        u, v = logarithm[self.source], logarithm[self.target]
        noise, by_input, by_output = self._weights(
            u.reshape(self.energy.shape),
            v.reshape(self.matter.shape),
            rounding,
        )
        by_input, by_output = by_input.ravel(), by_output.ravel()
        for spread in self.spreads:
            found, slope = spread.noise(v if spread.outputs else u, rounding)
            noise += found
            if spread.outputs:
                by_output = by_output + slope
            else:
                by_input = by_input + slope
        size = logarithm.size
        gradient += np.bincount(self.source, by_input, size) + np.bincount(
            self.target,
            by_output,
            size,
        )
        return noise

    def _weights(
        self,
        u: Doubles,
        v: Doubles,
        rounding: Rounding,
    ) -> tuple[float, Doubles, Doubles]:
        """The noise of the weights, and its gradients by inputs and by outputs."""
        top = self.peak.max(initial=0.0)
        if not rounding.weight or not top:
            return 0.0, np.zeros(u.shape), np.zeros(v.shape)
        unit = (2 * top / rounding.weight) ** 2 / 12
        reach, grown, read = (
            self._reach,
            np.exp(_POWER * u),
            self.energy * np.exp(-2 * u),
        )
        sums, along = (
            read.sum(axis=1, keepdims=True),
            np.einsum("goi,gi->go", reach, grown),
        )
        if rounding.per_channel:  # what an output is divided by cancels
            parts = unit * self.matter * along ** (2 / _POWER) * sums
            shares = (
                np.einsum("goi,go->gi", reach, parts / np.maximum(along, _LEAST))
                * grown
            )
            whole = parts.sum(axis=1, keepdims=True) / np.maximum(sums, _LEAST)
            return float(parts.sum()), 2 * (shares - whole * read), np.zeros(v.shape)
        shrunk, counted = np.exp(-_POWER * v), self.matter * np.exp(2 * v)
        across, whole = (
            np.einsum("goi,go->gi", reach, shrunk),
            counted.sum(axis=1, keepdims=True),
        )
        total = (across * grown).sum()
        step = unit * total ** (2 / _POWER)
        noise = step * (whole * sums).sum()
        by_input = 2 * (noise * across * grown / total - step * whole * read)
        return (
            float(noise),
            by_input,
            2 * (step * sums * counted - noise * along * shrunk / total),
        )

    @cached_property
    def _reach(self) -> Doubles:
        reach: Doubles = (self.peak / self.peak.max(initial=_LEAST)) ** _POWER
        return reach


def minimize_noise(
    terms: Sequence[Term],
    fixed: NDArray[np.bool_],
    rounding: Rounding,
) -> tuple[Doubles, float, float]:
    """The logarithms, zero where they are ``fixed``, at which the noise of all terms is least.

    It before and after.

    The descent is L-BFGS with backtracking (Nocedal & Wright 2006, algorithms 7.4 and 3.1).
    """

    def at(point: Doubles) -> tuple[float, Doubles]:
        gradient = np.zeros(point.size)
        noise = sum(term.noise(point, gradient, rounding) for term in terms)
        gradient[fixed] = 0.0
        return noise, gradient

    here = np.zeros(fixed.size)
    before, gradient = at(here)
    least, past = before, deque[tuple[Doubles, Doubles]](maxlen=_PAST)
    for _ in range(_STEPS):
        step = -_turned(gradient, past)
        step *= min(1.0, _STRIDE / max(np.abs(step).max(), _LEAST))
        fall = _dot(gradient, step)
        while -fall > _CONVERGED * least:
            there = (here + step).clip(-_LIMIT, _LIMIT)
            noise, slope = at(there)
            if noise <= least + _ENOUGH * fall:
                break
            step, fall = step / 2, fall / 2
        else:
            break  # nothing to gain
        moved, changed = there - here, slope - gradient
        if _dot(moved, changed) > 0:
            past.append((moved, changed))
        here, least, gradient = there, noise, slope
    return here, before, least


def _turned(gradient: Doubles, past: Sequence[tuple[Doubles, Doubles]]) -> Doubles:
    """The gradient times an estimate of the inverse of the Hessian from past moves and changes of
    the gradient.
    """
    result, shares = gradient, list[float]()
    for moved, changed in reversed(past):
        shares.append(_dot(moved, result) / _dot(moved, changed))
        result = result - shares[-1] * changed
    if past:
        moved, changed = past[-1]
        result = result * (_dot(moved, changed) / _dot(changed, changed))
    for moved, changed in past:
        result = (
            result
            + (shares.pop() - _dot(changed, result) / _dot(moved, changed)) * moved
        )
    return result


def _dot(one: Doubles, other: Doubles) -> float:
    return float(np.einsum("i,i->", one, other))
