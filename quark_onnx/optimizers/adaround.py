"""AdaRound: round each weight up or down to minimize the layer's loss (Nagel et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from quark_onnx.kernels.rounding import Descent, OutputPart, adaround
from quark_onnx.optimizers.base import LayerOptimizer, register, require_number
from quark_onnx.optimizers.descent import check, descend, device_of
from quark_onnx.optimizers.problem import RoundingProblem, Solution


@register
@dataclass(frozen=True)
class AdaRound(LayerOptimizer):
    """Learns for each weight whether to round up or down.

    Attributes:
        iterations: steps of the descent for each layer.
        rows: rows of the layer's output in a step.
        rate: learning rate.
        push: weight of the regularizer that pushes the rounding to 0 or 1.
        warm: share of the iterations without the regularizer.
        device: "cpu"; "cuda", a GPU that torch sees; or "auto", a GPU if present.
    """

    name: ClassVar[str] = "adaround"

    iterations: int = 500
    rows: int = 128
    rate: float = 0.3
    push: float = 0.5
    warm: float = 0.1
    device: str = "auto"

    def __post_init__(self) -> None:
        check(self)
        require_number(self, "push", least=0)
        require_number(self, "warm", least=0, most=1)

    def __call__(self, problem: RoundingProblem, present: Solution) -> Solution:
        """Return a proposed weight; the bias stays.

        Args:
            problem: the layer.
            present: the solution whose scales and bias are used.
        """
        device = device_of(self)
        # The weight before rounding: an optimizer before this one may have moved it.
        aim = problem.aim(present)
        below, above = problem.lattice_of(present).neighbours(aim)
        # (groups, outputs, inputs), as all arrays of weights here.
        step = above - below
        # Weights beyond the ends of the grid have one level only, and a step of 0.
        share = ((aim - below) / np.where(step == 0, 1, step)).astype(np.float32)
        settings = Descent(
            self.iterations, self.rows, self.rate, self.warm, push=self.push
        )
        # Blocks write disjoint parts, from several threads.
        weight = present.weight.copy()

        def work(part: OutputPart, where: tuple[slice, slice]) -> None:
            rounded_up = adaround(
                part,
                device.put(below[where]),
                device.put(step[where]),
                device.put(share[where]),
                device.put(present.bias[where]),
                settings,
                device.xp,
            )
            up = device.get(rounded_up)
            weight[where] = np.where(up, above[where], below[where])

        descend(problem, device, work)
        return Solution(weight, present.bias, present.factor, aim)
