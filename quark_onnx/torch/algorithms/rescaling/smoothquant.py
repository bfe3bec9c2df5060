"""SmoothQuant for language models.

Xiao et al. 2023, "Accurate and Efficient Post-Training Quantization for LLMs".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from quark_onnx.common.registry import ALGORITHMS
from quark_onnx.dtypes import Scaled
from quark_onnx.optimizers.base import require_number, require_whole
from quark_onnx.torch.algorithms.base import BlockJob, Outcome
from quark_onnx.torch.algorithms.memory import Shapes
from quark_onnx.torch.algorithms.rescaling.activation_stats import KEPT_TOKENS
from quark_onnx.torch.algorithms.rescaling.rescale import (
    Readers,
    TriedScale,
    best_of,
    rescale,
)
from quark_onnx.torch.config.spec import TensorSpec
from quark_onnx.torch.formats import affine
from quark_onnx.torch.formats.quantized_tensor import fake_quantize, quantize
from quark_onnx.torch.runtime.reductions import total


class _Smoothing:
    """Rescaling by the ranges of activations and weights, with the best of some alphas."""

    stage: ClassVar[str] = "block"
    needs_data: ClassVar[bool] = True

    name: ClassVar[str]
    scale_clamp_min: float

    @property
    def _alphas(self) -> Iterable[float]:
        raise NotImplementedError

    def memory(self, shapes: Shapes) -> int:
        """Return the estimated bytes of the tokens on which scales are compared."""
        kept = min(KEPT_TOKENS, shapes.tokens)
        widths = sum(inputs for _, inputs in shapes.groups) // max(1, shapes.blocks)
        # in float32
        return 4 * kept * widths

    def __call__(self, job: BlockJob) -> list[Outcome]:
        """Rescale in place."""
        return rescale(job, self.name, self._choose, products=False)

    def _choose(self, readers: Readers) -> tuple[TriedScale, TriedScale]:
        return _best(readers, self._alphas, self.scale_clamp_min)


@ALGORITHMS.register("smoothquant")
@dataclass(frozen=True)
class SmoothQuant(_Smoothing):
    """Move outliers of activations into weights.

    Channels stay as they are where rescaling increases the output error with rounded activations
    and weights.

    Attributes:
        alpha: the share of the activations' range that moves into weights, 0 to 1.
        scale_clamp_min: the least scale.
    """

    name: ClassVar[str] = "smoothquant"

    alpha: float = 0.5
    scale_clamp_min: float = 1e-3

    def __post_init__(self) -> None:
        require_number(self, "alpha", least=0, most=1)
        require_number(self, "scale_clamp_min", least=1e-30, most=1)

    @property
    def _alphas(self) -> Iterable[float]:
        return [self.alpha]


@ALGORITHMS.register("autosmoothquant")
@dataclass(frozen=True)
class AutoSmoothQuant(_Smoothing):
    """SmoothQuant with the best alpha per pair.

    Attributes:
        steps: alphas that are tried besides 0, evenly spread up to 1.
        scale_clamp_min: the least scale.
    """

    name: ClassVar[str] = "autosmoothquant"

    steps: int = 20
    scale_clamp_min: float = 1e-3

    def __post_init__(self) -> None:
        require_whole(self, "steps")
        require_number(self, "scale_clamp_min", least=1e-30, most=1)

    @property
    def _alphas(self) -> Iterable[float]:
        return (step / self.steps for step in range(self.steps + 1))


def factors(
    largest: torch.Tensor,
    reach: torch.Tensor,
    alpha: float,
    least: float = 1e-3,
) -> torch.Tensor:
    """Return the factors that divide activations and multiply weights, (channels,).

    Equation 4 of SmoothQuant. Channels without activations or weights get the factor 1.

    Args:
        largest: (channels,), the greatest absolute activations.
        reach: (channels,), the greatest absolute weights.
        alpha: the share of the activations' range that moves into weights.
        least: the least factor.

    >>> factors(torch.tensor([8.0, 2.0, 0.0]), torch.tensor([0.5, 0.5, 0.5]), 0.5)
    tensor([4., 2., 1.])
    """
    alive = (largest > 0) & (reach > 0)
    # Clamped first, as a channel without weights divides by 0; it gets the factor 1 below.
    scale = largest.clamp(min=1e-30) ** alpha / reach.clamp(min=1e-30) ** (1 - alpha)
    scale = scale.clamp(least, 1 / least**2)
    return torch.where(alive, scale, torch.ones_like(scale))


def _best(
    readers: Readers, alphas: Iterable[float], least: float
) -> tuple[TriedScale, TriedScale]:
    """Return the trial without factors, and the trial of the best alpha."""
    largest = readers.channel(readers.moments.largest)
    # (inputs,) to (channels,): the greatest weight of any layer that reads the channel.
    reach = readers.channel(torch.cat(readers.weights).abs().amax(0))
    x = readers.moments.tokens
    assert x is not None
    # (tokens, outputs) of each layer, in float.
    exact = [x @ weight.t() for weight in readers.weights]

    def errors(scale: torch.Tensor) -> Iterator[float]:
        products = _products(readers, scale[readers.columns])
        return (
            float(total((rounded - output).square()) / len(x))
            for rounded, output in zip(products, exact, strict=True)
        )

    candidates = (factors(largest, reach, alpha, least) for alpha in alphas)
    return best_of(torch.ones_like(largest), candidates, errors)


def _products(readers: Readers, scale: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the outputs of layers with rounded activations and weights for factors, (inputs,)."""
    moments = readers.moments
    assert moments.tokens is not None
    layers = zip(readers.names, readers.weights, readers.specs, strict=True)
    for name, weight, spec in layers:
        assert spec.weight is not None
        x = moments.tokens / scale
        if spec.input is not None:
            # The range that calibration will find after the division, of all tokens, of which
            # ``tokens`` is a sample.
            x = _rounded(x, moments.lo / scale, moments.hi / scale, spec.input)
        yield x @ quantize(weight * scale, spec.weight, name).dequantize().t()


def _rounded(
    x: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor, spec: TensorSpec
) -> torch.Tensor:
    """Round activations; a calibrated scale follows from the extremes over all tokens."""
    # Dynamic scales follow from the input itself, here as in the quantized model.
    if not spec.measured or not isinstance(spec.dtype, Scaled):
        return fake_quantize(x, spec)
    least, most = min(float(lo.min()), 0.0), max(float(hi.max()), 0.0)
    params = affine.of_numbers(least, most, spec, x.dtype)
    return fake_quantize(x, spec, params.each(lambda tensor: tensor.to(x.device)))
