"""Choose factors between layers that balance the rounding noise of weights and activations.

Equalization of the weights alone makes the best use of the scales of weights, but may spread the
channels of the activations between them over any range. Here the noise of both is modelled in each
layer's result, relative to its signal, and the sum over all layers is minimized.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from calibrators.onnx_runtime.control_flow import Observation
from calibrators.sampled import Sampled
from calibrators.sampled import Samples as Sampling
from quark_onnx.graph import Graph
from quark_onnx.kernels.noise import (
    Rounding,
    Spread,
    Term,
    minimize_noise,
    total_noise,
)
from quark_onnx.optimizers.base import Samples, watch
from quark_onnx.patterns.activation import Activation, activation_behind
from quark_onnx.patterns.channel_pairs import ChannelPair, Doubles, layers_of
from quark_onnx.patterns.conv_and_gemm import SPATIAL, Layer

#: Sampled vectors of a tensor, from which its moments are computed.
_VECTORS = 1024
#: Results count as constant if their variance is a smaller share of their mean square, and as no
#: signal below the second limit.
_CONSTANT = 1e-6
_LEAST = 1e-60


@dataclass(frozen=True)
class Balance:
    """Factors that balance the noise of layers.

    Attributes:
        pairs: pairs of layers.
        logarithms: logarithms of the factors of all pairs; the first is 0, for channels without a
            factor.
        places: the slice of ``logarithms`` with the channels of each pair.
        terms: noise-to-signal ratio of each layer, as a function of the logarithms.
        rounding: rounding of weights and activations.
        before: modelled noise-to-signal ratio, summed over the layers, without factors.
        after: the same with the factors.
    """

    pairs: list[ChannelPair]
    logarithms: Doubles
    places: list[slice]
    terms: list[Term]
    rounding: Rounding
    before: float
    after: float

    @property
    def factors(self) -> list[Doubles]:
        """The factors of each pair, one per channel."""
        return [np.exp(self.logarithms[place]) for place in self.places]

    def gain(self, index: int) -> float:
        """Return the noise that the factors of a pair remove, with the others as they are."""
        logarithms = self._logarithms_without([index])
        place = self.places[index]
        noises = [
            self._noise(term, logarithms) if term.reads(place) else noise
            for term, noise in zip(self.terms, self._noises, strict=True)
        ]
        return sum(noises) - self.after

    def without(self, indices: Sequence[int]) -> Balance:
        """Return the balance with the factor 1 for all channels of some pairs."""
        logarithms = self._logarithms_without(indices)
        after, _ = total_noise(self.terms, logarithms, self.rounding)
        return replace(self, logarithms=logarithms, after=after)

    def _logarithms_without(self, indices: Sequence[int]) -> Doubles:
        logarithms: Doubles = self.logarithms.copy()
        for index in indices:
            logarithms[self.places[index]] = 0.0
        return logarithms

    @cached_property
    def _noises(self) -> list[float]:
        """The noise of each term with all factors."""
        return [self._noise(term, self.logarithms) for term in self.terms]

    def _noise(self, term: Term, logarithms: Doubles) -> float:
        return term.noise(logarithms, np.zeros(logarithms.size), self.rounding)


def balance(
    graph: Graph, pairs: list[ChannelPair], samples: Samples, rounding: Rounding
) -> Balance:
    """Return factors for the completely observed pairs.

    Args:
        graph: the float graph.
        pairs: pairs of layers.
        samples: calibration data.
        rounding: rounding of weights and activations.

    Raises:
        DataError: a sample does not fit or cannot be run.
    """
    # One pass over the data for all layers of all pairs.
    seen = _observe(graph, layers_of(pairs), samples)
    # A pair with an unobserved layer would have a term of unknown noise, and its factors no limit.
    pairs = [pair for pair in pairs if _is_watched(graph, pair, seen)]
    # The logarithm at 0 is for channels without a factor.
    places = dict[str, slice]()
    size = 1
    for pair in pairs:
        places[pair.first.node.name] = slice(size, size + pair.channels)
        size += pair.channels
    statistics = dict[str, _Statistics]()
    for name, layer in layers_of(pairs).items():
        read = seen[layer.node.input(0)]
        computed = seen[layer.node.outputs[0]]
        statistics[name] = _Statistics.of(graph, layer, read, computed)
    # True for logarithms that stay 0, such as the one at 0.
    fixed = np.ones(size, np.bool_)
    for pair in pairs:
        fixed[places[pair.first.node.name]] = _dead(pair, statistics)
    terms = _terms(graph, pairs, statistics, places)
    logarithm, before, after = minimize_noise(terms, fixed, rounding)
    ordered = [places[pair.first.node.name] for pair in pairs]
    return Balance(pairs, logarithm, ordered, terms, rounding, before, after)


def _observe(
    graph: Graph, layers: dict[str, Layer], samples: Samples
) -> dict[str, Sampled]:
    """Return vectors and extremes of the inputs and outputs of layers."""
    axes = dict[str, int]()
    for layer in layers.values():
        # The layer's inputs and outputs have their channels on the same axis.
        axis = 1 if layer.node.kind in SPATIAL else -1
        axes |= {layer.node.input(0): axis, layer.node.outputs[0]: axis}
    observations = [
        Observation(tensor, Sampling(_VECTORS), axis) for tensor, axis in axes.items()
    ]
    statistics = watch(graph, observations, samples)
    return {
        tensor: statistic
        for tensor, statistic in zip(axes, statistics, strict=True)
        if isinstance(statistic, Sampled)
    }


def _is_watched(graph: Graph, pair: ChannelPair, seen: dict[str, Sampled]) -> bool:
    """Return whether all inputs and outputs of a pair's layers are known and finite."""
    for layer in layers_of([pair]).values():
        groups, outputs, inputs = layer.shape(graph)[:3]
        read = seen[layer.node.input(0)]
        computed = seen[layer.node.outputs[0]]
        if read.nonfinite or computed.nonfinite:
            return False
        # Channels of a tensor that was empty or had another size on some sample are not complete.
        if read.lo.size != groups * inputs or computed.lo.size != groups * outputs:
            return False
    return True


