"""AWQ: rescale channels by activation magnitude.

Lin et al. 2023, "Activation-aware Weight Quantization for LLM Compression and Acceleration".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from quark_onnx.common.registry import ALGORITHMS
from quark_onnx.optimizers.base import require_flag, require_whole
from quark_onnx.torch.algorithms.base import BlockJob, Outcome
from quark_onnx.torch.algorithms.memory import Shapes
from quark_onnx.torch.algorithms.rescaling.rescale import (
    Readers,
    TriedScale,
    best_of,
    centred,
    rescale,
)
from quark_onnx.torch.formats.quantized_tensor import quantize


@ALGORITHMS.register("awq")
@dataclass(frozen=True)
class AWQ:
    """Scale the weights of large inputs up to protect them from rounding, and the inputs down.

    Scales are powers of the mean magnitude of each channel. The exponent is searched for each pair
    by the output error with rounded weights; a pair without improvement keeps its scales. ``Clip``
    is the other half of the paper.

    Attributes:
        steps: exponents that are tried, evenly spread up to 1.
        duo: try each exponent also divided by the mean magnitude of the weights.
        clip: let ``Clip`` follow where no other algorithm chooses codes.
    """

    name: ClassVar[str] = "awq"
    stage: ClassVar[str] = "block"
    needs_data: ClassVar[bool] = True

    steps: int = 20
    duo: bool = False
    clip: bool = True

    def __post_init__(self) -> None:
        require_whole(self, "steps")
        require_flag(self, "duo", "clip")

    @property
    def follower(self) -> str:
        """The algorithm to run next unless another algorithm chooses codes."""
        return "clip" if self.clip else ""

    def memory(self, shapes: Shapes) -> int:
        """Return the estimated bytes of a block's Hessians."""
        return shapes.block_hessians

    def __call__(self, job: BlockJob) -> list[Outcome]:
        """Rescale in place."""
        return rescale(job, self.name, self._choose, products=True)

    def _choose(self, readers: Readers) -> tuple[TriedScale, TriedScale]:
        def errors(scale: torch.Tensor) -> Iterator[float]:
            losses = _losses(readers, scale[readers.columns])
            return (readers.moments.power(loss) for loss in losses)

        ones = torch.ones(readers.channels, device=readers.columns.device)
        return best_of(ones, self._candidates(readers), errors)

    def _candidates(self, readers: Readers) -> Iterator[torch.Tensor]:
        # (channels,): with grouped queries, a channel of v_proj is several inputs of o_proj.
        size = _floored(readers.channel(readers.moments.mean))
        weight = _floored(readers.channel(_mean_share(readers.weights)))
        # The exponent 0 is the trial without scales, which ``best_of`` starts from.
        for step in range(1, self.steps + 1):
            # The paper's s = s_X^alpha, alpha from 0 to 1.
            scale = size ** (step / self.steps)
            yield centred(scale)
            if self.duo:
                yield centred(scale / weight)


def _losses(readers: Readers, scale: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the rounding error of each weight with input scales, (inputs,)."""
    layers = zip(readers.names, readers.weights, readers.specs, strict=True)
    for name, weight, spec in layers:
        assert spec.weight is not None
        # The error in units of the original input: both sides of the product are scaled.
        yield quantize(weight * scale, spec.weight, name).dequantize() / scale - weight


def _floored(size: torch.Tensor) -> torch.Tensor:
    """Raise the magnitudes of dead channels to a small number."""
    # A dead channel would get a scale of 0, by which its input is divided.
    return size.clamp(min=max(1e-4 * float(size.mean()), 1e-12))


def _mean_share(weights: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the mean magnitude of weights relative to the greatest of the output, (inputs,)."""
    # All layers of the pair together: (sum of outputs, inputs), averaged over outputs.
    shares = [
        weight.abs() / weight.abs().amax(1, keepdim=True).clamp(min=1e-12)
        for weight in weights
    ]
    return torch.cat(shares).mean(0)
