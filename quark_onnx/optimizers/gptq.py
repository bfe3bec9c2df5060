"""GPTQ: what rounding a column of a weight did is made good by the columns behind (Frantar et al.

2023).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from quark_onnx.errors import ConfigError
from quark_onnx.kernels.gptq import Compensation
from quark_onnx.optimizers.base import register, require_flag, require_number
from quark_onnx.optimizers.problem import Doubles, Problem, Solution

#: Damping of the regression, as shares of the mean of the diagonal; the one that serves the rows
#: held out is taken.
_RIDGES = (0.01, 0.1, 1.0, 10.0)
#: What "auto" chooses the damping of the compensation from.
_DAMPINGS = (0.01, 0.03, 0.1, 0.3, 1.0)
#: Factors of a scale that are tried.
_FACTORS = (0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.05, 1.1, 1.15, 1.2)


@register
@dataclass(frozen=True)
class GPTQ:
    """Rounds weights so that their errors make up for each other on the inputs that the data
    brings.

    Attributes:
        damping: added to the diagonal of the matrix of inputs, as a share of its mean; it grows
            where that does not suffice. "auto" chooses it for each layer by the rows held out: with
            few samples, what makes up for an error on those alone is no use on others.
        act_order: begin with the inputs that are largest.
        asymmetric: aim at what the float model computes from its own inputs, not from those of the
            quantized model.
        scales: choose the scale of each output, too, where it has one of its own that is no power
            of two.
    """

    name: ClassVar[str] = "gptq"
    stage: ClassVar[str] = "layer"
    reads_data: ClassVar[bool] = True
    moves_bias: ClassVar[bool] = False
    reads_mean: ClassVar[bool] = False

    damping: float | str = 0.01
    act_order: bool = True
    asymmetric: bool = False
    scales: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.damping, str):
            if self.damping != "auto":
                raise ConfigError(
                    f"damping of gptq is {self.damping!r}; it must be a number from 0"
                    " to 1, or 'auto'",
                )
        else:
            require_number(self, "damping", least=0, most=1)
        require_flag(self, "act_order", "asymmetric", "scales")

    def __call__(self, problem: Problem, present: Solution) -> Solution:
        gram, count = (
            (problem.learned or problem.gram)()
            if self.damping == "auto"
            else problem.gram()
        )
        if not np.isfinite(gram).all():
            return present
        weight = problem.weight + (
            self._shift(problem, present, gram, count) if self.asymmetric else 0.0
        )
        lattice = problem.lattice_of(present)
        compensation = self._compensation(problem, present, gram, weight)
        best, least = compensation.rounded(weight, lattice)
        factor = present.factors
        for other in _FACTORS if self.scales and problem.scalable else ():
            tried = np.full(factor.shape, other)
            rounded, error = compensation.rounded(weight, lattice.times(tried))
            better = error < least
            best, least = (
                np.where(better[..., None], rounded, best),
                np.where(better, error, least),
            )
            factor = np.where(better, present.factors * np.float32(other), factor)
        return Solution(
            best,
            present.bias,
            factor if problem.scalable else None,
            weight,
        )

    def _compensation(
        self,
        problem: Problem,
        present: Solution,
        gram: Doubles,
        weight: Doubles,
    ) -> Compensation:
        """That of the damping asked for.

        Or the one under which the loss on the rows held out is least.
        """

        def compensation(damping: float) -> Compensation:
            return Compensation(gram, damping=damping, act_order=self.act_order)

        if not isinstance(self.damping, str):
            return compensation(self.damping)
        lattice = problem.lattice_of(present)

        def loss(other: Compensation) -> float:
            found = float(
                problem.loss(
                    replace(present, weight=other.rounded(weight, lattice)[0]),
                ).mean(),
            )
            return found if np.isfinite(found) else float("inf")

        return min(map(compensation, _DAMPINGS), key=loss)

    def _shift(
        self,
        problem: Problem,
        present: Solution,
        gram: Doubles,
        count: int,
    ) -> Doubles:
        """What brings the products with the inputs of the quantized model nearest to the targets
        (ridge regression).
        """
        rows, size = problem.train, gram.shape[1]
        missing = (
            rows.targets
            - present.bias[:, None]
            - rows.inputs @ problem.weight.swapaxes(1, 2).astype(np.float32)
        )
        cross = (missing.swapaxes(1, 2) @ rows.inputs).astype(np.float64) * (
            count / max(1, len(rows))
        )
        mean = np.trace(gram, axis1=1, axis2=2) / size
        best: Doubles = np.zeros_like(problem.weight)
        least = float("inf")
        for share in _RIDGES:
            damped = gram + (share * mean + (mean == 0))[:, None, None] * np.eye(size)
            shift = np.linalg.solve(damped, cross.swapaxes(1, 2)).swapaxes(1, 2)
            moved = Solution((problem.weight + shift).astype(np.float32), present.bias)
            if (loss := float(problem.loss(moved).mean())) < least:
                best, least = shift, loss
        still = Solution(problem.weight.astype(np.float32), present.bias)
        return (
            best if least < float(problem.loss(still).mean()) else np.zeros_like(best)
        )
