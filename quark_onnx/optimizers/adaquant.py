"""AdaQuant: weights and biases move as far as it serves the layer (Hubara et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from quark_onnx.errors import ConfigError
from quark_onnx.kernels.rounding import Descent, Part, Units, adaquant, in_parts
from quark_onnx.optimizers.base import register
from quark_onnx.optimizers.problem import Problem, Solution


@register
@dataclass(frozen=True)
class AdaQuant:
    """Learns weights and biases through the rounding.

    Attributes:
        iterations: steps of the descent for each layer.
        rows: places of the layer's output that a step looks at.
        rate: learning rate of the weights, relative to the root mean square of those of an output.
        bias_rate: learning rate of the biases, in units of the layer's error.
    """

    name: ClassVar[str] = "adaquant"
    stage: ClassVar[str] = "layer"
    needs_data: ClassVar[bool] = True
    moves_bias: ClassVar[bool] = True

    iterations: int = 500
    rows: int = 256
    rate: float = 0.001
    bias_rate: float = 0.02

    def __post_init__(self) -> None:
        for setting in ("iterations", "rows"):
            value = getattr(self, setting)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{setting} of adaquant is {value!r}; it must be a whole number of at least 1")

    def __call__(self, problem: Problem, present: Solution) -> Solution:
        lattice, activation = problem.lattice, problem.activation
        settings = Descent(self.iterations, self.rows, self.rate)
        start = (problem.weight / lattice.scale).astype(np.float32)
        wanted = activation.value(problem.train.targets)
        norm = np.maximum(problem.loss(problem.nearest(), problem.train), 1e-20).astype(np.float32)[:, None]
        weight, bias = np.empty_like(present.weight), present.bias.copy()

        def work(groups: slice, outputs: slice) -> None:
            own = (groups, outputs)
            part = Part.of(
                problem.train.inputs[groups],
                wanted[groups, :, outputs],
                activation.value,
                activation.derivative,
                norm[groups, :, outputs],
            )
            units = Units(lattice.scale[own], lattice.least[own], lattice.greatest[own])
            rate = self.bias_rate if problem.biased else 0.0
            weight[own], bias[own] = adaquant(part, start[own], present.bias[own], units, settings, rate)

        in_parts(work, *weight.shape)
        return Solution(lattice.nearest(weight.astype(np.float64) * lattice.scale), bias)
