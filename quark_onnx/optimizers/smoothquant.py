"""SmoothQuant (Xiao et al.

2023, "Accurate and Efficient Post-Training Quantization for Large Language Models").

What a layer reads has one scale for all channels, and a few channels that are much larger than the
others take most of it. They are divided by factors that the weight is multiplied by, which has a
scale for each output; the division is folded into the constants that the tensor is computed with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

import calibrators
from calibrators.base import is_number
from calibrators.extremes import Extremes
from calibrators.onnx_runtime.control_flow import Observation
from calibrators.sampled import Sampled
from calibrators.sampled import Samples as Sampling
from quark_onnx.errors import ConfigError
from quark_onnx.graph import Graph
from quark_onnx.graph.constant_input import private
from quark_onnx.kernels.noise import EIGHT_BITS, Rounding
from quark_onnx.optimizers.base import Rewrites, Samples, register, require_flag, watch
from quark_onnx.patterns.foldable_scales import Fold, absorb
from quark_onnx.patterns.linear import Floats, Linear, readers_of, sources

#: What "auto" chooses from.
_ALPHAS = tuple(round(0.05 * step, 2) for step in range(21))
#: Factors beyond this, around their geometric mean, would leave float32 for nothing.
_GREATEST_FACTOR = 1e4
_FLOAT = "it makes channels alike before they are rounded"


@register
@dataclass(frozen=True)
class SmoothQuant:
    """Moves outliers from activations into the weights of MatMul and Gemm.

    The float model computes the same.

    Attributes:
        alpha: how much of the activations' range moves into the weights, from 0 to 1; "auto"
            searches it for each tensor, by the error of what is computed from it.
        insert: where nothing in front of a layer can take the factors in, put a Mul there.
    """

    name: ClassVar[str] = "smoothquant"
    stage: ClassVar[str] = "float"
    judged: ClassVar[bool] = True
    needs_data: ClassVar[bool] = True
    reads_data: ClassVar[bool] = True
    exact: ClassVar[bool] = True

    alpha: float | str = "auto"
    insert: bool = False

    def __post_init__(self) -> None:
        number = (
            is_number(self.alpha)
            and isinstance(self.alpha, int | float)
            and 0 <= self.alpha <= 1
        )
        if not number and self.alpha != "auto":
            raise ConfigError(
                f"alpha of smoothquant is {self.alpha!r}; it must be a number from 0 to"
                " 1, or 'auto'",
            )
        require_flag(self, "insert")

    def __call__(
        self,
        graph: Graph,
        samples: Samples = (),
        rounding: Rounding = EIGHT_BITS,
    ) -> Rewrites:
        """Smooth in place; how many tensors.

        Raises:
            DataError: a sample that does not fit or cannot be run.
        """
        groups = [
            group
            for tensor in sources(graph)
            if (group := _group(graph, tensor)) is not None
        ]
        reachable = [
            group
            for group in groups
            if self.insert or group.absorbed(graph) is not None
        ]
        if not reachable or not len(samples):
            return Rewrites(0, _left(len(groups) - len(reachable)))
        seen = _observe(graph, reachable, samples, vectors=self.alpha == "auto")
        count = sum(
            self._smooth(graph, group, found, rounding)
            for group, found in zip(reachable, seen, strict=True)
        )
        return Rewrites(count, _left(len(groups) - len(reachable)))

    def _smooth(
        self,
        graph: Graph,
        group: _Group,
        seen: Extremes,
        rounding: Rounding,
    ) -> bool:
        """Whether a group was rewritten."""
        if seen.lo.size != group.size or seen.nonfinite:
            return False
        largest = np.maximum(np.abs(seen.lo), np.abs(seen.hi))
        weights = [layer.matrix(graph) for layer in group.layers]
        reach = np.max([np.abs(weight).max(axis=1) for weight in weights], axis=0)
        if isinstance(seen, Sampled):
            factor = _search(seen, largest, reach, weights, rounding)
        else:
            assert not isinstance(self.alpha, str)
            factor = factors(largest, reach, self.alpha)
        if np.ptp(factor) == 0:
            return False
        factor = factor.astype(np.float32).astype(np.float64)
        key = f"smooth_{group.tensor}"
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
    """A tensor, and all of the layers that read it; they get the same factors."""

    tensor: str
    layers: tuple[Linear, ...]
    alone: bool

    @property
    def size(self) -> int:
        return self.layers[0].inputs

    def absorbed(self, graph: Graph) -> list[Fold] | None:
        """Where the division is folded into; None if it cannot be."""
        return (
            absorb(graph, self.tensor, self.size, len(self.layers))
            if self.alone
            else None
        )

    def insert(self, graph: Graph, by: Floats) -> None:
        """A Mul in front of the layers."""
        name = graph.add_constant(f"{self.tensor}_smooth", by.astype(np.float32))
        node = graph.add(
            "Mul",
            [self.tensor, name],
            [graph.fresh(f"{self.tensor}_smoothed")],
        )
        node.stay_float(_FLOAT)
        for layer in self.layers:
            graph.set_input(layer.node, 0, node.outputs[0])


def _group(graph: Graph, tensor: str) -> _Group | None:
    """The layers that read a tensor.

    None if one of them shares its weight with a layer elsewhere.
    """
    layers, others = readers_of(graph, tensor)
    nodes = {layer.node for layer in layers}
    if not layers or any(
        set(graph.consumers(layer.node.input(1))) - nodes for layer in layers
    ):
        return None
    return _Group(tensor, tuple(layers), alone=not others and private(graph, tensor))


def _left(count: int) -> list[str]:
    what = "tensors have" if count > 1 else "tensor has"
    return (
        [
            (
                f"{count} {what} nothing in front to fold factors into; insert=true"
                " puts a Mul there"
            ),
        ]
        if count
        else []
    )


def _observe(
    graph: Graph,
    groups: list[_Group],
    samples: Samples,
    *,
    vectors: bool,
) -> list[Extremes]:
    """Extremes of each channel in one pass over the data, and some vectors where they are wanted."""  # noqa: E501
    wanted = Sampling() if vectors else calibrators.MinMax()
    observations = [Observation(group.tensor, wanted, axis=-1) for group in groups]
    found = watch(graph, observations, samples)
    return [statistic for statistic in found if isinstance(statistic, Extremes)]


def factors(largest: Floats, reach: Floats, alpha: float) -> Floats:
    """What each channel of the activations is divided by, and of the weight multiplied by.

    SmoothQuant, eq. 4.

    A channel that is dead, or has no weights, is left alone. The geometric mean of the others is 1,
    as a factor that all channels share changes nothing.

    Args:
        largest: the greatest absolute value of each channel.
        reach: the greatest absolute weight of each channel.

    >>> factors(np.array([8.0, 2.0, 0.0]), np.array([0.5, 0.5, 0.5]), 0.5)
    array([1.41421356, 0.70710678, 1.        ])
    """
    alive = (largest > 0) & (reach > 0)
    if not alive.any():
        return np.ones(largest.size)
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
    """The factors that leave the least error of the products of some vectors, none among them.

    Activations are rounded with one scale and, unless they are symmetric, a zero point; weights
    with a scale for each output, or one for each of them.
    """
    x = seen.vectors.astype(np.float64)
    x = x[np.isfinite(x).all(axis=1)]
    exact, best, least = (
        x @ np.concatenate(weights, axis=1),
        np.ones(largest.size),
        np.inf,
    )
    for candidate in (best, *(factors(largest, reach, alpha) for alpha in _ALPHAS)):
        low, high = (
            min(0.0, (seen.lo / candidate).min()),
            max(0.0, (seen.hi / candidate).max()),
        )
        if rounding.symmetric:
            low, high = -max(-low, high), max(-low, high)
        read = _rounded(x / candidate, low, high, rounding.activation)
        rounded = [
            _symmetric(weight * candidate[:, None], rounding) for weight in weights
        ]
        error = float(np.square(read @ np.concatenate(rounded, axis=1) - exact).sum())
        if error < least:
            best, least = candidate, error
    return best


def _rounded(values: Floats, low: float, high: float, steps: int) -> Floats:
    if not steps:
        return values
    scale = (high - low) / steps or 1.0
    zero = np.rint(-low / scale)
    codes: Floats = (np.rint(values / scale) + zero).clip(0, steps) - zero
    return codes * scale


def _symmetric(weight: Floats, rounding: Rounding) -> Floats:
    if not rounding.weight:
        return weight
    largest = np.abs(weight).max(axis=0 if rounding.per_channel else None)
    scale = np.where(largest > 0, largest, 1.0) / (rounding.weight // 2)
    rounded: Floats = np.rint(weight / scale) * scale
    return rounded
