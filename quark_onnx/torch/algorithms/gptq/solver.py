"""GPTQ's column sweep in torch: later columns compensate the rounding error of earlier ones.

The counterpart of :mod:`quark_onnx.kernels.gptq` where the weights are, on a CPU or a GPU. Follows
Frantar et al. 2023, "GPTQ", and for what happens behind the sweep Behdin et al. 2023, "QuantEase":
one column after the other takes the level that is best while all others stay. The sweep is Babai's:
with A = T^T T for the damped matrix and T lower
triangular, errors e cost |T e|^2, whose terms are made small one after the other; the same as GPTQ's, which has the
inverse of T, as Chen et al. 2025, "The Geometry of LLM Quantization: GPTQ as Babai's Nearest Plane Algorithm", show.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import frexp
from typing import Any, NamedTuple

import torch

from quark_onnx.torch.algorithms.gptq.columns import BLOCK, Columns, Turns
from quark_onnx.torch.algorithms.gptq.levels import TensorLevels
from quark_onnx.torch.algorithms.gptq.triangular import (
    factored,
    panels,
    put_below,
    quadratic,
    turned,
    upside_down,
)

#: Values that are swept at once, in rows: so many that steps are few, and memory is bounded.
AT_ONCE = 1 << 22
#: Values whose losses are taken at once.
_JUDGED = 1 << 20
#: A product has the same bits for each part of so many rows, or a multiple, whatever stands beside
#: it.
_ALIKE = 16
#: Damping grows by this factor until the matrix can be factored, and no further than so often the
#: mean of the diagonal.
_ESCALATION = 10.0
_MOST_DAMPING = 1e4
#: The exponent of the greatest power of two in float32.
_GREATEST = 127


class Swept(NamedTuple):
    """A weight on the levels that were chosen.

    Attributes:
        values: (rows, inputs) float32, what the levels stand for, as near as float32 tells: how far
            it is off and what it was to reach, added up.
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
        matrix: (inputs, inputs) float32, columns in their order, divided by ``unit``: above its
            diagonal the products, on and below it the lower factor T of A = T^T T, the damped
            products.
        power: (inputs,) float32, the diagonal of the products, in the order and divided likewise.
        order: the columns in the order in which they are rounded.
        damping: the share of the mean of the diagonal that was added to it.
        ridge: (inputs,) float32, all that was added to the diagonal, as the weight has its columns.
        unit: a power of two.
    """

    matrix: Any
    power: Any
    order: Any
    damping: float
    ridge: Any
    unit: float

    @classmethod
    def of(
        cls,
        gram: Any,
        damping: float = 0.01,
        act_order: bool = True,
        *,
        keep: bool = True,
    ) -> Solver:
        """Factor the matrix.

        Args:
            gram: (inputs, inputs), sums of products of two inputs.
            damping: added to the diagonal, as a share of its mean; it grows where that does not
                suffice.
            act_order: begin with the columns whose inputs are largest.
            keep: whether the sums are used any more; their memory is used if not.
        """
        diagonal = gram.diagonal().clone()
        if act_order:
            order = torch.argsort(diagonal, descending=True, stable=True)
        else:
            order = torch.arange(len(gram))
        order = order.to(gram.device)
        mean = float(diagonal.mean(dtype=torch.float64)) or 1.0
        # a power of two, so that nothing is rounded: the least difference in sums may tip a code
        unit = 2.0 ** min(frexp(mean)[1], _GREATEST)
        work = turned(gram, order.flip(0)).div_(unit)
        if keep or gram.dtype != torch.float32:
            matrix = torch.empty_like(gram, dtype=torch.float32)
        else:
            matrix = gram
        upside_down(work, matrix)
        power = matrix.diagonal().clone()
        # inputs that were always zero: whatever their weights become, nothing changes
        dead = (diagonal == 0).float()
        plain = power.double() + dead[order]
        share = _escalate(
            lambda share: _factor(work, matrix, plain + share * mean / unit),
            damping,
        )
        put_below(work, matrix)
        return cls(matrix, power, order, share, dead * unit + share * mean, unit)

    def solve(self, columns: Any) -> Any:
        """The damped matrix's inverse times columns; (inputs, any) in the order of the weight."""
        lower = self.matrix.tril()
        turned = torch.linalg.solve_triangular(
            lower.t(),
            columns[self.order] / self.unit,
            upper=True,
        )
        found = torch.empty_like(columns)
        found[self.order] = torch.linalg.solve_triangular(lower, turned, upper=False)
        return found

    def losses(self, off: Any) -> Any:
        """The squared error of each output, (rows,), of a weight that is off by so much, (rows,
        inputs), without damping.
        """
        parts = (
            part.index_select(1, self.order) for part in off.split(self._rows(_JUDGED))
        )
        return torch.cat(
            [quadratic(part, self.matrix, self.power) for part in parts],
        ).mul_(self.unit)

    def ridged(self, values: Any, weight: Any) -> Any:
        """What damping adds to the squared error of each output, (rows,); (rows, inputs) each."""
        pairs = zip(
            *(each.split(self._rows(_JUDGED)) for each in (values, weight)),
            strict=True,
        )
        return torch.cat(
            [(own - wanted).square_() @ self.ridge for own, wanted in pairs],
        )

    def _rows(self, values: int) -> int:
        """How many rows have so many values, about."""
        return max(1, values // max(1, len(self.power)) // _ALIKE) * _ALIKE

    def rounded(
        self,
        target: Any,
        tries: Sequence[TensorLevels],
        polish: int = 0,
        first: Any = None,
    ) -> Swept:
        """A weight, (rows, inputs), on levels.

        Args:
            target: float32 of that shape, what is to be reached.
            tries: levels to choose from; each row takes those of one of them.
            polish: how often every column is looked at again.
            first: float32 of that shape; the column that comes first is rounded from here, and not
                from the target.
        """
        rows = self._rows(AT_ONCE // len(tries))
        values = torch.empty_like(target)
        cost = target.new_empty(len(target))
        place = torch.argsort(self.order)
        picked = torch.zeros(len(target), dtype=torch.int64, device=target.device)
        for start in range(0, len(target), rows):
            own = slice(start, start + rows)
            parts = [each.part(own) for each in tries]
            off, picked[own], damped = self._swept(
                target[own],
                parts,
                polish,
                None if first is None else first[own],
            )
            for left, right in panels(len(place), BLOCK):  # no copy of all is made
                moved = off.index_select(0, place[left:right]).t()
                torch.add(moved, target[own, left:right], out=values[own, left:right])
            cost[own] = damped * self.unit
        return Swept(values, picked, cost)

    def _swept(
        self,
        target: Any,
        tries: Sequence[TensorLevels],
        polish: int,
        first: Any,
    ) -> tuple[Any, Any, Any]:
        """Of some rows: how far values are off, inputs first, in their order; which try is best;
        and the cost, divided by ``unit``.
        """
        if first is None:
            start = None
        else:
            start = first[:, self.order[0]].repeat(len(tries))
        columns = Columns(TensorLevels.stacked(tries), self.order)
        off, seen, cost = self._sweep(
            target,
            len(tries),
            columns,
            start,
            seen=bool(polish),
        )
        off, seen, cost, steps, picked = _least(off, seen, cost, tries)
        if len(tries) > 1:
            columns = Columns(steps, self.order)
        for again in range(polish):
            cost = cost + self._descend(
                target,
                off,
                self._seen(off) if again else seen,
                columns,
            )
        return off, picked, cost

    def _ordered(self, target: Any, start: int, stop: int) -> Any:
        """Some of the columns in their order, (columns, rows): no copy of all of them is ever made."""  # noqa: E501
        return target.index_select(1, self.order[start:stop]).t().contiguous()

    def _sweep(
        self,
        target: Any,
        count: int,
        columns: Columns,
        first: Any,
        *,
        seen: bool,
    ) -> tuple[Any, Any, Any]:
        """How far values on levels are off, for all columns in their order, inputs first; what T
        makes of it; and what it costs each row, as the damped matrix sees it. Each is that of the
        tries side by side.

        Args:
            target: (rows, inputs).
            first: what the first column is rounded from, if not from the target.
            seen: whether what T makes of it is asked for; it is of no use otherwise.
        """
        off = target.new_empty(target.shape[1], len(target) * count)
        if seen:
            sight = torch.empty_like(off)
        else:
            sight = off[:0]
        cost = off.new_zeros(off.shape[1])
        turns = Turns(columns, off)
        for start, stop in panels(len(off), BLOCK):
            wanted = self._ordered(target, start, stop)
            if count > 1:
                wanted = wanted.repeat(1, count)
            diagonal = self.matrix.diagonal()[start:stop, None]
            shares = self.matrix[start:stop, :stop] / diagonal
            left = turns.left(stop - start)
            if start:
                torch.addmm(wanted, shares[:, :start], off[:start], alpha=-1, out=left)
            else:
                left.copy_(wanted)
            turns.take(
                start,
                wanted,
                shares[:, start:],
                off[start:stop],
                None if start else first,
            )
            left.sub_(wanted).sub_(off[start:stop]).mul_(-diagonal)
            if seen:
                sight[start:stop] = left
            cost += left.square_().sum(0)
        return off, sight, cost

    def _seen(self, off: Any) -> Any:
        """T times it."""
        found = torch.empty_like(off)
        for start, stop in panels(len(off)):
            torch.mm(
                self.matrix[start:stop, start:stop].tril(),
                off[start:stop],
                out=found[start:stop],
            )
            found[start:stop].addmm_(self.matrix[start:stop, :start], off[:start])
        return found

    def _descend(self, target: Any, off: Any, seen: Any, columns: Columns) -> Any:
        """Let each column in turn take its best level while all others stay.

        ``off`` and ``seen`` are changed.

        Args:
            target: (rows, inputs), what is to be reached.
            off: inputs first, how far values are off.
            seen: what T makes of ``off``.

        Returns:
            (rows,): how much the cost falls, as a negative number.
        """
        change = off.new_zeros(off.shape[1])
        turns = Turns(columns, off)
        power = self.power + self.ridge[self.order] / self.unit
        for start, stop in panels(len(off), BLOCK):
            diagonal = power[start:stop, None]
            left = turns.left(stop - start)
            own = seen[start:stop]
            now = self._ordered(target, start, stop).add_(off[start:stop])
            # the damped matrix times what is off, of which columns before have changed a part
            torch.mm(self.matrix[start:stop, start:stop].tril().t(), own, out=left)
            left.addmm_(self.matrix[stop:, start:stop].t(), seen[stop:])
            # of these, how far they have moved
            left.addmm_(self.matrix[:start, start:stop].t(), seen[:start])
            left.div_(-diagonal).add_(now)
            shares = self.matrix[start:stop, start:stop].triu(1).t() / diagonal
            turns.take(start, now, shares, own)
            off[start:stop] += own
            change += now.sub_(left).mul_(2).add_(own).mul_(own).mul_(diagonal).sum(0)
        return change


def _least(
    off: Any,
    seen: Any,
    cost: Any,
    tries: Sequence[TensorLevels],
) -> tuple[Any, Any, Any, TensorLevels, Any]:
    """Of tries side by side, row by row the one whose sweep has cost least, put where the first is.

    And its place.
    """
    rows = len(cost) // len(tries)
    (off, *others), (seen, *sights), (cost, *costs) = (
        each.split(rows, -1) for each in (off, seen, cost)
    )
    steps = tries[0]
    picked = torch.zeros(rows, dtype=torch.int64, device=cost.device)
    for place, (other, sight, new, own) in enumerate(
        zip(others, sights, costs, tries[1:], strict=True),
        1,
    ):
        wins = new < cost
        for own_part, others_part in ((off, other), (seen, sight), (cost, new)):
            torch.where(wins, others_part, own_part, out=own_part)
        steps = steps.merged(own, wins)
        picked = torch.where(wins, place, picked)
    return off, seen, cost, steps, picked


def _escalate(attempt: Callable[[float], bool], damping: float) -> float:
    """The least share that suffices."""
    share = damping
    while not attempt(share):
        share = max(share, 1e-6) * _ESCALATION
        if share > _MOST_DAMPING:
            raise ArithmeticError("the products of the inputs are not finite")
    return share


def _factor(work: Any, matrix: Any, diagonal: Any) -> bool:
    """Factor a matrix whose both halves are in another, with a diagonal of its own."""
    upside_down(matrix, work)
    work.diagonal().copy_(diagonal.flip(0))
    return factored(work)
