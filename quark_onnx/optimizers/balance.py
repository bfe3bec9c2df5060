"""Factors for the channels between layers that weigh the rounding of weights against that of
activations.

Equalization of the weights alone makes the most of the scales of weights, and may spread the
channels of what stands between them over any range. Here the noise of both is modelled in each
layer's result, relative to its signal, and the sum over all layers is made least.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from calibrators.onnx_runtime.control_flow import Observation
from calibrators.sampled import Sampled
from calibrators.sampled import Samples as Sampling
from quark_onnx.graph import Graph
from quark_onnx.kernels.noise import Rounding, Spread, Term, minimize_noise
from quark_onnx.optimizers.base import Samples, watch
from quark_onnx.patterns.activation import Activation, activation_behind
from quark_onnx.patterns.channel_pairs import Doubles, Pair, layers_of
from quark_onnx.patterns.conv_and_gemm import SPATIAL, Layer

#: Vectors of a tensor that its moments are taken of.
_VECTORS = 1024
#: Results vary by more than this share of their squares, or are taken for constant; less than the
#: other is no signal.
_CONSTANT, _LEAST = 1e-6, 1e-60


@dataclass(frozen=True)
class Balance:
    """The factors of each pair, and the noise of all layers over their signal before and after."""

    pairs: list[Pair]
    factors: list[Doubles]
    before: float
    after: float


def balance(
    graph: Graph,
    pairs: list[Pair],
    samples: Samples,
    rounding: Rounding,
) -> Balance:
    """Factors for the pairs of which all tensors could be watched.

    Raises:
        DataError: a sample that does not fit or cannot be run.
    """
    seen = _observe(graph, layers_of(pairs), samples)
    pairs = [
        pair
        for pair in pairs
        if all(_watched(graph, layer, seen) for layer in layers_of([pair]).values())
    ]
    places, size = dict[str, slice](), 1  # place 0 is for what has no factor
    for pair in pairs:
        places[pair.first.node.name] = slice(size, size + pair.channels)
        size += pair.channels
    known = {
        name: _Known.of(
            graph,
            layer,
            seen[layer.node.input(0)],
            seen[layer.node.outputs[0]],
        )
        for name, layer in layers_of(pairs).items()
    }
    fixed = np.ones(size, np.bool_)
    for pair in pairs:
        fixed[places[pair.first.node.name]] = _dead(pair, known)
    terms = _terms(graph, pairs, known, places)
    logarithm, before, after = minimize_noise(terms, fixed, rounding)
    return Balance(
        pairs,
        [np.exp(logarithm[places[pair.first.node.name]]) for pair in pairs],
        before,
        after,
    )


def _observe(
    graph: Graph,
    layers: dict[str, Layer],
    samples: Samples,
) -> dict[str, Sampled]:
    """Vectors and extremes of what the layers read and compute."""
    axes = dict[str, int]()
    for layer in layers.values():
        axis = 1 if layer.node.kind in SPATIAL else -1
        axes |= {layer.node.input(0): axis, layer.node.outputs[0]: axis}
    watched = [
        Observation(tensor, Sampling(_VECTORS), axis) for tensor, axis in axes.items()
    ]
    found = watch(graph, watched, samples)
    return {
        tensor: each
        for tensor, each in zip(axes, found, strict=True)
        if isinstance(each, Sampled)
    }


def _watched(graph: Graph, layer: Layer, seen: dict[str, Sampled]) -> bool:
    """Whether all values that a layer reads and computes are known and finite."""
    groups, outputs, inputs = layer.shape(graph)[:3]
    sizes = {
        layer.node.input(0): groups * inputs,
        layer.node.outputs[0]: groups * outputs,
    }
    return all(
        seen[tensor].lo.size == size and not seen[tensor].nonfinite
        for tensor, size in sizes.items()
    )


@dataclass(frozen=True)
class _Known:
    """What is known of a layer.

    Attributes:
        peak, square: the greatest absolute weight of each output and input, and the sum of squares;
            (groups, outputs, inputs).
        taps: how many weights there are for each of those.
        low, high: how far each input reaches below and above zero.
        energy: the mean square of each input.
        rounded: how often each input is rounded: zero is a code of its own.
        computed: its results, (vectors, outputs).
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
    def of(cls, graph: Graph, layer: Layer, read: Sampled, computed: Sampled) -> _Known:
        weight = layer.weight(graph)
        flat = weight.reshape(*weight.shape[:3], -1)
        return cls(
            peak=np.abs(flat).max(axis=3),
            square=np.square(flat).sum(axis=3),
            taps=flat.shape[3],
            low=np.maximum(-read.lo, 0),
            high=np.maximum(read.hi, 0),
            energy=np.square(read.vectors, dtype=np.float64).mean(axis=0),
            rounded=(read.vectors != 0).mean(axis=0),
            computed=computed.vectors.astype(np.float64),
        )

    @cached_property
    def share(self) -> float:
        """A unit of noise over the signal: the variance of all results, or their squares if they do
        not vary.
        """
        varied, squares = (
            float(part.sum())
            for part in (
                self.computed.var(axis=0),
                np.square(self.computed).mean(axis=0),
            )
        )
        signal = varied if varied > _CONSTANT * squares else squares
        return 1 / signal if signal > _LEAST else 0.0