@dataclass(frozen=True)
class _Statistics:
    """Statistics of a layer.

    Attributes:
        peak: greatest absolute weight per output and input, (groups, outputs, inputs).
        square: sum of squared weights per output and input, (groups, outputs, inputs).
        taps: number of weights per output and input.
        low: range of each input below zero.
        high: range of each input above zero.
        energy: mean square of each input.
        rounded: share of nonzero values of each input: zero is represented exactly.
        computed: results, (vectors, outputs).
    """

    peak: Doubles
    square: Doubles
    taps: int
    low: Doubles
    high: Doubles
    energy: Doubles
    rounded: Doubles
    computed: Doubles

    @classmethod
    def of(
        cls, graph: Graph, layer: Layer, read: Sampled, computed: Sampled
    ) -> _Statistics:
        weight = layer.weight(graph)
        # (groups, outputs / groups, inputs / groups, taps of the kernel).
        flat = weight.reshape(*weight.shape[:3], -1)
        return cls(
            peak=np.abs(flat).max(axis=3),
            square=np.square(flat).sum(axis=3),
            taps=flat.shape[3],
            # Ranges contain 0, which codes represent exactly.
            low=np.maximum(-read.lo, 0),
            high=np.maximum(read.hi, 0),
            energy=np.square(read.vectors, dtype=np.float64).mean(axis=0),
            rounded=(read.vectors != 0).mean(axis=0),
            computed=computed.vectors.astype(np.float64),
        )

    @cached_property
    def share(self) -> float:
        """Weight of noise relative to the signal: the inverse variance of all results.

        Constant results count by their mean square instead.
        """
        # The mean of a result carries no information about the input.
        variance = float(self.computed.var(axis=0).sum())
        squares = float(np.square(self.computed).mean(axis=0).sum())
        signal = variance if variance > _CONSTANT * squares else squares
        if signal > _LEAST:
            return 1 / signal
        return 0.0


def _by_channel(
    pair: ChannelPair, statistics: dict[str, _Statistics]
) -> list[tuple[_Statistics, Doubles]]:
    """Return the statistics of each reader of a pair, with the squared weights of a channel.

    The squares of all weights that read a channel are summed, (channels,).
    """
    result = []
    for reader in pair.readers:
        layer = statistics[reader.layer.node.name]
        # (channels * repeat,): a channel may reach several inputs, as after a Flatten.
        inputs = layer.square.sum(axis=1).ravel()[reader.span(pair.channels)]
        result.append((layer, inputs.reshape(pair.channels, -1).sum(axis=1)))
    return result


