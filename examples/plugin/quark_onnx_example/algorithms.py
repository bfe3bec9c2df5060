"""Shrink: smaller scales for integer weights of language models, where that lowers the error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from quark_onnx.common.registry import ALGORITHMS
from quark_onnx.dtypes import Integer
from quark_onnx.optimizers.base import require_whole
from quark_onnx.torch.algorithms.base import BlockJob, Outcome
from quark_onnx.torch.formats.affine import Params
from quark_onnx.torch.formats.quantized_tensor import Quantized, quantize


@ALGORITHMS.register("shrink")
@dataclass(frozen=True)
class Shrink:
    """Tries smaller scales for each weight, all by the same factor, and keeps the best.

    Attributes:
        steps: how many factors are tried, each 1 % below the one before.
    """

    name: ClassVar[str] = "shrink"
    stage: ClassVar[str] = "weights"
    aims_at_float: ClassVar[bool] = False
    rounds_activations: ClassVar[bool] = False
    needs_data: ClassVar[bool] = False

    steps: int = 20

    def __post_init__(self) -> None:
        require_whole(self, "steps")

    def __call__(
        self,
        job: BlockJob,
        made: Mapping[str, Quantized],
    ) -> tuple[dict[str, Quantized], list[Outcome]]:
        """Choose scales of the layers with integer weights; other layers keep their codes."""
        result = dict(made)
        outcomes: list[Outcome] = []
        for name, weight, spec in job.weights():
            if spec.weight is None or not isinstance(spec.weight.dtype, Integer):
                continue
            before = relative_error(weight, result[name])
            for step in range(1, self.steps + 1):
                start = made[name]
                params = Params(start.scale * (1 - step / 100), start.zero)
                found = quantize(weight, start.spec, name, params)
                if relative_error(weight, found) < relative_error(weight, result[name]):
                    result[name] = found
            after = relative_error(weight, result[name])
            outcomes.append(Outcome(name, self.name, before, after))
        return result, outcomes


def relative_error(weight: torch.Tensor, quantized: Quantized) -> float:
    """Return the mean squared error of a weight, as a share of its mean square."""
    reference = weight.float()
    error = quantized.dequantize(torch.float32) - reference
    return float(error.square().sum() / reference.square().sum().clamp_min(1e-30))
