"""GPTQ: what rounding a column of a weight did is made good by the columns behind (Frantar et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from quark_onnx.kernels.gptq import gptq
from quark_onnx.optimizers.base import register, require_flag, require_number
from quark_onnx.optimizers.problem import Doubles, Problem, Solution


@register
@dataclass(frozen=True)
class GPTQ:
    """Rounds weights so that their errors make up for each other on the inputs that the data brings.

    Attributes:
        damping: added to the diagonal of the matrix of inputs, as a share of its mean; it grows where that does not
            suffice.
        act_order: begin with the inputs that are largest.
        asymmetric: aim at what the float model computes from its own inputs, not from those of the quantized model.
    """

    name: ClassVar[str] = "gptq"
    stage: ClassVar[str] = "layer"
    needs_data: ClassVar[bool] = True
    moves_bias: ClassVar[bool] = False

    damping: float = 0.01
    act_order: bool = True
    asymmetric: bool = False

    def __post_init__(self) -> None:
        require_number(self, "damping", least=0, most=1)
        require_flag(self, "act_order", "asymmetric")

    def __call__(self, problem: Problem, present: Solution) -> Solution:
        gram, count = problem.gram()
        if not np.isfinite(gram).all():
            return present
        weight = problem.weight + (self._shift(problem, present, gram, count) if self.asymmetric else 0.0)
        rounded = gptq(weight, gram, problem.lattice, damping=self.damping, act_order=self.act_order)
        return Solution(rounded, present.bias)

    def _shift(self, problem: Problem, present: Solution, gram: Doubles, count: int) -> Doubles:
        """What brings the products with the inputs of the quantized model nearest to the targets (ridge regression)."""
        rows = problem.train
        missing = rows.targets - present.bias[:, None] - rows.inputs @ problem.weight.swapaxes(1, 2).astype(np.float32)
        cross = (missing.swapaxes(1, 2) @ rows.inputs).astype(np.float64) * (count / max(1, len(rows)))
        size = gram.shape[1]
        ridge = max(self.damping, 1e-3) * np.trace(gram, axis1=1, axis2=2) / size
        damped = gram + (ridge + (ridge == 0))[:, None, None] * np.eye(size)
        shift: Doubles = np.linalg.solve(damped, cross.swapaxes(1, 2)).swapaxes(1, 2)
        return shift
