"""The problem that every optimizer of a layer solves: codes whose products with the inputs of the
quantized model come close to what the float model computes.

Groups come first in every array: a grouped layer is as many small ones, side by side.
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

#: Rows whose products are alive at a time.
_SLAB = 2048


@dataclass(frozen=True)
class Rows:
    """What a layer reads and should compute, at some places of its output.

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
        weight: (groups, outputs, inputs), each a value that its codes can stand for.
        bias: (groups, outputs).
        factor: what the scale of each output is multiplied by, (groups, outputs); None where it
            stays.
        aim: what the weight would be if it did not have to be rounded; None where that is the float
            weight.
    """

    weight: Floats
    bias: Floats
    factor: Floats | None = None
    aim: Doubles | None = None

    @property
    def factors(self) -> Floats:
        """The factors, ones where there are none."""
        return (
            np.ones(self.bias.shape, np.float32) if self.factor is None else self.factor
        )

    def chosen(self, other: Solution, better: NDArray[np.bool_]) -> Solution:
        """The other one where it is better; ``better`` is (groups, outputs)."""
        weight = np.where(better[..., None], other.weight, self.weight)
        bias = np.where(better, other.bias, self.bias)
        factor = (
            None
            if self.factor is other.factor is None
            else np.where(better, other.factors, self.factors)
        )
        if self.aim is None or other.aim is None:
            return Solution(weight, bias, factor)
        return Solution(
            weight,
            bias,
            factor,
            np.where(better[..., None], other.aim, self.aim),
        )


@dataclass(frozen=True)
class Problem:
    """A layer whose weight is to be rounded.

    Attributes:
        name: of the node.
        weight: (groups, outputs, inputs) in float.
        bias: (groups, outputs) in float.
        lattice: the values that the weight may take.
        biased: whether the layer has a bias of its own that may change.
        activation: what follows.
        train: rows to learn from.
        held: rows of other samples, by which a solution is judged.
        mean: makes the mean input of the float model, (groups, inputs); for optimizers that say so
            by ``reads_mean``.
        gram: makes the sum over all rows of products of two inputs, (groups, inputs, inputs), and
            their number.
        seed: of whatever is random.
        bias_lattice: the values that the bias may take; None for any.
        scalable: whether each output has a scale of its own that may be multiplied.
        learned: the same as ``gram`` of the samples to learn from alone, so that those held out can
            judge what was made of it; None where that is ``gram`` itself.
    """

    name: str
    weight: Doubles
    bias: Doubles
    lattice: Levels
    biased: bool
    activation: Activation
    train: Rows
    held: Rows
    mean: Callable[[], Doubles]
    gram: Callable[[], tuple[Doubles, int]]
    seed: int = 0
    bias_lattice: Levels | None = None
    scalable: bool = False
    learned: Callable[[], tuple[Doubles, int]] | None = None

    def nearest(self) -> Solution:
        """Every weight and bias rounded to the nearest value."""
        rounded = self.lattice.nearest(self.weight)
        return self.allowed(
            Solution(rounded, self.bias.astype(np.float32), aim=self.weight),
        )

    def aim(self, solution: Solution) -> Doubles:
        """What the weight of a solution would be if it did not have to be rounded."""
        return self.weight if solution.aim is None else solution.aim

    def lattice_of(self, solution: Solution) -> Levels:
        """The values that the weight may take under the scales of a solution."""
        return (
            self.lattice
            if solution.factor is None
            else self.lattice.times(solution.factors.astype(np.float64))
        )

    def allowed(self, solution: Solution) -> Solution:
        """A solution with a bias that can be stored: that of the layer, where it has none of its
        own.
        """
        bias = solution.bias if self.biased else self.bias
        if self.bias_lattice is not None:
            bias = self.bias_lattice.nearest(bias.astype(np.float64))
        factor = solution.factor if self.scalable else None
        return replace(solution, bias=bias.astype(np.float32), factor=factor)

    def loss(self, solution: Solution, rows: Rows | None = None) -> Doubles:
        """Mean square of the error behind the activation, (groups, outputs).

        On the rows held out by default.
        """
        known = rows or self.held
        parts = slabs(len(known), _SLAB)
        found = side_by_side(
            lambda part: _squares(self.activation, known, part, solution),
            parts,
        )
        return sum(found, np.zeros(solution.bias.shape)) / max(1, len(known))


def loss_of(activation: Activation, rows: Rows, solution: Solution) -> Doubles:
    """Mean square of the error behind the activation over some rows, (groups, outputs).

    On one core.
    """
    found = (
        _squares(activation, rows, part, solution) for part in slabs(len(rows), _SLAB)
    )
    return sum(found, np.zeros(solution.bias.shape)) / max(1, len(rows))


@np.errstate(
    over="ignore",
    invalid="ignore",
)  # a loss that is no number is no better than another
def _squares(
    activation: Activation,
    rows: Rows,
    part: slice,
    solution: Solution,
) -> Doubles:
    found = (
        rows.inputs[:, part] @ solution.weight.swapaxes(1, 2) + solution.bias[:, None]
    )
    error = activation.value(found) - activation.value(rows.targets[:, part])
    total: Doubles = np.square(error, dtype=np.float64).sum(axis=1)
    return total


@dataclass(frozen=True)
class LayerResult:
    """What became of a layer.

    Attributes:
        name: of the node.
        before: mean square of its error on samples held out, every weight rounded to the nearest
            code.
        after: the same with what was kept.
        outputs: how many outputs it has.
        changed: for each optimizer, in how many of them its proposal was better and was kept.
    """

    name: str
    before: float
    after: float
    outputs: int
    changed: dict[str, int]
