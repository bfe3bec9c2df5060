"""AdaQuant: weights and biases move as far as it serves the layer (Hubara et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from quark_onnx.kernels.rounding import Descent, Part, Units, adaquant
from quark_onnx.optimizers.base import register, require_number
from quark_onnx.optimizers.descent import check, descend, device_of
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
        device: "cpu"; "cuda", a GPU that torch sees; or "auto", that where there is one.
    """

    name: ClassVar[str] = "adaquant"
    stage: ClassVar[str] = "layer"
    needs_data: ClassVar[bool] = True
    moves_bias: ClassVar[bool] = True

    iterations: int = 500
    rows: int = 256
    rate: float = 0.001
    bias_rate: float = 0.02
    device: str = "auto"

    def __post_init__(self) -> None:
        check(self)
        require_number(self, "bias_rate", least=0)

    def __call__(self, problem: Problem, present: Solution) -> Solution:
        device, lattice = device_of(self), problem.lattice
        settings = Descent(self.iterations, self.rows, self.rate)
        start = (problem.weight / lattice.scale).astype(np.float32)
        least, greatest = lattice.ends
        rate = self.bias_rate if problem.biased else 0.0
        weight, bias = np.empty_like(present.weight), present.bias.copy()

        def work(part: Part, own: tuple[slice, slice]) -> None:
            units = Units(lattice.scale[own], least[own], greatest[own], lattice.levels).on(device)
            first, offset = (device.put(array[own]) for array in (start, present.bias))
            found = adaquant(part, first, offset, units, settings, rate, device.xp)
            weight[own], bias[own] = map(device.get, found)

        descend(problem, device, work)
        return Solution(lattice.nearest(weight.astype(np.float64) * lattice.scale), bias)