def _by_channel(pair: Pair, known: dict[str, _Known]) -> list[tuple[_Known, Doubles]]:
    """For each reader what is known of it, and its squared weights by the channels of the pair."""
    found = []
    for reader in pair.readers:
        layer = known[reader.layer.node.name]
        inputs = layer.square.sum(axis=1).ravel()[reader.span(pair.channels)]
        found.append((layer, inputs.reshape(pair.channels, -1).sum(axis=1)))
    return found


def _dead(pair: Pair, known: dict[str, _Known]) -> np.ndarray:
    """Channels without weights on one side, which are left alone."""
    before = known[pair.first.node.name].square.sum(axis=2).ravel()
    behind = sum(squares for _, squares in _by_channel(pair, known))
    return np.asarray((before == 0) | (behind == 0))


def _terms(
    graph: Graph,
    pairs: list[Pair],
    known: dict[str, _Known],
    places: dict[str, slice],
) -> list[Term]:
    """The noise of every layer."""
    firsts = {pair.first.node.name: pair for pair in pairs}
    sources = {
        name: np.zeros(layer.energy.size, np.intp) for name, layer in known.items()
    }
    for name, pair in firsts.items():
        own = np.arange(places[name].start, places[name].stop)
        for reader in pair.readers:
            sources[reader.layer.node.name][reader.span(pair.channels)] = np.repeat(
                own,
                reader.repeat,
            )
    terms = []
    for name, layer in known.items():
        shape, behind, place = layer.peak.shape[:2], firsts.get(name), places.get(name)
        matter, gated = (
            np.full(layer.computed.shape[1], layer.share),
            tuple[Spread, ...](),
        )
        if behind is not None:
            function = activation_behind(graph, behind.first.node.outputs[0])
            share = np.sum(
                [
                    squares * reader.share
                    for reader, squares in _by_channel(behind, known)
                ],
                axis=0,
            )
            matter = share * _gain(function, layer.computed)
            gated = (
                _gated(function, layer.computed, share, matter) if behind.gates else ()
            )
        read = (
            layer.rounded
            * np.einsum("go,goi->gi", matter.reshape(shape), layer.square).ravel()
        )
        terms.append(
            Term(
                source=sources[name],
                target=np.arange(place.start, place.stop)
                if place
                else np.zeros(matter.size, np.intp),
                peak=layer.peak,
                energy=layer.taps * layer.energy.reshape(shape[0], -1),
                matter=matter.reshape(shape),
                spreads=(Spread(layer.low, layer.high, read), *gated),
            ),
        )
    return terms


def _gain(function: Activation, x: Doubles) -> Doubles:
    """What becomes of the variance of little noise in each channel on its way through the
    activation.
    """
    gain: Doubles = np.square(np.broadcast_to(function.derivative(x), x.shape)).mean(
        axis=0,
    )
    return gain


def _gated(
    function: Activation,
    x: Doubles,
    share: Doubles,
    matter: Doubles,
) -> tuple[Spread, ...]:
    """Of x * gate(x), x is rounded, too, and so are the factors that the gate's input is multiplied
    by.

    Args:
        share: what the variance of a channel's noise behind the activation counts.
        matter: the same in front of it.
    """
    low, high = np.maximum(-x.min(axis=0), 0), np.maximum(x.max(axis=0), 0)
    by_gate = np.square(x * function.derivative(x) - function.value(x)).mean(
        axis=0,
    )  # x^2 gate'(x)
    zero, one = np.zeros(share.size), np.ones(share.size)
    return (
        Spread(low, high, matter, outputs=True),
        Spread(zero, one, share * by_gate, outputs=True, inverse=True),
    )