def _dead(pair: ChannelPair, statistics: dict[str, _Statistics]) -> np.ndarray:
    """Return a mask of the channels without weights on a side, (channels,)."""
    before = statistics[pair.first.node.name].square.sum(axis=2).ravel()
    after = sum(squares for _, squares in _by_channel(pair, statistics))
    # The noise of a dead channel does not depend on its factor, whose logarithm would drift to
    # infinity.
    return np.asarray((before == 0) | (after == 0))


def _terms(
    graph: Graph,
    pairs: list[ChannelPair],
    statistics: dict[str, _Statistics],
    places: dict[str, slice],
) -> list[Term]:
    """Return the noise terms of every layer.

    Args:
        graph: the float graph, for the activations after the layers.
        statistics: statistics by the name of the layer.
        places: positions of a pair's logarithms, by the name of its first layer.
    """
    by_first = {pair.first.node.name: pair for pair in pairs}
    # For each input of a layer, the position of the logarithm that multiplies it; 0 for none.
    sources = {
        name: np.zeros(layer.energy.size, np.intp) for name, layer in statistics.items()
    }
    for name, pair in by_first.items():
        positions = np.arange(places[name].start, places[name].stop)
        for reader in pair.readers:
            source = sources[reader.layer.node.name]
            source[reader.span(pair.channels)] = np.repeat(positions, reader.repeat)
    terms = []
    for name, layer in statistics.items():
        shape = layer.peak.shape[:2]
        pair_after = by_first.get(name)
        # Without a pair after the layer, noise counts relative to the layer's own signal;
        # (outputs,).
        matter = np.full(layer.computed.shape[1], layer.share)
        gated = tuple[Spread, ...]()
        # The positions of the logarithms that divide the layer's outputs.
        target = np.zeros(matter.size, np.intp)
        if pair_after is not None:
            target = np.arange(places[name].start, places[name].stop)
            function = activation_behind(graph, pair_after.first.node.outputs[0])
            shares = [
                squares * reader.share
                for reader, squares in _by_channel(pair_after, statistics)
            ]
            # Noise of a channel after the activation counts by the squared weights that read it.
            share = np.sum(shares, axis=0)
            # Noise before an activation counts by what the next layers see of it.
            matter = share * _gain(function, layer.computed)
            if pair_after.gates:
                gated = _gated(function, layer.computed, share, matter)
        by_input = np.einsum("go,goi->gi", matter.reshape(shape), layer.square).ravel()
        read = layer.rounded * by_input
        terms.append(
            Term(
                source=sources[name],
                target=target,
                peak=layer.peak,
                # Each tap of the kernel adds the noise of a weight, times the energy of the input.
                energy=layer.taps * layer.energy.reshape(shape[0], -1),
                matter=matter.reshape(shape),
                spreads=(Spread(layer.low, layer.high, read), *gated),
            ),
        )
    return terms


def _gain(function: Activation, x: Doubles) -> Doubles:
    """Return the factor of an activation on the variance of small noise, per channel.

    Args:
        x: samples of the activation's input, (vectors, channels).
    """
    # The derivative of a linear function is the number 1.
    slope = np.broadcast_to(function.derivative(x), x.shape)
    gain: Doubles = np.square(slope).mean(axis=0)
    return gain


def _gated(
    function: Activation, x: Doubles, share: Doubles, matter: Doubles
) -> tuple[Spread, ...]:
    """Return the noise of x * gate(x): x is rounded, and so are the factors before the gate.

    Args:
        x: samples of the activation's input, (vectors, channels).
        share: weight of a channel's noise variance after the activation.
        matter: weight of a channel's noise variance before the activation.
    """
    low = np.maximum(-x.min(axis=0), 0)
    high = np.maximum(x.max(axis=0), 0)
    # x^2 gate'(x)
    by_gate = np.square(x * function.derivative(x) - function.value(x)).mean(axis=0)
    zero = np.zeros(share.size)
    one = np.ones(share.size)
    return (
        Spread(low, high, matter, outputs=True),
        Spread(zero, one, share * by_gate, outputs=True, inverse=True),
    )
