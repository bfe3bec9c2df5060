"""GPTQ: compensate the rounding error of a column by the later columns.

Frantar et al. 2023.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from quark_onnx.config.checks import require
from quark_onnx.kernels.gptq import Compensation
from quark_onnx.optimizers.base import (
    LayerOptimizer,
    register,
    require_flag,
    require_number,
)
from quark_onnx.optimizers.problem import Doubles, RoundingProblem, Solution

#: Candidate damping of the regression, as shares of the mean of the diagonal; the best one on the
#: held-out rows is taken.
_RIDGES = (0.01, 0.1, 1.0, 10.0)
#: Candidate damping of "auto".
_DAMPINGS = (0.01, 0.03, 0.1, 0.3, 1.0)
#: Candidate factors of a scale.
_FACTORS = (0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.05, 1.1, 1.15, 1.2)


@register
@dataclass(frozen=True)
class GPTQ(LayerOptimizer):
    """Rounds weights with error compensation on the calibration data.

    Attributes:
        damping: added to the diagonal of the Hessian, as a share of its mean; increased if it does
            not suffice. "auto" chooses it per layer by the held-out rows: with few samples,
            compensation that fits those alone does not generalize.
        act_order: quantize columns in order of decreasing Hessian diagonal.
        asymmetric: target the float model's output for its own inputs, instead of the quantized
            model's.
        scales: choose the scale of each output, too, if it is per output and not a power of two.
    """

    name: ClassVar[str] = "gptq"

    damping: float | str = 0.01
    act_order: bool = True
    asymmetric: bool = False
    scales: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.damping, str):
            wanted = "a number from 0 to 1, or 'auto'"
            require(self.damping == "auto", "damping of gptq", self.damping, wanted)
        else:
            require_number(self, "damping", least=0, most=1)
        require_flag(self, "act_order", "asymmetric", "scales")

    def __call__(self, problem: RoundingProblem, present: Solution) -> Solution:
        """Return a proposed weight; the bias stays.

        Args:
            problem: the layer.
            present: the solution whose scales and bias are used.

        Returns:
            The weight, with factors of the scales if they may change; ``present`` without a finite
            Hessian.
        """
        # "auto" is judged by the held-out rows, which the Hessian must not contain.
        if self.damping == "auto" and problem.learned is not None:
            hessian, count = problem.learned()
        else:
            hessian, count = problem.gram()
        # Overflowing inputs leave no Hessian: the present solution stays.
        if not np.isfinite(hessian).all():
            return present
        weight = problem.weight
        if self.asymmetric:
            # GPTQ then rounds the weight that reproduces the float outputs on inputs with errors.
            weight = weight + self._shift(problem, present, hessian, count)
        lattice = problem.lattice_of(present)
        compensation = self._compensation(problem, present, hessian, weight)
        # Errors by the Hessian, (groups, outputs); the factor 1 is the first candidate.
        best, least = compensation.rounded(weight, lattice)
        factor = present.factors
        for ratio in _FACTORS if self.scales and problem.scalable else ():
            candidate = np.full(factor.shape, ratio)
            rounded, error = compensation.rounded(weight, lattice.times(candidate))
            better = error < least
            best = np.where(better[..., None], rounded, best)
            least = np.where(better, error, least)
            factor = np.where(better, present.factors * np.float32(ratio), factor)
        factors = factor if problem.scalable else None
        return Solution(best, present.bias, factors, weight)

    def _compensation(
        self,
        problem: RoundingProblem,
        present: Solution,
        hessian: Doubles,
        weight: Doubles,
    ) -> Compensation:
        """Return the compensation for the requested damping.

        "auto" takes the damping with the least loss on the held-out rows.

        Args:
            present: the solution whose scales and bias are used.
            hessian: X X^T, (groups, inputs, inputs).
            weight: the weight to round, (groups, outputs, inputs).
        """

        def compensation(damping: float) -> Compensation:
            return Compensation(hessian, damping=damping, act_order=self.act_order)

        if not isinstance(self.damping, str):
            return compensation(self.damping)
        lattice = problem.lattice_of(present)

        def loss(candidate: Compensation) -> float:
            rounded, _ = candidate.rounded(weight, lattice)
            # One damping for all outputs, as they share the Cholesky factor.
            mean = float(problem.loss(replace(present, weight=rounded)).mean())
            # ``min`` with a NaN would depend on the order of the candidates.
            return mean if np.isfinite(mean) else float("inf")

        return min((compensation(damping) for damping in _DAMPINGS), key=loss)

    def _shift(
        self, problem: RoundingProblem, present: Solution, hessian: Doubles, count: int
    ) -> Doubles:
        """Return the weight change that fits the targets best on the quantized model's inputs.

        Ridge regression of the residuals on the inputs, with the best damping on the held-out rows.

        Args:
            present: the solution whose bias is used.
            hessian: X X^T, (groups, inputs, inputs).
            count: number of rows in the Hessian.

        Returns:
            The change, (groups, outputs, inputs); zeros if none lowers the held-out loss.
        """
        rows = problem.train
        size = hessian.shape[1]
        # (groups, rows, outputs): what the float weight misses on the quantized model's inputs.
        residual = (
            rows.targets
            - present.bias[:, None]
            - rows.inputs @ problem.weight.swapaxes(1, 2).astype(np.float32)
        )
        cross = (residual.swapaxes(1, 2) @ rows.inputs).astype(np.float64)
        # The Hessian sums over all rows, the product over sampled ones: both to one scale.
        cross = cross * (count / max(1, len(rows)))
        mean = np.trace(hessian, axis1=1, axis2=2) / size
        best: Doubles = np.zeros_like(problem.weight)
        least = float("inf")
        for share in _RIDGES:
            # A group without inputs has a Hessian of zeros: 1 on the diagonal makes it invertible.
            damping = share * mean + (mean == 0)
            damped = hessian + damping[:, None, None] * np.eye(size)
            shift = np.linalg.solve(damped, cross.swapaxes(1, 2)).swapaxes(1, 2)
            weight = (problem.weight + shift).astype(np.float32)
            loss = float(problem.loss(Solution(weight, present.bias)).mean())
            if loss < least:
                best = shift
                least = loss
        # No shift, where every damping fits the training rows alone.
        unshifted = Solution(problem.weight.astype(np.float32), present.bias)
        if least < float(problem.loss(unshifted).mean()):
            return best
        return np.zeros_like(best)
