"""AdaQuant: learn weights and biases through the rounding (Hubara et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from quark_onnx.kernels.rounding import Descent, OutputPart, Units, adaquant
from quark_onnx.optimizers.base import (
    LayerOptimizer,
    register,
    require_flag,
    require_number,
)
from quark_onnx.optimizers.descent import check, descend, device_of
from quark_onnx.optimizers.problem import (
    Floats,
    RoundingProblem,
    SampledRows,
    Solution,
    loss_of,
)

#: Evaluations without a gain after which a descent ends.
_PATIENCE = 2
#: Candidate factors of a scale.
_FACTORS = (0.6, 0.7, 0.8, 0.9, 1.1)


@register
@dataclass(frozen=True)
class AdaQuant(LayerOptimizer):
    """Learns weights and biases by gradient descent through the rounding.

    After each fifth of the iterations every output is evaluated on the held-out rows; the best
    solution is kept, and a descent without further gain ends.

    Attributes:
        iterations: most steps of the descent for each layer.
        rows: rows of the layer's output in a step.
        rate: learning rate of the weights, relative to the root mean square of an output's weights.
        bias_rate: learning rate of the biases, in units of the layer's error.
        scales: choose the scale of each output, too, if it is per output and not a power of two.
        device: "cpu"; "cuda", a GPU that torch sees; or "auto", a GPU if present.
    """

    name: ClassVar[str] = "adaquant"
    moves_bias: ClassVar[bool] = True

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

    def __call__(self, problem: RoundingProblem, present: Solution) -> Solution:
        """Return a proposed weight and bias.

        Args:
            problem: the layer.
            present: the solution to start from.

        Returns:
            The weight, the bias, and the factors of scales if they may change. Blocks of groups
            and outputs are learned independently.
        """
        device = device_of(self)
        factor = present.factor
        if self.scales and problem.scalable:
            factor = _factors(problem)
        lattice = problem.lattice_of(replace(present, factor=factor))
        settings = Descent(self.iterations, self.rows, self.rate)
        # The weight before rounding: an optimizer before this one may have moved it.
        aim = problem.aim(present)
        # In units of the scale, so that the learning rate does not depend on the range of the
        # weight.
        initial = (aim / lattice.scale).astype(np.float32)
        least, greatest = lattice.ends
        # A layer without a variable bias could not store what is learned.
        rate = self.bias_rate if problem.biased else 0.0
        weight = np.empty_like(present.weight)
        bias = present.bias.copy()
        factors = present.factors.copy()

        # One block of the weight.
        def work(part: OutputPart, where: tuple[slice, slice]) -> None:
            units = Units(
                lattice.scale[where], least[where], greatest[where], lattice.levels
            ).on(device)
            start = device.put(initial[where])
            start_bias = device.put(present.bias[where])
            mesh = lattice.part(where)
            block_factor = None if factor is None else factor[where]
            # Rows of the same block: the groups and outputs of this call.
            held = SampledRows(
                problem.held.inputs[where[0]],
                problem.held.targets[where[0], :, where[1]],
            )
            best = Solution(
                present.weight[where], present.bias[where], present.factors[where]
            )
            loss = loss_of(problem.activation, held, best)
            idle = 0
            for levels, learned_bias in adaquant(
                part, start, start_bias, units, settings, rate, device.xp
            ):
                # Rounded exactly as the stored weight will be; the descent computes in float32.
                learned = device.get(levels).astype(np.float64) * mesh.scale
                trial = Solution(
                    mesh.nearest(learned), device.get(learned_bias), block_factor
                )
                new = loss_of(problem.activation, held, trial)
                # Per output, (groups, outputs): outputs are independent, and some gain later than
                # others.
                better = new < loss
                idle = 0 if better.any() else idle + 1
                if idle == _PATIENCE:
                    break  # what was learned since does not hold for other samples
                best = best.chosen(trial, better)
                loss = np.where(better, new, loss)
            weight[where] = best.weight
            bias[where] = best.bias
            factors[where] = best.factors

        descend(problem, device, work)
        return Solution(weight, bias, factors if problem.scalable else None, aim)


def _factors(problem: RoundingProblem) -> Floats:
    """Return the factor of each output's scale with the least loss under RTN."""
    best = np.ones(problem.bias.shape)
    least = problem.loss(problem.nearest(), problem.train)
    # The factor 1 is the start; training rows choose, so that held-out rows judge the result.
    for factor in _FACTORS:
        candidate = np.full(best.shape, factor)
        rounded = problem.lattice.times(candidate).nearest(problem.weight)
        solution = Solution(rounded, problem.bias.astype(np.float32))
        loss = problem.loss(solution, problem.train)
        # NaN is never less, and keeps the factor 1.
        best = np.where(loss < least, candidate, best)
        least = np.minimum(loss, least)
    return best.astype(np.float32)
