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
from itertools import accumulate
from typing import Any

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


class TotalNoise:
    """The noise of all layers as a function of the factors' logarithms.

    Channels of all layers stand in flat arrays, as a call for each of many small layers takes
    longer than its arithmetic.
    """

    def __init__(self, terms: Sequence[Term], rounding: Rounding) -> None:
        self._weights = _WeightNoise(terms, rounding)
        self._activations = _ActivationNoise(terms, rounding)

    def __call__(self, logarithm: Doubles) -> tuple[float, Doubles]:
        """Return the noise at the logarithms, and its gradient."""
        noise, gradient = self._weights(logarithm)
        more, slope = self._activations(logarithm)
        return noise + more, gradient + slope


class _Segments:
    """Consecutive parts of a flat array, none of them empty."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = np.asarray(sizes, np.intp)
        self._starts = np.cumsum(self._sizes) - self._sizes

    def sum(self, values: Doubles) -> Doubles:
        """Return the sum of each part."""
        if not self._sizes.size:
            return np.zeros(0)
        return np.add.reduceat(values, self._starts)

    def spread(self, values: Doubles) -> Doubles:
        """Return the value of each part for all its elements."""
        return np.repeat(values, self._sizes)


class _WeightNoise:
    """The noise of rounded weights."""

    def __init__(self, terms: Sequence[Term], rounding: Rounding) -> None:
        terms = [term for term in terms if rounding.weight and term.peak.any()]
        self._per_channel = rounding.per_channel
        self._source = _joined([term.source for term in terms], np.intp)
        self._target = _joined([term.target for term in terms], np.intp)
        self._energy = _joined([term.energy for term in terms])
        self._matter = _joined([term.matter for term in terms])
        tops = [float(term.peak.max()) for term in terms]
        # Relative to the greatest, as powers of the sizes could overflow or vanish.
        self._reaches = [
            (term.peak / top) ** _POWER for term, top in zip(terms, tops, strict=True)
        ]
        shapes = [term.peak.shape for term in terms]
        self._inputs = _Segments([i for g, _, i in shapes for _ in range(g)])
        self._outputs = _Segments([o for g, o, _ in shapes for _ in range(g)])
        self._groups = _Segments([g for g, _, _ in shapes])
        outputs = _places([g * o for g, o, _ in shapes])
        self._places = list(
            zip(outputs, _places([g * i for g, _, i in shapes]), strict=True)
        )
        # Weights have symmetric ranges: steps of twice the greatest magnitude / levels.
        steps = 2 * np.asarray(tops) / max(rounding.weight, 1)
        self._units = np.square(steps) / 12

    def __call__(self, logarithm: Doubles) -> tuple[float, Doubles]:
        """Return the noise at the logarithms, and its gradient."""
        # A p-norm stands for the greatest magnitude of an output, as a maximum has no gradient in
        # all but one input.
        grown = np.exp(_POWER * logarithm)[self._source]
        read = self._energy * np.exp(-2 * logarithm)[self._source]
        along = self._along(grown)
        if self._per_channel:
            noise, by_input = self._by_channel(grown, read, along)
            # Per-channel scales cancel the factors of outputs.
            return noise, _scattered(self._source, by_input, logarithm.size)
        noise, by_input, by_output = self._by_tensor(logarithm, grown, read, along)
        from_inputs = _scattered(self._source, by_input, logarithm.size)
        return noise, from_inputs + _scattered(self._target, by_output, logarithm.size)

    def _by_channel(
        self, grown: Doubles, read: Doubles, along: Doubles
    ) -> tuple[float, Doubles]:
        """Return the noise for a scale per output, and its gradient by inputs."""
        sums = self._inputs.sum(read)
        units = self._outputs.spread(self._groups.spread(self._units))
        parts = units * self._matter * along ** (2 / _POWER)
        parts = parts * self._outputs.spread(sums)
        shares = self._across(parts / np.maximum(along, _LEAST)) * grown
        whole = self._outputs.sum(parts) / np.maximum(sums, _LEAST)
        return float(parts.sum()), 2 * (shares - self._inputs.spread(whole) * read)

    def _by_tensor(
        self, logarithm: Doubles, grown: Doubles, read: Doubles, along: Doubles
    ) -> tuple[float, Doubles, Doubles]:
        """Return the noise for a scale per weight, and its gradients by inputs and by outputs."""
        shrunk = np.exp(-_POWER * logarithm)[self._target]
        counted = self._matter * np.exp(2 * logarithm)[self._target]
        across = self._across(shrunk) * grown
        sums = self._inputs.sum(read)
        whole = self._outputs.sum(counted)
        totals = self._groups.sum(self._inputs.sum(across))
        steps = self._units * totals ** (2 / _POWER)
        noises = steps * self._groups.sum(whole * sums)
        # The change of the step, and of what is rounded by it.
        changes = self._groups.spread(noises / np.maximum(totals, _LEAST))
        steps = self._groups.spread(steps)
        by_input = 2 * (
            self._inputs.spread(changes) * across
            - self._inputs.spread(steps * whole) * read
        )
        by_output = 2 * (
            self._outputs.spread(steps * sums) * counted
            - self._outputs.spread(changes) * along * shrunk
        )
        return float(noises.sum()), by_input, by_output

    def _along(self, inputs: Doubles) -> Doubles:
        """Multiply by the powers of the weights, and sum over inputs."""
        result = np.empty(self._target.size)
        for reach, (outputs, read) in zip(self._reaches, self._places, strict=True):
            part = inputs[read].reshape(len(reach), -1)
            result[outputs] = np.einsum("goi,gi->go", reach, part).ravel()
        return result

    def _across(self, outputs: Doubles) -> Doubles:
        """Multiply by the powers of the weights, and sum over outputs."""
        result = np.empty(self._source.size)
        for reach, (computed, read) in zip(self._reaches, self._places, strict=True):
            part = outputs[computed].reshape(len(reach), -1)
            result[read] = np.einsum("goi,go->gi", reach, part).ravel()
        return result


class _ActivationNoise:
    """The noise of rounded activations."""

    def __init__(self, terms: Sequence[Term], rounding: Rounding) -> None:
        spreads = [
            (spread, term.target if spread.outputs else term.source)
            for term in terms
            for spread in term.spreads
            if rounding.activation and spread.matter.any()
        ]
        self._index = _joined([index for _, index in spreads], np.intp)
        self._segments = _Segments([index.size for _, index in spreads])
        signs = [-1.0 if spread.inverse else 1.0 for spread, _ in spreads]
        self._signs = self._segments.spread(np.asarray(signs))
        self._matter = _joined([spread.matter for spread, _ in spreads])
        lows = [spread.low for spread, _ in spreads]
        highs = [spread.high for spread, _ in spreads]
        if rounding.symmetric:
            lows = highs = [np.maximum(*ends) for ends in zip(lows, highs, strict=True)]
        self._ends = [self._powers(lows), self._powers(highs)]
        # Rounding to steps adds noise of a variance of step^2 / 12, with steps of width / levels.
        self._unit = 1 / (12 * max(rounding.activation, 1) ** 2)

    def __call__(self, logarithm: Doubles) -> tuple[float, Doubles]:
        """Return the noise at the logarithms, and its gradient."""
        x = self._signs * logarithm[self._index]
        shrunk = np.exp(-_TAIL * x)
        width = np.zeros(())
        slope = np.zeros(())
        for tops, powers in self._ends:
            parts = powers * shrunk
            totals = self._segments.sum(parts)
            norms = tops * totals ** (1 / _TAIL)
            width = width + norms
            shares = norms / np.maximum(totals, _LEAST)
            slope = slope + self._segments.spread(shares) * parts
        # Where they are read, channels are multiplied by exp(x), and so is their noise.
        parts = self._matter * np.exp(2 * x)
        totals = self._segments.sum(parts)
        noise = self._unit * float(np.sum(width**2 * totals))
        squares = self._segments.spread(width**2) * parts
        change = squares - self._segments.spread(width * totals) * slope
        gradient = 2 * self._unit * self._signs * change
        return noise, _scattered(self._index, gradient, logarithm.size)

    def _powers(self, sizes: Sequence[Doubles]) -> tuple[Doubles, Doubles]:
        """Return the greatest size of each tensor, and the powers of all, relative to it."""
        tops = np.array([size.max(initial=0.0) for size in sizes])
        relative = _joined(sizes) / np.maximum(self._segments.spread(tops), _LEAST)
        return tops, relative**_TAIL


def _places(sizes: Sequence[int]) -> list[slice]:
    """Return the slices of consecutive parts of an array."""
    return [
        slice(end - size, end)
        for end, size in zip(accumulate(sizes), sizes, strict=True)
    ]


def _scattered(index: NDArray[np.intp], values: Doubles, size: int) -> Doubles:
    """Return the sum of the values at each index, (size,)."""
    return np.bincount(index, values, size).astype(np.float64, copy=False)


def _joined(arrays: Sequence[NDArray[Any]], dtype: Any = np.float64) -> NDArray[Any]:
    """Return the elements of all arrays, of which there may be none."""
    if not arrays:
        return np.zeros(0, dtype)
    return np.concatenate([array.ravel() for array in arrays])


def minimize_noise(
    total: TotalNoise, fixed: NDArray[np.bool_]
) -> tuple[Doubles, float, float]:
    """Return the logarithms with the least total noise, and the noise before and after.

    The descent is L-BFGS with backtracking (Nocedal & Wright 2006, algorithms 7.4 and 3.1).

    Args:
        total: the noise of all layers.
        fixed: logarithms that stay zero.
    """

    def at(point: Doubles) -> tuple[float, Doubles]:
        noise, gradient = total(point)
        gradient[fixed] = 0.0
        return noise, gradient

    here = np.zeros(fixed.size)
    before, gradient = at(here)
    least = before
    past = deque[tuple[Doubles, Doubles]](maxlen=_PAST)
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
        if _dot(moved, changed) > 0:
            past.append((moved, changed))
        here = there
        least = noise
        gradient = slope
    return here, before, least


def _newton_step(gradient: Doubles, past: Sequence[tuple[Doubles, Doubles]]) -> Doubles:
    """Multiply the gradient by an estimate of the inverse Hessian from past steps."""
    result = gradient
    shares = list[float]()
    for moved, changed in reversed(past):
        shares.append(_dot(moved, result) / _dot(moved, changed))
        result = result - shares[-1] * changed
    if past:
        moved, changed = past[-1]
        result = result * (_dot(moved, changed) / _dot(changed, changed))
    for moved, changed in past:
        share = shares.pop() - _dot(changed, result) / _dot(moved, changed)
        result = result + share * moved
    return result


def _dot(a: Doubles, b: Doubles) -> float:
    return float(np.einsum("i,i->", a, b))
