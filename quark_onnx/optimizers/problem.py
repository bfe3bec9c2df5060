"""Define the problem of layer-wise optimization.

Find weight values on the quantization grid whose products with the inputs of the quantized model
are close to the results of the float model. Groups come first in every array: a grouped layer is
many small layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from quark_onnx.kernels.levels import Levels
from quark_onnx.kernels.parallel import side_by_side, slabs
from quark_onnx.patterns.activation import Activation

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

#: Rows whose products are in memory at a time.
_SLAB = 2048


@dataclass(frozen=True)
class SampledRows:
    """Inputs and targets of a layer, at sampled positions of the output.

    Attributes:
        inputs: (groups, rows, inputs of a group), from the quantized model.
        targets: (groups, rows, outputs of a group), from the float model, before the activation.
    """

    inputs: Floats
    targets: Floats

    def __len__(self) -> int:
        return int(self.inputs.shape[1])


@dataclass(frozen=True)
class Solution:
    """A weight and a bias.

    Attributes:
        weight: (groups, outputs, inputs), each a dequantized value.
        bias: (groups, outputs).
        factor: factor on the scale of each output, (groups, outputs); None for unchanged scales.
        aim: the weight before rounding; None for the float weight.
    """

    weight: Floats
    bias: Floats
    factor: Floats | None = None
    aim: Doubles | None = None

    @property
    def factors(self) -> Floats:
        """Factors, ones without any."""
        if self.factor is None:
            return np.ones(self.bias.shape, np.float32)
        return self.factor

    def chosen(self, other: Solution, better: NDArray[np.bool_]) -> Solution:
        """Combine solutions per output; ``better`` (groups, outputs) selects ``other``."""
        weight = np.where(better[..., None], other.weight, self.weight)
        bias = np.where(better, other.bias, self.bias)
        if self.factor is other.factor is None:
            factor = None
        else:
            # A solution without factors has factors of 1.
            factor = np.where(better, other.factors, self.factors)
        # Without both aims, a mixture would not be the origin of the weight.
        if self.aim is None or other.aim is None:
            return Solution(weight, bias, factor)
        aim = np.where(better[..., None], other.aim, self.aim)
        return Solution(weight, bias, factor, aim)


@dataclass(frozen=True)
class RoundingProblem:
    """A layer whose weight is to be rounded.

    Attributes:
        name: name of the node.
        weight: (groups, outputs, inputs) in float.
        bias: (groups, outputs) in float.
        lattice: possible values of the weight.
        biased: the layer has a variable bias.
        activation: the function after the layer.
        train: rows to learn from.
        held: rows of other samples, to evaluate solutions.
        mean: computes the mean input of the float model, (groups, inputs); for optimizers with
            ``reads_mean``.
        gram: computes the Hessian X X^T, (groups, inputs, inputs), and the number of rows.
        seed: seed of random numbers.
        bias_lattice: possible values of the bias; None for any.
        scalable: each output has a scale of its own that may be multiplied.
        learned: like ``gram``, of the samples to learn from alone, so that held-out samples can
            judge the result; None if that is ``gram`` itself.
    """

    name: str
    weight: Doubles
    bias: Doubles
    lattice: Levels
    biased: bool
    activation: Activation
    train: SampledRows
    held: SampledRows
    mean: Callable[[], Doubles]
    gram: Callable[[], tuple[Doubles, int]]
    seed: int = 0
    bias_lattice: Levels | None = None
    scalable: bool = False
    learned: Callable[[], tuple[Doubles, int]] | None = None

    def nearest(self) -> Solution:
        """Return the solution with every weight and bias rounded to nearest."""
        rounded = self.lattice.nearest(self.weight)
        bias = self.bias.astype(np.float32)
        return self.allowed(Solution(rounded, bias, aim=self.weight))

    def aim(self, solution: Solution) -> Doubles:
        """Return the weight of a solution before rounding."""
        return self.weight if solution.aim is None else solution.aim

    def lattice_of(self, solution: Solution) -> Levels:
        """Return the possible values of the weight under the scales of a solution."""
        if solution.factor is None:
            return self.lattice
        return self.lattice.times(solution.factors.astype(np.float64))

    def allowed(self, solution: Solution) -> Solution:
        """Return a solution with a storable bias: the layer's, if not variable."""
        # A layer without a variable bias computes with its own, whatever an optimizer proposes.
        bias = solution.bias if self.biased else self.bias
        if self.bias_lattice is not None:
            bias = self.bias_lattice.nearest(bias.astype(np.float64))
        factor = solution.factor if self.scalable else None
        return replace(solution, bias=bias.astype(np.float32), factor=factor)

    def loss(self, solution: Solution, rows: SampledRows | None = None) -> Doubles:
        """Return the mean square error after the activation, (groups, outputs).

        On the held-out rows by default.
        """
        evaluated = rows or self.held
        # Parts are summed in order, so that the loss does not depend on the number of cores.
        squares = side_by_side(
            lambda part: _squares(self.activation, evaluated, part, solution),
            slabs(len(evaluated), _SLAB),
        )
        total = sum(squares, np.zeros(solution.bias.shape))
        return total / max(1, len(evaluated))


def loss_of(activation: Activation, rows: SampledRows, solution: Solution) -> Doubles:
    """Return the mean square error after the activation on some rows, (groups, outputs).

    Computed on a single core.
    """
    squares = (
        _squares(activation, rows, part, solution) for part in slabs(len(rows), _SLAB)
    )
    return sum(squares, np.zeros(solution.bias.shape)) / max(1, len(rows))


# A loss of NaN is never better than another.
@np.errstate(over="ignore", invalid="ignore")
def _squares(
    activation: Activation, rows: SampledRows, part: slice, solution: Solution
) -> Doubles:
    """Return the squared errors after the activation, summed over some rows: (groups, outputs)."""
    # (groups, rows, inputs) @ (groups, inputs, outputs) in float32; squares are summed in float64.
    product = rows.inputs[:, part] @ solution.weight.swapaxes(1, 2)
    computed = product + solution.bias[:, None]
    error = activation.value(computed) - activation.value(rows.targets[:, part])
    total: Doubles = np.square(error, dtype=np.float64).sum(axis=1)
    return total


@dataclass(frozen=True)
class LayerResult:
    """Result of optimizing a layer.

    Attributes:
        name: name of the node.
        before: mean square error on held-out samples under RTN.
        after: mean square error of the accepted solution.
        outputs: number of outputs.
        changed: for each optimizer, the number of outputs with an accepted proposal.
    """

    name: str
    before: float
    after: float
    outputs: int
    changed: dict[str, int]
