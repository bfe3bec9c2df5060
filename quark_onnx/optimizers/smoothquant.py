"""SmoothQuant: move outliers from activations into weights.

Xiao et al. 2023, "Accurate and Efficient Post-Training Quantization for Large Language Models". The
input of a layer has a per-tensor scale, and a few outlier channels take most of its range. They are
divided by factors that the weight, with per-channel scales, is multiplied by; the division is
folded into the constants that compute the tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

import calibrators
from calibrators.base import is_number
from calibrators.extremes import Extremes
from calibrators.onnx_runtime.control_flow import Observation
from calibrators.sampled import Sampled
from calibrators.sampled import Samples as Sampling
from quark_onnx.config.checks import require
from quark_onnx.graph import Graph
from quark_onnx.graph.constant_input import private
from quark_onnx.kernels.noise import EIGHT_BITS, Rounding
from quark_onnx.optimizers.base import (
    FloatOptimizer,
    Rewrites,
    Samples,
    register,
    require_flag,
    watch,
)
from quark_onnx.patterns.foldable_scales import Fold, absorb
from quark_onnx.patterns.linear import Floats, Linear, readers_of, sources

#: Candidates of "auto".
# Rounded, because 0.05 * 3 is 0.15000000000000002.
_ALPHAS = tuple(round(0.05 * step, 2) for step in range(21))
#: Limit of factors around their geometric mean, which would exceed float32 for no gain.
_GREATEST_FACTOR = 1e4
_FLOAT = "it makes channels alike before they are rounded"


@register
@dataclass(frozen=True)
class SmoothQuant(FloatOptimizer):
    """Moves outliers from activations into the weights of MatMul and Gemm.

    The float model computes the same.

    Attributes:
        alpha: share of the activations' range that moves into the weights, from 0 to 1; "auto"
            searches it per tensor, by the error of the layers' results.
        insert: insert a Mul where no constant before a layer can take the factors.
    """

    name: ClassVar[str] = "smoothquant"
    needs_data: ClassVar[bool] = True

    alpha: float | str = "auto"
    insert: bool = False

    def __post_init__(self) -> None:
        alpha: Any = self.alpha
        is_share = is_number(alpha) and 0 <= alpha <= 1
        wanted = "a number from 0 to 1, or 'auto'"
        require(is_share or alpha == "auto", "alpha of smoothquant", alpha, wanted)
        require_flag(self, "insert")

    def __call__(
        self,
        graph: Graph,
        samples: Samples = (),
        rounding: Rounding = EIGHT_BITS,
    ) -> Rewrites:
        """Smooth in place; return the number of tensors.

        Raises:
            DataError: a sample does not fit or cannot be run.
        """
        candidates = [_group(graph, tensor) for tensor in sources(graph)]
        groups = [group for group in candidates if group is not None]
        reachable = [
            group
            for group in groups
            if self.insert or group.absorbed(graph) is not None
        ]
        if not reachable or not len(samples):
            return Rewrites(0, _notes(len(groups) - len(reachable)))
        # Only the search reads sampled vectors.
        statistics = _observe(graph, reachable, samples, vectors=self.alpha == "auto")
        count = 0
        for group, statistic in zip(reachable, statistics, strict=True):
            count += self._smooth(graph, group, statistic, rounding)
        return Rewrites(count, _notes(len(groups) - len(reachable)))

    def _smooth(
        self, graph: Graph, group: _Group, seen: Extremes, rounding: Rounding
    ) -> bool:
        """Rewrite a group; return whether the graph was changed.

        Args:
            seen: extremes of each channel, with vectors if alpha is searched.
        """
        # The tensor was empty, of other channels, or not finite: its outliers are unknown.
        if seen.lo.size != group.size or seen.nonfinite:
            return False
        largest = np.maximum(np.abs(seen.lo), np.abs(seen.hi))
        weights = [layer.matrix(graph) for layer in group.layers]
        # Layers that read one tensor share its factors, so that the greatest weight decides.
        reach = np.max([np.abs(weight).max(axis=1) for weight in weights], axis=0)
        if isinstance(seen, Sampled):
            factor = _search(seen, largest, reach, weights, rounding)
        else:
            assert not isinstance(self.alpha, str)
            factor = factors(largest, reach, self.alpha)
        # All factors are equal, and cancel in the scales.
        if np.ptp(factor) == 0:
            return False
        # The graph stores float32: divide by the value that the weights are multiplied by.
        factor = factor.astype(np.float32).astype(np.float64)
        key = f"smooth_{group.tensor}"
        # Asked again, because an earlier group may have changed the constants.
        folds = group.absorbed(graph)
        for fold in folds or ():
            fold.apply(graph, key, 1 / factor)
        if folds is None:
            group.insert(graph, 1 / factor)
        for layer in group.layers:
            layer.weight[0].scale(graph, key, factor)
        return True


@dataclass(frozen=True)
class _Group:
    """A tensor with the readers, layers with shared factors."""

    tensor: str
    layers: tuple[Linear, ...]
    alone: bool

    @property
    def size(self) -> int:
        """Number of channels."""
        return self.layers[0].inputs

    def absorbed(self, graph: Graph) -> list[Fold] | None:
        """Return the constants for folding the division; None if impossible."""
        # With further readers, the division would change what they read.
        if self.alone:
            return absorb(graph, self.tensor, self.size, len(self.layers))
        return None

    def insert(self, graph: Graph, by: Floats) -> None:
        """Insert a Mul before the layers."""
        name = graph.add_constant(f"{self.tensor}_smooth", by.astype(np.float32))
        smoothed = graph.fresh(f"{self.tensor}_smoothed")
        graph.add("Mul", [self.tensor, name], [smoothed]).stay_float(_FLOAT)
        for layer in self.layers:
            graph.set_input(layer.node, 0, smoothed)


def _group(graph: Graph, tensor: str) -> _Group | None:
    """Return the readers of a tensor as a group.

    None without layers, or if one of them shares its weight with another layer.
    """
    layers, others = readers_of(graph, tensor)
    nodes = {layer.node for layer in layers}
    if not layers:
        return None
    for layer in layers:
        # A shared weight would be multiplied for the other layer, too.
        if set(graph.consumers(layer.node.input(1))) - nodes:
            return None
    return _Group(tensor, tuple(layers), alone=not others and private(graph, tensor))


def _notes(count: int) -> list[str]:
    if not count:
        return []
    what = "tensors have" if count > 1 else "tensor has"
    note = (
        f"{count} {what} nothing in front to fold factors into; insert=true"
        " puts a Mul there"
    )
    return [note]


def _observe(
    graph: Graph, groups: list[_Group], samples: Samples, *, vectors: bool
) -> list[Extremes]:
    """Return extremes per channel in one pass over the data, with ``vectors`` as a sample."""
    # Both statistics have the extremes of all data.
    wanted = Sampling() if vectors else calibrators.MinMax()
    observations = [Observation(group.tensor, wanted, axis=-1) for group in groups]
    statistics = watch(graph, observations, samples)
    return [statistic for statistic in statistics if isinstance(statistic, Extremes)]


def factors(largest: Floats, reach: Floats, alpha: float) -> Floats:
    """Return the factors by which activations are divided and weights multiplied (eq. 4).

    A channel that is dead, or has no weights, gets 1. The geometric mean of the others is 1, as a
    common factor has no effect.

    Args:
        largest: greatest absolute value of each channel.
        reach: greatest absolute weight of each channel.
        alpha: share of the activations' range that moves into the weights.

    >>> factors(np.array([8.0, 2.0, 0.0]), np.array([0.5, 0.5, 0.5]), 0.5)
    array([1.41421356, 0.70710678, 1.        ])
    """
    alive = (largest > 0) & (reach > 0)
    if not alive.any():
        return np.ones(largest.size)
    # In logarithms, as powers of channel ranges of 1e30 and more overflow.
    logarithm = alpha * np.log(largest[alive]) - (1 - alpha) * np.log(reach[alive])
    result = np.ones(largest.size)
    limit = np.log(_GREATEST_FACTOR)
    result[alive] = np.exp((logarithm - logarithm.mean()).clip(-limit, limit))
    return result


def _search(
    seen: Sampled,
    largest: Floats,
    reach: Floats,
    weights: list[Floats],
    rounding: Rounding,
) -> Floats:
    """Return the factors with the least error of the products of sampled vectors.

    Activations are rounded with a per-tensor scale and, unless symmetric, a zero point; weights
    with per-tensor or per-channel scales. No factors are a candidate, too.

    Args:
        seen: extremes of all data, and sampled vectors, (vectors, channels).
        largest: greatest absolute value of each channel, (channels,).
        reach: greatest absolute weight of each channel, (channels,).
        weights: the weights of the readers, (channels, outputs).
    """
    # (vectors, channels); weights are (channels, outputs), joined along the outputs.
    x = seen.vectors.astype(np.float64)
    # A single NaN would make all candidates equally bad.
    x = x[np.isfinite(x).all(axis=1)]
    exact = x @ np.concatenate(weights, axis=1)
    best = np.ones(largest.size)
    least = np.inf
    for candidate in (best, *(factors(largest, reach, alpha) for alpha in _ALPHAS)):
        # The range comes from all data, not from the sampled vectors, which miss the outliers.
        # Ranges contain 0, as those of calibration do.
        low = min(0.0, (seen.lo / candidate).min())
        high = max(0.0, (seen.hi / candidate).max())
        if rounding.symmetric:
            low, high = -max(-low, high), max(-low, high)
        quantized = _rounded(x / candidate, low, high, rounding.activation)
        rounded = [
            _symmetric(weight * candidate[:, None], rounding) for weight in weights
        ]
        products = quantized @ np.concatenate(rounded, axis=1)
        error = float(np.square(products - exact).sum())
        if error < least:
            best = candidate
            least = error
    return best


def _rounded(values: Floats, low: float, high: float, steps: int) -> Floats:
    """Round activations with one scale and a zero point.

    Args:
        low: lower end of the range, 0 or less.
        high: upper end of the range, 0 or more.
        steps: steps from end to end; 0 leaves the values unchanged.
    """
    if not steps:
        return values
    # A range of 0 has no scale; 1 rounds zeros to zeros.
    scale = (high - low) / steps or 1.0
    zero = np.rint(-low / scale)
    codes: Floats = (np.rint(values / scale) + zero).clip(0, steps) - zero
    return codes * scale


def _symmetric(weight: Floats, rounding: Rounding) -> Floats:
    """Round a weight (channels, outputs) with symmetric scales, per output or per tensor."""
    if not rounding.weight:
        return weight
    # (outputs,) or a single number; codes reach half of the steps to both sides.
    largest = np.abs(weight).max(axis=0 if rounding.per_channel else None)
    scale = np.where(largest > 0, largest, 1.0) / (rounding.weight // 2)
    rounded: Floats = np.rint(weight / scale) * scale
    return rounded
