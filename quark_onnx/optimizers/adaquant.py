"""AdaQuant: weights and biases move as far as it serves the layer (Hubara et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from quark_onnx.kernels.rounding import Descent, Part, Units, adaquant
from quark_onnx.optimizers.base import register, require_flag, require_number
from quark_onnx.optimizers.descent import check, descend, device_of
from quark_onnx.optimizers.problem import Floats, Problem, Rows, Solution, loss_of

#: Judgements without a gain after which a descent ends.
_PATIENCE = 2
#: Factors of a scale that are tried.
_FACTORS = (0.6, 0.7, 0.8, 0.9, 1.1)


@register
@dataclass(frozen=True)
class AdaQuant:
    """Learns weights and biases through the rounding.

    Every fifth of the way each output is judged on the rows held out; the best is kept, and a
    descent that no longer helps ends.

    Attributes:
        iterations: steps of the descent for each layer, at most.
        rows: places of the layer's output that a step looks at.
        rate: learning rate of the weights, relative to the root mean square of those of an output.
        bias_rate: learning rate of the biases, in units of the layer's error.
        scales: choose the scale of each output, too, where it has one of its own that is no power
            of two.
        device: "cpu"; "cuda", a GPU that torch sees; or "auto", that where there is one.
    """

    name: ClassVar[str] = "adaquant"
    stage: ClassVar[str] = "layer"
    reads_data: ClassVar[bool] = True
    moves_bias: ClassVar[bool] = True
    reads_mean: ClassVar[bool] = False

    iterations: int = 500
    rows: int = 128
    rate: float = 0.001
    bias_rate: float = 0.02
    scales: bool = False
    device: str = "auto"

    def __post_init__(self) -> None:
        check(self)
        require_number(self, "bias_rate", least=0)
        require_flag(self, "scales")

    def __call__(self, problem: Problem, present: Solution) -> Solution:
        device = device_of(self)
        factor = (
            _factors(problem) if self.scales and problem.scalable else present.factor
        )
        lattice = problem.lattice_of(replace(present, factor=factor))
        settings = Descent(self.iterations, self.rows, self.rate)
        aim = problem.aim(present)
        start = (aim / lattice.scale).astype(np.float32)
        least, greatest = lattice.ends
        rate = self.bias_rate if problem.biased else 0.0
        weight, bias, used = (
            np.empty_like(present.weight),
            present.bias.copy(),
            present.factors.copy(),
        )

        def work(part: Part, own: tuple[slice, slice]) -> None:
            units = Units(
                lattice.scale[own],
                least[own],
                greatest[own],
                lattice.levels,
            ).on(device)
            first, offset = (device.put(array[own]) for array in (start, present.bias))
            mesh, own_factor = (
                lattice.part(own),
                None if factor is None else factor[own],
            )
            held = Rows(
                problem.held.inputs[own[0]],
                problem.held.targets[own[0], :, own[1]],
            )
            best = Solution(
                present.weight[own],
                present.bias[own],
                present.factors[own],
            )
            loss, idle = loss_of(problem.activation, held, best), 0
            for found in adaquant(
                part,
                first,
                offset,
                units,
                settings,
                rate,
                device.xp,
            ):
                levels, moved = map(device.get, found)
                trial = Solution(
                    mesh.nearest(levels.astype(np.float64) * mesh.scale),
                    moved,
                    own_factor,
                )
                new = loss_of(problem.activation, held, trial)
                better = new < loss
                idle = 0 if better.any() else idle + 1
                if idle == _PATIENCE:
                    break  # what was learned since does not hold for other samples
                best, loss = best.chosen(trial, better), np.where(better, new, loss)
            weight[own], bias[own], used[own] = best.weight, best.bias, best.factors

        descend(problem, device, work)
        return Solution(weight, bias, used if problem.scalable else None, aim)


def _factors(problem: Problem) -> Floats:
    """For each output the factor of its scale that serves best where every weight is rounded to the
    nearest.
    """
    best = np.ones(problem.bias.shape)
    least = problem.loss(problem.nearest(), problem.train)
    for factor in _FACTORS:
        tried = np.full(best.shape, factor)
        loss = problem.loss(
            Solution(
                problem.lattice.times(tried).nearest(problem.weight),
                problem.bias.astype(np.float32),
            ),
            problem.train,
        )
        best, least = np.where(loss < least, tried, best), np.minimum(loss, least)
    return best.astype(np.float32)
