"""AdaRound: each weight is rounded up or down, whichever serves the layer (Nagel et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from quark_onnx.errors import ConfigError
from quark_onnx.kernels.rounding import Descent, Part, adaround, in_parts
from quark_onnx.optimizers.base import register
from quark_onnx.optimizers.problem import Problem, Solution


@register
@dataclass(frozen=True)
class AdaRound:
    """Learns for each weight whether to round up or down.

    Attributes:
        iterations: steps of the descent for each layer.
        rows: places of the layer's output that a step looks at.
        rate: learning rate.
        push: how strongly the rounding is pushed to either side.
        warm: share of the iterations before that begins.
    """

    name: ClassVar[str] = "adaround"
    stage: ClassVar[str] = "layer"
    needs_data: ClassVar[bool] = True
    moves_bias: ClassVar[bool] = False

    iterations: int = 500
    rows: int = 256
    rate: float = 0.3
    push: float = 0.5
    warm: float = 0.1

    def __post_init__(self) -> None:
        for setting in ("iterations", "rows"):
            value = getattr(self, setting)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{setting} of adaround is {value!r}; it must be a whole number of at least 1")

    def __call__(self, problem: Problem, present: Solution) -> Solution:
        below, above = problem.lattice.neighbours(problem.weight)
        step = above - below
        share = ((problem.weight - below) / np.where(step == 0, 1, step)).astype(np.float32)
        settings = Descent(self.iterations, self.rows, self.rate, self.warm, push=self.push)
        activation = problem.activation
        wanted = activation.value(problem.train.targets)
        norm = np.maximum(problem.loss(problem.nearest(), problem.train), 1e-20).astype(np.float32)[:, None]
        weight = present.weight.copy()

        def work(groups: slice, outputs: slice) -> None:
            part = Part.of(
                problem.train.inputs[groups],
                wanted[groups, :, outputs],
                activation.value,
                activation.derivative,
                norm[groups, :, outputs],
            )
            own = (groups, outputs)
            up = adaround(part, below[own], step[own], share[own], present.bias[own], settings)
            weight[own] = np.where(up, above[own], below[own])

        in_parts(work, *weight.shape)
        return Solution(weight, present.bias)
