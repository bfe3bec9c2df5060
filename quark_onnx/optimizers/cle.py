"""CLE: cross-layer equalization of weights.

Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization and Bias Correction", section
4.1. The factor sqrt(a / b), with a and b the greatest weights of a channel in the layer before and
the layers after, makes both equal, so that a per-tensor scale serves all channels of a weight. It
may spread the channels of the activations between the layers; with data, factors minimize the
total noise of weights and activations instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

import numpy as np

from quark_onnx.common.errors import ConfigError
from quark_onnx.config.checks import require
from quark_onnx.graph import Graph
from quark_onnx.kernels.noise import EIGHT_BITS, Rounding
from quark_onnx.optimizers.balance import Balance, balance
from quark_onnx.optimizers.base import (
    FloatOptimizer,
    Rewrites,
    Samples,
    register,
    require_flag,
    require_number,
    require_whole,
)
from quark_onnx.patterns.channel_pairs import (
    ChannelPair,
    ChannelReader,
    Doubles,
    Passed,
    divide_result,
    layers_of,
    pairs_of,
    upper_bound,
)
from quark_onnx.patterns.depthwise import is_depthwise
from quark_onnx.patterns.runtime import estimated_runtime, unfused_runtime

#: Values of the settings that are words.
_CHOICES = {
    "silu": ("auto", "keep", "scale", "after"),
    "passing": ("all", "depthwise"),
    "relu6": ("auto", "keep", "bound", "replace"),
}
#: A rewrite with a greater estimated slowdown of the quantized model is only tried on request
#: (MobileNetV2 with relu6=bound: twice the runtime).
_MOST_SLOWDOWN = 0.5
#: Sweeps end when all factors are within this distance of 1, or after the greatest number.
_CONVERGED = 1e-3
_MOST_SWEEPS = 100
#: Limit of factors, which would exceed float32 for no gain.
_GREATEST_FACTOR = 1e4


@register
@dataclass(frozen=True)
class CLE(FloatOptimizer):
    """Cross-layer equalization of the float model.

    The function stays the same, unless ``relu6`` is "replace".

    Attributes:
        sweeps: number of equalizations of all pairs by weights alone; 0 until convergence.
        relu6: handling of a Clip between 0 and an upper bound, which does not commute with factors.
            "keep" leaves it and the layers around it alone; "bound" replaces it by a Relu and a Min
            with a bound per channel, which computes the same, and which runtimes do not fuse into
            the layer before it; "replace" replaces it by a Relu, which does not. "auto" tries
            "bound" if its estimated cost is less than half the runtime, and keeps it if the error
            on held-out samples falls by enough.
        silu: handling of x * sigmoid(x), written as two nodes. "keep" leaves it and the layers
            around it alone; "scale" inserts a factor per channel before the Sigmoid, which computes
            the same: a depthwise Conv where weights have a scale per channel, otherwise a Mul.
            "after" inserts a Mul after the product instead, which OpenVINO computes with the layer
            before the gate; gates after other operators stay.
            "auto" tries "after" for such an engine, and "scale" under the same conditions.
        activations: choose the factors by the rounding of activations, too; without data, and if
            False, weights alone choose them, as in the paper.
        passing: the clips and gates that factors pass, each for an operator more: "all", or those
            with a "depthwise" convolution among the readers, which gain most.
        least_noise: the least fall of the modelled noise-to-signal ratio, summed over the layers,
            for which clips and gates of a pair are passed. Needs data.
        least_gain: the least gain of the output SQNR on held-out samples, in dB, for which the
            rewrite is kept. Above 0, nothing is tried where every output has 40 dB already.
    """

    name: ClassVar[str] = "cle"

    sweeps: int = 0
    relu6: str = "auto"
    silu: str = "auto"
    activations: bool = True
    passing: str = "all"
    least_noise: float = 0.0
    least_gain: float = 0.0

    def __post_init__(self) -> None:
        for setting, choices in _CHOICES.items():
            value = getattr(self, setting)
            wanted = f"one of {', '.join(choices)}"
            require(value in choices, f"{setting} of cle", value, wanted)
        require_whole(self, "sweeps", least=0)
        require_flag(self, "activations")
        require_number(self, "least_gain", least=0.0)
        require_number(self, "least_noise", least=0.0)
        # With data, one descent finds all factors, and no sweep remains.
        if self.sweeps and self.activations:
            raise ConfigError(
                f"sweeps of cle is {self.sweeps}, and activations is true; only weights"
                " alone are equalized in sweeps: add activations=false",
            )

    @property
    def exact(self) -> bool:
        """Whether the function of the model stays unchanged."""
        return self.relu6 != "replace"

    @property
    def reads_data(self) -> bool:
        """Whether the optimizer can use samples."""
        return self.activations

    def variants(self, graph: Graph, *, fused: bool = False) -> list[tuple[CLE, float]]:
        """Return settings to try in place of "auto", each with its estimated slowdown.

        A slowdown of 0.2 is a quantized model that runs 20 % longer. The settings with the most
        pairs of layers come first, those that keep all operators as they are last.

        Args:
            graph: the graph.
            fused: the engine computes an activation function with the layer before it.
        """
        # Nothing to choose: the optimizer itself is the only variant.
        if "auto" not in (self.relu6, self.silu):
            return [(self, 0.0)]
        clips = ["bound", "keep"] if self.relu6 == "auto" else [self.relu6]
        scaled = "after" if fused else "scale"
        gates = [scaled, "keep"] if self.silu == "auto" else [self.silu]
        # The widest choice; what no pair has then need not be tried.
        widest = replace(self, silu=gates[0])
        pairs = widest._pairs(graph, Passed("bound" in clips, gates[0] != "keep"))
        if self.relu6 == "auto" and not any(pair.clips for pair in pairs):
            clips = ["keep"]
        if self.silu == "auto" and not any(pair.gates for pair in pairs):
            gates = ["keep"]
        # what the user asks for has no price
        free = self._added_to(self._pairs(graph, self._passed))
        runtime = estimated_runtime(graph)
        variants = list[tuple[CLE, float]]()
        # The order of the product is from the greatest change to the least.
        for relu6, silu in product(clips, gates):
            variant = replace(self, relu6=relu6, silu=silu)
            pairs = variant._pairs(graph, variant._passed)
            added = sorted(variant._added_to(pairs) - free)
            # Without added operators the runtime stays.
            slowdown = unfused_runtime(graph, added) / runtime if added else 0.0
            if slowdown <= _MOST_SLOWDOWN:
                variants.append((variant, slowdown))
        return variants

    def _pairs(self, graph: Graph, passed: Passed) -> list[ChannelPair]:
        """Return the pairs to equalize if factors pass clips and gates."""
        pairs = pairs_of(graph, passed)
        if self.silu == "after":
            # Elsewhere the engine would compute the factor as an operator of its own.
            pairs = [
                pair for pair in pairs if not pair.gates or pair.gated_product(graph)
            ]
        if self.passing == "all":
            return pairs
        return [
            pair
            for pair in pairs
            if not self._added_to([pair]) or _reads_depthwise(graph, pair)
        ]

    def _added_to(self, pairs: list[ChannelPair]) -> set[str]:
        """Return the tensors that get an operator of their own where factors pass."""
        passed = [each for pair in pairs for each in pair.clips]
        # The engine computes a factor after the function with the layer before it.
        if self.silu != "after":
            passed += [each for pair in pairs for each in pair.gates]
        return {node.inputs[0] for node, _ in passed}

    def _small_gains(self, balanced: Balance) -> list[int]:
        """Return the pairs whose added operators bring less than a fall of the noise, by index."""
        if not self.least_noise:
            return []
        return [
            index
            for index, pair in enumerate(balanced.pairs)
            if self._added_to([pair]) and balanced.gain(index) < self.least_noise
        ]

    def _share_of_runtime(
        self, graph: Graph, pairs: list[ChannelPair], left_out: list[int]
    ) -> float:
        """Return the share of the added operators' runtime that remains without some pairs."""
        runtime = unfused_runtime(graph, sorted(self._added_to(pairs)))
        dropped = self._added_to([pairs[index] for index in left_out])
        return 1 - unfused_runtime(graph, sorted(dropped)) / runtime if runtime else 1.0

    @property
    def _passed(self) -> Passed:
        """The activation functions that the settings let factors pass; none for "auto"."""
        return Passed(self.relu6 == "bound", self.silu in ("scale", "after"))

    def __call__(
        self,
        graph: Graph,
        samples: Samples = (),
        rounding: Rounding = EIGHT_BITS,
    ) -> Rewrites:
        """Equalize in place; return the number of pairs of layers.

        Settings that are "auto" become the first of ``variants``; who calls this may judge them.

        Raises:
            DataError: a sample does not fit or cannot be run.
        """
        if "auto" in (self.relu6, self.silu):
            return self.variants(graph)[0][0](graph, samples, rounding)
        if self.relu6 == "replace":
            # Before pairs are looked for, as factors pass a Relu.
            _replace_clips(graph)
        pairs = self._pairs(graph, self._passed)
        if self.activations and not (rounding.weight or rounding.activation):
            return Rewrites(
                0,
                ["nothing is rounded to integers, whose noise factors could lessen"],
            )
        if not pairs:
            return Rewrites(0)
        if self.activations and len(samples):
            balanced = balance(graph, pairs, samples, rounding)
            small = self._small_gains(balanced)
            if small:
                # Without a new descent: the other factors stay near their optimum.
                balanced = balanced.without(small)
            share = self._share_of_runtime(graph, balanced.pairs, small)
            note = (
                f"modelled noise of the layers {balanced.before:.3g} before,"
                f" {balanced.after:.3g} after"
            )
            count = self._apply(graph, balanced.pairs, balanced.factors, rounding)
            return Rewrites(count, [note], share)
        count = self._apply(graph, pairs, self._equalized(graph, pairs), rounding)
        if not self.activations:
            return Rewrites(count)
        note = "without calibration data weights alone chose the factors"
        return Rewrites(count, [note])

    def _equalized(self, graph: Graph, pairs: list[ChannelPair]) -> list[Doubles]:
        """Return the factors of each pair for equal weights, (channels,).

        The pairs are equalized in their order in every sweep. The graph is not changed.
        """
        # Scaled in memory for all sweeps; the graph is changed once, at the end.
        weights = {
            name: layer.weight(graph) for name, layer in layers_of(pairs).items()
        }
        total = [np.ones(pair.channels) for pair in pairs]
        for _ in range(self.sweeps or _MOST_SWEEPS):
            greatest_change = 0.0
            for index, pair in enumerate(pairs):
                factor = _equalize(pair, weights)
                total[index] = total[index] * factor
                # A factor of 2 and one of 1/2 are equal changes.
                change = float(np.abs(np.log(factor)).max())
                greatest_change = max(greatest_change, change)
            if greatest_change < _CONVERGED:
                break
        return total

    def _apply(
        self,
        graph: Graph,
        pairs: list[ChannelPair],
        factors: list[Doubles],
        rounding: Rounding,
    ) -> int:
        """Apply factors to the graph; return the number of changed pairs.

        Args:
            factors: the factors of each pair, (channels,).
            rounding: rounding of the weights, which decides how gates are corrected.
        """
        changed = [
            (pair, factor)
            for pair, factor in zip(pairs, factors, strict=True)
            if (factor != 1).any()
        ]
        # A layer may be the first of one pair and a reader of another: its weight is stored once.
        layers = layers_of([pair for pair, _ in changed])
        weights = {name: layer.weight(graph) for name, layer in layers.items()}
        # A quantized weight with one value per scale has that value exactly.
        exact_layers = rounding.per_channel and bool(rounding.weight)
        for pair, factor in changed:
            product = pair.gated_product(graph) if self.silu == "after" else None
            if product is not None:
                pair.scale_readers(weights, factor)
                divide_result(graph, product, factor)
                continue
            pair.scale_weights(weights, factor)
            pair.rescale_rest(graph, factor, gates_by_layers=exact_layers)
        for name, layer in layers.items():
            layer.set_weight(graph, weights[name], "equalized")
        return len(changed)


