"""RoundDown: every weight becomes the next lower code. It shows the contract, and helps nobody: the
held-out rows reject it.
"""

from dataclasses import dataclass
from typing import ClassVar

from quark_onnx.optimizers.base import register
from quark_onnx.optimizers.problem import RoundingProblem, Solution


@register
@dataclass(frozen=True)
class RoundDown:
    """Rounds every weight down."""

    name: ClassVar[str] = "round_down"
    stage: ClassVar[str] = "layer"
    reads_data: ClassVar[bool] = True
    moves_bias: ClassVar[bool] = False
    reads_mean: ClassVar[bool] = False

    def __call__(self, problem: RoundingProblem, present: Solution) -> Solution:
        """Propose the lower neighbours of the weights."""
        below, _ = problem.lattice.neighbours(problem.weight)
        return Solution(below, present.bias)
