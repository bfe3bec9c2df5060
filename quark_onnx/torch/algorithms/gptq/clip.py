"""Clip: narrow the ranges of weights where the clipping error is less than the rounding error it
saves.

The second half of AWQ (Lin et al. 2023, "Activation-aware Weight Quantization").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from quark_onnx.optimizers.base import require_number, require_whole
from quark_onnx.registry import ALGORITHMS
from quark_onnx.torch.algorithms.base import UNREACHED, BlockJob, Outcome
from quark_onnx.torch.algorithms.gptq.hessian import Gram, grams_of
from quark_onnx.torch.algorithms.gptq.losses import Loss, better, squares_of
from quark_onnx.torch.algorithms.gptq.range_search import fitted, has_ranges
from quark_onnx.torch.algorithms.scheduling.stages import Stage, stages_in
from quark_onnx.torch.formats.quantized_tensor import Quantized
from quark_onnx.torch.models.quantized_layer import kind_of


@ALGORITHMS.register("clip")
@dataclass(frozen=True)
class Clip:
    """Chooses the range of each row or group of a weight, by the error that rounding to the nearest
    then causes.

    Both ends are tried together, then one by one where they need not be alike. Only formats with
    scales, for rows or groups, have such ranges; no row is worse than it was.

    Attributes:
        steps: how many ranges are tried in a pass, beside the whole one.
        shrink: the share of the range that is left of the narrowest.
    """

    name: ClassVar[str] = "clip"
    stage: ClassVar[str] = "weights"
    aims_at_float: ClassVar[bool] = False
    rounds_activations: ClassVar[bool] = True
    needs_data: ClassVar[bool] = True

    steps: int = 20
    shrink: float = 0.5

    def __post_init__(self) -> None:
        require_whole(self, "steps")
        require_number(self, "shrink", least=0.01, most=0.99)

    def __call__(
        self,
        job: BlockJob,
        made: Mapping[str, Quantized],
    ) -> tuple[dict[str, Quantized], list[Outcome]]:
        """Choose ranges of the layers that the data reaches."""
        weights = {
            name: weight.float()
            for name, weight, spec in job.weights()
            if spec.weight
            and has_ranges(spec.weight)
            and kind_of(job.layers[name][0]) in ("Linear", "Conv1D")
        }
        result = dict(made)
        outcomes = list[Outcome]()
        if not weights or not job.calls:
            return result, outcomes
        stages = stages_in(job, weights)
        whole = Stage(
            tuple(group for stage in stages for group in stage.groups),
            stages[-1].last,
        )
        grams = grams_of(job, whole, {}, exact=False)
        for group in whole.groups:
            for name in group:
                outcomes.append(
                    self._layer(name, weights[name], grams[group[0]], result),
                )
        return result, outcomes

    def _layer(
        self,
        name: str,
        weight: Any,
        gram: Gram,
        result: dict[str, Quantized],
    ) -> Outcome:
        if gram.own is None:
            return Outcome(name, self.name, 0.0, 0.0, UNREACHED)
        loss = Loss(weight, squares_of(gram.own))
        shares = tuple(
            1 - step * (1 - self.shrink) / self.steps for step in range(self.steps + 1)
        )
        start = result[name]
        plain = loss(start)
        found = fitted(weight, start, gram.own, shares, apart=True)
        result[name], error = better(start, plain, found, loss(found))
        power = float(loss.power()) or 1.0
        return Outcome(
            name,
            self.name,
            float(plain.sum()) / power,
            float(error.sum()) / power,
        )