def _replace_clips(graph: Graph) -> None:
    """Replace each Clip with lower bound zero by a Relu."""
    clips = [node for node in graph.nodes if upper_bound(graph, node) is not None]
    for node in clips:
        graph.remove([node])
        graph.add("Relu", [node.inputs[0]], [node.outputs[0]], name=node.name)


def _reads_depthwise(graph: Graph, pair: ChannelPair) -> bool:
    """Return whether a depthwise convolution reads the channels of a pair."""
    return any(is_depthwise(graph, reader.layer.node) for reader in pair.readers)


def _equalize(pair: ChannelPair, weights: dict[str, Doubles]) -> Doubles:
    """Equalize the weights of a pair, and return the factors of its channels.

    Args:
        weights: weights by the name of the layer; changed in place.

    Returns:
        The factors sqrt(before / after), (channels,).
    """
    weight = weights[pair.first.node.name]
    # (channels,): outputs come first in the layout of a weight.
    before = np.abs(weight).reshape(pair.channels, -1).max(axis=1)
    reaches = [_reach(reader, weights, pair.channels) for reader in pair.readers]
    after = np.max(reaches, axis=0)
    alive = (before > 0) & (after > 0)
    # Channels without weights on one side keep the factor 1; 1 also avoids divisions by zero.
    ratio = np.where(alive, before, 1) / np.where(alive, after, 1)
    factor = np.where(alive, np.sqrt(ratio), 1.0)
    factor = factor.clip(1 / _GREATEST_FACTOR, _GREATEST_FACTOR)
    pair.scale_weights(weights, factor)
    return factor


def _reach(
    reader: ChannelReader, weights: dict[str, Doubles], channels: int
) -> Doubles:
    """Return the greatest absolute weight that reads each channel, (channels,).

    Args:
        weights: weights by the name of the layer, (groups, outputs, inputs, kernel...).
    """
    # (groups, inputs, outputs, kernel), so that rows are input channels.
    moved = np.moveaxis(np.abs(weights[reader.layer.node.name]), 2, 1)
    rows = moved.reshape(moved.shape[0] * moved.shape[1], -1).max(axis=1)
    repeated = rows[reader.span(channels)].reshape(channels, reader.repeat)
    greatest: Doubles = repeated.max(axis=1)
    return greatest
