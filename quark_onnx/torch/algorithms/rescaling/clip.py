"""Clip: narrow the ranges of weights where clipping costs less than a smaller scale saves.

The second half of AWQ (Lin et al. 2023, "Activation-aware Weight Quantization").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from quark_onnx.common.registry import ALGORITHMS
from quark_onnx.optimizers.base import require_number, require_whole
from quark_onnx.torch.algorithms.base import UNREACHED, BlockJob, Chosen, Outcome
from quark_onnx.torch.algorithms.gptq.hessian import HessianStats, collect_hessians
from quark_onnx.torch.algorithms.memory import Shapes
from quark_onnx.torch.algorithms.scheduling.stages import Stage, stages_in
from quark_onnx.torch.algorithms.weight_rounding.losses import Loss, better, squares_of
from quark_onnx.torch.algorithms.weight_rounding.range_search import (
    fitted,
    has_ranges,
)
from quark_onnx.torch.formats.quantized_tensor import Quantized
from quark_onnx.torch.models.quantized_layer import kind_of

if TYPE_CHECKING:
    import torch


@ALGORITHMS.register("clip")
@dataclass(frozen=True)
class Clip:
    """Choose the range of each row or group of a weight by the error of rounding to nearest.

    Both ends are searched together, then separately for asymmetric formats. Formats without
    per-channel or per-group scales are left alone. No row gets worse.

    Attributes:
        steps: ranges that are tried in a pass, besides the full range.
        shrink: the narrowest range, as a share of the full range.
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

    def memory(self, shapes: Shapes) -> int:
        """Return the estimated bytes of a copy of a block and its Hessians."""
        return shapes.block + shapes.block_hessians

    def __call__(
        self,
        job: BlockJob,
        quantized_weights: Mapping[str, Quantized],
    ) -> Chosen:
        """Choose the ranges of layers that the calibration data reaches.

        Args:
            job: the block.
            quantized_weights: the codes so far.

        Returns:
            The codes, and an outcome for each layer.
        """
        weights: dict[str, torch.Tensor] = {}
        for name, weight, spec in job.weights():
            if spec.weight is None or not has_ranges(spec.weight):
                continue
            if kind_of(job.layers[name][0]) in ("Linear", "Conv1D"):
                weights[name] = weight.float()
        result = dict(quantized_weights)
        outcomes = list[Outcome]()
        if not weights or not job.calls:
            return result, outcomes
        stages = stages_in(job, weights)
        # ranges depend on float inputs alone: one run of the block serves all stages
        groups = tuple(group for stage in stages for group in stage.groups)
        stats = collect_hessians(job, Stage(groups, stages[-1].last), {}, exact=False)
        for group in groups:
            for name in group:
                outcome = self._layer(name, weights[name], stats[group[0]], result)
                outcomes.append(outcome)
        return result, outcomes

    def _layer(
        self,
        name: str,
        weight: torch.Tensor,
        stats: HessianStats,
        result: dict[str, Quantized],
    ) -> Outcome:
        if stats.xx is None:
            return Outcome(name, self.name, 0.0, 0.0, UNREACHED)
        loss = Loss(weight, squares_of(stats.xx))
        # From 1 down to ``shrink``; the full range comes first, as the search expects.
        shares = tuple(
            1 - step * (1 - self.shrink) / self.steps for step in range(self.steps + 1)
        )
        start = result[name]
        start_error = loss(start)
        clipped = fitted(weight, start, stats.xx, shares, apart=True)
        # The rows of the Hessian's loss are independent: each keeps its better range.
        result[name], error = better(start, start_error, clipped, loss(clipped))
        return Outcome(name, self.name, *loss.shares(start_error, error))
