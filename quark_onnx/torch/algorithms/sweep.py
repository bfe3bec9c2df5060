"""GPTQ's sweep on torch tensors: column by column, what rounding did is made good by the columns still to be rounded.

The counterpart of :mod:`quark_onnx.kernels.gptq` where the weights are, on a CPU or a GPU. Follows Frantar et al. 2023,
"GPTQ", and for what happens behind the sweep Behdin et al. 2023, "QuantEase": one column after the other takes the
level that is best while all others stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import frexp
from typing import Any, NamedTuple

import torch

from quark_onnx.torch.algorithms.steps import Steps

#: Columns whose effect on the columns behind is gathered before it is applied.
_BATCH = 128
#: Values that are swept at once, in rows: so many that steps are few, and memory is bounded.
AT_ONCE = 1 << 22
#: Damping grows by this factor until the matrix can be inverted, and no further than so often the mean of the diagonal.
_ESCALATION, _MOST_DAMPING = 10.0, 1e4
#: The exponent of the greatest power of two in float32.
_GREATEST = 127
#: Of triangular matrices that are inverted in one go.
_SMALL = 512


class Swept(NamedTuple):
    """A weight on the levels that were chosen.

    Attributes:
        values: (rows, inputs) float32, what the levels stand for.
        picked: (rows,) int64, which of the tries is best for each row.
        cost: (rows,) float32, the squared error of each output as the damped matrix sees it.
    """

    values: Any
    picked: Any
    cost: Any


@dataclass(frozen=True)
class Solver:
    """How an error in one column is made good by the others, for one matrix of products of inputs.

    Attributes:
        gram: (inputs, inputs) float32, damped, columns in their order, divided by ``unit``.
        inverse: the upper Cholesky factor of its inverse.
        order: the columns in the order in which they are rounded.
        damping: the share of the mean of the diagonal that was added to it.
        ridge: (inputs,) float32, all that was added to the diagonal, as the weight has its columns.
        unit: a power of two.
    """

    gram: Any
    inverse: Any
    order: Any
    damping: float
    ridge: Any
    unit: float

    @classmethod
    def of(cls, gram: Any, damping: float = 0.01, act_order: bool = True) -> Solver:
        """Invert the matrix.

        Args:
            gram: (inputs, inputs), sums of products of two inputs.
            damping: added to the diagonal, as a share of its mean; it grows where that does not suffice.
            act_order: begin with the columns whose inputs are largest.
        """
        diagonal = gram.diagonal()
        order = torch.argsort(diagonal, descending=True, stable=True) if act_order else torch.arange(len(gram))
        order = order.to(gram.device)
        mean = float(diagonal.mean(dtype=torch.float64)) or 1.0
        # a power of two, so that nothing is rounded: the least difference in sums may tip a code
        unit = 2.0 ** min(frexp(mean)[1], _GREATEST)
        base = gram[order][:, order].float().div_(unit)
        # inputs that were always zero: whatever their weights become, nothing changes
        dead = (diagonal == 0).to(base.dtype)
        base.diagonal().add_(dead[order])
        inverse, share = _escalate(lambda share: _factor(base, share * mean / unit), damping)
        base.diagonal().add_(share * mean / unit)
        return cls(base, inverse, order, share, dead * unit + share * mean, unit)

    def solve(self, columns: Any) -> Any:
        """The damped matrix's inverse times columns; (inputs, any) in the order of the weight."""
        turned = self.inverse @ (columns[self.order] / self.unit)
        found = torch.empty_like(columns)
        found[self.order] = self.inverse.t() @ turned
        return found

    def rounded(self, target: Any, tries: Sequence[Steps], polish: int = 0, first: Any = None) -> Swept:
        """A weight, (rows, inputs), on levels.

        Args:
            target: float32 of that shape, what is to be reached.
            tries: levels to choose from; each row takes those of one of them.
            polish: how often every column is looked at again.
            first: float32 of that shape; the column that comes first is rounded from here, and not from the target.
        """
        rows = max(1, AT_ONCE // max(1, target.shape[1] * len(tries)))
        values, cost = torch.empty_like(target), target.new_empty(len(target))
        picked = torch.zeros(len(target), dtype=torch.int64, device=target.device)
        for start in range(0, len(target), rows):
            own = slice(start, start + rows)
            parts = [each.part(own) for each in tries]
            found = self._swept(target[own], parts, polish, None if first is None else first[own])
            values[own, self.order] = found.values.t()
            picked[own], cost[own] = found.picked, found.cost * self.unit
        return Swept(values, picked, cost)

    def _swept(self, target: Any, tries: Sequence[Steps], polish: int, first: Any) -> Swept:
        """Inputs first, in their order."""
        target, count = target.index_select(1, self.order).t().contiguous(), len(tries)
        columns = _Columns(Steps.stacked(tries), self.order)
        start = None if first is None else first[:, self.order[0]].repeat(count)
        values, cost = _sweep(target.repeat(1, count), self.inverse, columns, start)
        # of the tries, row by row, the one whose sweep has cost least
        rows = target.shape[1]
        found = list(zip(values.split(rows, 1), tries, cost.split(rows), strict=True))
        (values, steps, cost), picked = found[0], torch.zeros(rows, dtype=torch.int64, device=target.device)
        for place, (other, others, new) in enumerate(found[1:], 1):
            wins = new < cost
            values, cost = torch.where(wins, other, values), torch.where(wins, new, cost)
            steps, picked = steps.merged(others, wins), torch.where(wins, place, picked)
        columns = _Columns(steps, self.order)
        for _ in range(polish):
            cost = cost + _descend(target, values, self.gram, columns)
        return Swept(values, picked, cost)


class _Columns:
    """Steps of columns in their order.

    Args:
        steps: those of the weight.
        order: of its columns.
    """

    def __init__(self, steps: Steps, order: Any) -> None:
        self._blocks = steps.columns()
        self._place: list[int] = (order // steps.size).tolist()

    def part(self, place: int) -> Steps:
        """Those of one column."""
        return self._blocks[self._place[place]]


def _sweep(left: Any, inverse: Any, steps: _Columns, first: Any = None) -> tuple[Any, Any]:
    """Values on levels for all columns in their order, inputs first, and what they cost each row, as the damped matrix
    sees it; ``left`` is changed.

    Args:
        first: what the first column is rounded from, if not from ``left``.
    """
    values = torch.empty_like(left)
    scales = (1 / inverse.diagonal()).tolist()
    for place in _in_turn(left, inverse, left):
        own, error = steps.part(place), left[place]
        level = own.levels(error if place or first is None else first)
        values[place] = value = own.values(level)
        error.sub_(value).mul_(scales[place])
    return values, left.square_().sum(0)


def _descend(target: Any, values: Any, gram: Any, steps: _Columns) -> Any:
    """Let each column in turn take its best level while all others stay; ``values`` is changed.

    Returns:
        (rows,): how much the cost falls, as a negative number.
    """
    pull, moves = gram @ (target - values), torch.empty_like(values)
    diagonal = gram.diagonal()
    shares = (1 / diagonal).tolist()
    for place in _in_turn(pull, gram, moves):
        own, now = steps.part(place), values[place]
        value = own.values(own.levels(torch.add(now, pull[place], alpha=shares[place])))
        torch.sub(value, now, out=moves[place])
        now.copy_(value)
    return moves.mul_(moves * diagonal[:, None] - pull.mul_(2)).sum(0)


def _in_turn(left: Any, matrix: Any, moves: Any) -> Iterator[int]:
    """Columns one after the other, which lie along the rows here. What the caller leaves in a row of ``moves`` is taken
    from all rows of ``left`` behind it, times its row of a matrix."""
    count = len(left)
    for start in range(0, count, _BATCH):
        stop = min(count, start + _BATCH)
        for place in range(start, stop):
            yield place
            left[place + 1 : stop].addr_(matrix[place, place + 1 : stop], moves[place], alpha=-1)
        left[stop:].addmm_(matrix[start:stop, stop:].t(), moves[start:stop], alpha=-1)


def _escalate(attempt: Callable[[float], Any], damping: float) -> tuple[Any, float]:
    share = damping
    while True:
        found = attempt(share)
        if found is not None:
            return found, share
        share = max(share, 1e-6) * _ESCALATION
        if share > _MOST_DAMPING:
            raise ArithmeticError("the products of the inputs are not finite")


def _factor(base: Any, share: float) -> Any:
    """The upper Cholesky factor of the inverse, computed in float64; None where there is none.

    It is the inverse of the upper factor R of A = R R^T, which is the lower one of A upside down.
    """
    # as few matrices at a time as can be: they are the greatest that there are
    work = base.flip(0, 1).double().t()  # symmetric, and as LAPACK has it
    work.diagonal().add_(share)
    failed = torch.empty((), dtype=torch.int32, device=work.device)
    torch.linalg.cholesky_ex(work, out=(work, failed))
    if failed.item():
        return None
    _invert(work)
    work = work.float()
    return work.flip(0, 1).contiguous() if torch.isfinite(work.diagonal()).all() else None


def _invert(lower: Any) -> None:
    """Put the inverse of a lower triangular matrix in its place."""
    if len(lower) <= _SMALL:
        lower.copy_(torch.linalg.solve_triangular(lower, torch.eye(len(lower)).to(lower), upper=False))
        return
    half = len(lower) // 2
    first, beside, last = lower[:half, :half], lower[half:, :half], lower[half:, half:]
    solved = torch.linalg.solve_triangular(last, beside, upper=False)
    beside.copy_(torch.linalg.solve_triangular(first, solved, upper=False, left=False).neg_())
    _invert(first)
    _invert(last)
