"""GPTQ's sweep on torch tensors: column by column, what rounding did is made good by the columns still to be rounded.

The counterpart of :mod:`quark_onnx.kernels.gptq` where the weights are, on a CPU or a GPU. Follows Frantar et al. 2023,
"GPTQ", and for what happens behind the sweep Behdin et al. 2023, "QuantEase": one column after the other takes the
level that is best while all others stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quark_onnx.torch.algorithms.steps import Steps

#: Columns whose effect on the columns behind is gathered before it is applied.
_BATCH = 128
#: Values that are swept at once, in rows: so many that steps are few, and memory is bounded.
AT_ONCE = 1 << 22
#: Damping grows by this factor until the matrix can be inverted, and no further than so often the mean of the diagonal.
_ESCALATION, _MOST_DAMPING = 10.0, 1e4


@dataclass(frozen=True)
class Solver:
    """How an error in one column is made good by the others, for one matrix of products of inputs.

    Attributes:
        gram: (inputs, inputs) float32, damped, columns in their order.
        inverse: the upper Cholesky factor of its inverse.
        order: the columns in the order in which they are rounded.
        damping: the share of the mean of the diagonal that was added to it.
    """

    gram: Any
    inverse: Any
    order: Any
    damping: float

    @classmethod
    def of(cls, gram: Any, damping: float = 0.01, act_order: bool = True) -> Solver:
        """Invert the matrix.

        Args:
            gram: (inputs, inputs), sums of products of two inputs.
            damping: added to the diagonal, as a share of its mean; it grows where that does not suffice.
            act_order: begin with the columns whose inputs are largest.
        """
        diagonal = gram.diagonal().clone()
        order = torch.argsort(diagonal, descending=True, stable=True) if act_order else torch.arange(len(gram))
        order = order.to(gram.device)
        mean = float(diagonal.mean(dtype=torch.float64))
        base = gram[order][:, order].float().div_(mean) if mean > 0 else torch.zeros_like(gram, dtype=torch.float32)
        # inputs that were always zero: whatever their weights become, nothing changes
        base.diagonal().add_((diagonal[order] == 0).to(base.dtype))
        inverse, share = _escalate(lambda share: _factor(base, share), damping)
        base.diagonal().add_(share)
        return cls(base, inverse, order, share)

    def solve(self, columns: Any) -> Any:
        """The damped matrix's inverse times columns; (inputs, any) in the order of the weight, in its own unit.

        Args:
            columns: divided by the mean of the diagonal before.
        """
        turned = self.inverse @ columns[self.order]
        found = torch.empty_like(columns)
        found[self.order] = self.inverse.t() @ turned
        return found

    def rounded(self, target: Any, tries: Sequence[Steps], polish: int = 0, first: Any = None) -> tuple[Any, Any]:
        """Levels for a weight, (rows, inputs), and which of the tries are best for each row, (rows,).

        Args:
            target: float32 of that shape, what is to be reached.
            tries: what the same levels may stand for.
            polish: how often every column is looked at again.
            first: float32 of that shape; the column that comes first is rounded from here, and not from the target.
        """
        rows = max(1, AT_ONCE // max(1, target.shape[1] * len(tries)))
        levels, picked = torch.empty_like(target), torch.zeros(len(target), dtype=torch.int64, device=target.device)
        for start in range(0, len(target), rows):
            own = slice(start, start + rows)
            parts = [each.part(own) for each in tries]
            found, picked[own] = self._swept(target[own], parts, polish, None if first is None else first[own])
            levels[own, self.order] = found.t()
        return levels, picked

    def _swept(self, target: Any, tries: Sequence[Steps], polish: int, first: Any) -> tuple[Any, Any]:
        left, count = target.index_select(1, self.order).t().contiguous(), len(tries)
        columns = _Columns(Steps.stacked(tries), self.order)
        start = None if first is None else columns.part(0).levels(first[:, self.order[0]].repeat(count))
        levels, error = _sweep(left.repeat(1, count), self.inverse, columns, start)
        # of the tries, row by row, the one whose sweep has cost least
        found = list(zip(levels.split(len(target), 1), tries, error.split(len(target)), strict=True))
        (levels, steps, best), picked = found[0], torch.zeros(len(target), dtype=torch.int64, device=target.device)
        for place, (others, other, new) in enumerate(found[1:], 1):
            wins = new < best
            levels, best = torch.where(wins, others, levels), torch.where(wins, new, best)
            steps, picked = steps.merged(other, wins), torch.where(wins, place, picked)
        columns = _Columns(steps, self.order)
        for _ in range(polish):
            _descend(left, levels, self.gram, columns)
        return levels, picked


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
    """Levels of all columns in their order, inputs first, those of the first as they are given, and what they cost each
    row, as the damped matrix sees it; ``left`` is changed."""
    count = len(left)
    levels, cost = torch.empty_like(left), left.new_zeros(left.shape[1])
    scales = 1 / inverse.diagonal()
    for start in range(0, count, _BATCH):
        stop = min(count, start + _BATCH)
        errors = torch.empty_like(left[start:stop])
        for place in range(start, stop):
            own = steps.part(place)
            levels[place] = own.levels(left[place]) if place or first is None else first
            error = errors[place - start] = (left[place] - own.values(levels[place])) * scales[place]
            left[place + 1 : stop].addr_(inverse[place, place + 1 : stop], error, alpha=-1)
        left[stop:].addmm_(inverse[start:stop, stop:].t(), errors, alpha=-1)
        cost += errors.square_().sum(0)
    return levels, cost


def _descend(target: Any, levels: Any, gram: Any, steps: _Columns) -> None:
    """Let each column in turn take its best level while all others stay; ``levels`` is changed."""
    count = len(target)
    off = target.clone()
    for place in range(count):
        off[place] -= steps.part(place).values(levels[place])
    pull = gram @ off
    inverse = 1 / gram.diagonal()
    for start in range(0, count, _BATCH):
        stop = min(count, start + _BATCH)
        moves = torch.empty_like(levels[start:stop])
        for place in range(start, stop):
            own = steps.part(place)
            now = own.values(levels[place])
            levels[place] = own.levels(now + pull[place] * inverse[place])
            move = moves[place - start] = own.values(levels[place]) - now
            pull[place + 1 : stop].addr_(gram[place, place + 1 : stop], move, alpha=-1)
        pull[stop:].addmm_(gram[start:stop, stop:].t(), moves, alpha=-1)


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
    work = base.flip(0, 1).double()  # as few matrices at a time as can be: they are the greatest that there are
    work.diagonal().add_(share)
    work, failed = torch.linalg.cholesky_ex(work)
    if failed.item():
        return None
    work = work.flip(0, 1)
    _invert(work)
    return work.float() if torch.isfinite(work.diagonal()).all() else None


def _invert(upper: Any) -> None:
    """Put the inverse of an upper triangular matrix in its place."""
    if len(upper) <= _BATCH:
        upper.copy_(torch.linalg.solve_triangular(upper, torch.eye(len(upper)).to(upper), upper=True))
        return
    half = len(upper) // 2
    left, beside, right = upper[:half, :half], upper[:half, half:], upper[half:, half:]
    _invert(left)
    _invert(right)
    beside.copy_((left @ beside @ right).neg_())
