"""GPTQ's maths: round a weight column by column, with error feedback to later columns.

For a weight W and inputs X, the rounded weight Q minimizes |(Q - W) X|^2 = tr(E H E^T), with
E = Q - W and H = X^T X (X holds tokens as rows here). The letters are those of Frantar et al. 2023,
"GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers". ``_sweep`` and
``_round_block`` are the two loops of its Algorithm 1, with three differences:

- T takes the place of Hinv. The paper's Hinv is the upper Cholesky factor U of the inverse, H^-1 =
  U^T U. T = U^-T is lower triangular with H = T^T T, and is computed without an inverse.
- A column is updated by the errors of all earlier columns when its turn comes, instead of after
  each of them: target_i = w_i - sum_(j < i) T_ij / T_ii e_j.
- Err = T E, the paper's Err with the opposite sign. The loss is the sum of squares of Err, and the
  sweep minimizes the squares one after the other: Babai's nearest plane algorithm (Chen et al.
  2025, "The Geometry of LLM Quantization: GPTQ as Babai's Nearest Plane Algorithm").

Coordinate descent after the sweep follows Behdin et al. 2023, "QuantEase": each column takes the
best level while all other columns stay.

:mod:`quark_onnx.kernels.gptq` is the counterpart in numpy, for ONNX models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import frexp
from typing import NamedTuple

import torch

from quark_onnx.torch.algorithms.gptq.triangular import (
    factor_flipped,
    flip,
    panels,
    permute,
    quadratic_form,
    store_lower,
)
from quark_onnx.torch.algorithms.weight_rounding.levels import TensorLevels
from quark_onnx.torch.formats.affine import explicit_zero
from quark_onnx.torch.runtime.threads import one_thread

#: Columns whose feedback to later columns is applied as one product ("lazy batch updates").
BLOCK = 256
#: Columns of a panel, in which feedback is applied column by column.
_PANEL = 64
#: Elements that are swept at once, in whole rows: steps are few, and memory is bounded.
AT_ONCE = 1 << 22
#: Elements whose losses are computed at once.
LOSSES_AT_ONCE = 1 << 20
#: BLAS gives a row the same bits in any product whose number of rows is a multiple of 16.
_ROW_MULTIPLE = 16
#: Damping grows by this factor until the Hessian can be factored.
_ESCALATION = 10.0
#: The greatest damping that is tried, relative to the mean of the diagonal.
_MOST_DAMPING = 1e4
#: The exponent of the greatest power of two in float32.
_MAX_EXPONENT = 127


class Rounded(NamedTuple):
    """A rounded weight.

    Attributes:
        Q: (rows, inputs) float32, the values of the chosen levels within a rounding error of
            float32, as Q is the sum of target and error.
        choice: (rows,) int64, the index of the candidate with the least loss.
        cost: (rows,) float32, the squared error of each output with the damped Hessian.
    """

    Q: torch.Tensor
    choice: torch.Tensor
    cost: torch.Tensor


@dataclass(frozen=True)
class Solver:
    """The factored Hessian of a layer.

    Attributes:
        HT: (inputs, inputs) float32, in the order of rounding, divided by ``unit``. H is stored
            above the diagonal, and on and below the diagonal the lower factor T of the damped
            Hessian, H + ridge = T^T T.
        diagonal: (inputs,) float32, the diagonal of H, in that order and with that unit.
        order: (inputs,) int64, the columns in the order of rounding.
        damping: the damping that was used, relative to the mean of the diagonal.
        ridge: (inputs,) float32, the addition to the diagonal, in the order of the weight.
        unit: the power of two that H is divided by.
    """

    HT: torch.Tensor
    diagonal: torch.Tensor
    order: torch.Tensor
    damping: float
    ridge: torch.Tensor
    unit: float

    @classmethod
    def of(
        cls,
        H: torch.Tensor,
        damping: float = 0.01,
        act_order: bool = True,
        *,
        keep: bool = True,
    ) -> Solver:
        """Factor a Hessian.

        Args:
            H: (inputs, inputs), X^T X.
            damping: the addition to the diagonal, relative to its mean; multiplied by 10 until the
                factorization succeeds.
            act_order: round columns in the order of decreasing diagonal.
            keep: False lets the solver overwrite H.

        Raises:
            ArithmeticError: H is not finite.
        """
        diagonal = H.diagonal().clone()
        if act_order:
            order = torch.argsort(diagonal, descending=True, stable=True)
        else:
            order = torch.arange(len(H))
        order = order.to(H.device)
        # 1 for inputs that are all zero.
        mean = float(diagonal.mean(dtype=torch.float64)) or 1.0
        # a power of two divides without rounding; any other unit would change codes at ties
        unit = 2.0 ** min(frexp(mean)[1], _MAX_EXPONENT)
        # Flipped, since a Cholesky factorization of the flipped matrix gives T with H = T^T T.
        flipped = permute(H, order.flip(0)).div_(unit)
        if keep or H.dtype != torch.float32:
            HT = torch.empty_like(H, dtype=torch.float32)
        else:
            HT = H
        flip(flipped, HT)
        ordered = HT.diagonal().clone()
        # inputs that are always zero: H stays singular without damping, and the weight is free
        dead = (diagonal == 0).float()
        # Summed in float64 and rounded to float32 once.
        undamped = ordered.double() + dead[order]
        used_damping = _escalate(
            lambda tried: _factor(flipped, HT, undamped + tried * mean / unit),
            damping,
        )
        store_lower(flipped, HT)
        ridge = dead * unit + used_damping * mean
        return cls(HT, ordered, order, used_damping, ridge, unit)

    def solve(self, columns: torch.Tensor) -> torch.Tensor:
        """Multiply by the inverse of the damped Hessian.

        Args:
            columns: (inputs, any), in the order of the weight.

        Returns:
            The product, of the same shape.
        """
        # H + ridge = unit * T^T T: two triangular solutions.
        T = self.HT.tril()
        half_solved = torch.linalg.solve_triangular(
            T.t(), columns[self.order] / self.unit, upper=True
        )
        solved = torch.empty_like(columns)
        solved[self.order] = torch.linalg.solve_triangular(T, half_solved, upper=False)
        return solved

    def losses(self, E: torch.Tensor) -> torch.Tensor:
        """Return the squared error of each output, diag(E H E^T), without damping.

        Args:
            E: (rows, inputs), Q - W.

        Returns:
            (rows,).
        """
        losses = [
            quadratic_form(rows.index_select(1, self.order), self.HT, self.diagonal)
            for rows in E.split(self._row_count(LOSSES_AT_ONCE))
        ]
        return torch.cat(losses).mul_(self.unit)

    def damping_costs(self, Q: torch.Tensor, W: torch.Tensor) -> torch.Tensor:
        """Return the share of damping in the cost of each output, diag(E ridge E^T).

        Args:
            Q: (rows, inputs).
            W: (rows, inputs).

        Returns:
            (rows,).
        """
        count = self._row_count(LOSSES_AT_ONCE)
        pairs = zip(Q.split(count), W.split(count), strict=True)
        return torch.cat(
            [(rounded - weight).square_() @ self.ridge for rounded, weight in pairs],
        )

    def _row_count(self, elements: int) -> int:
        """Return a number of rows, a multiple of 16, with about the given elements."""
        multiples = elements // max(1, len(self.diagonal)) // _ROW_MULTIPLE
        return max(1, multiples) * _ROW_MULTIPLE

    def quantize(
        self,
        W: torch.Tensor,
        candidates: Sequence[TensorLevels],
        descent_passes: int = 0,
        first_column: torch.Tensor | None = None,
    ) -> Rounded:
        """Round a weight.

        Args:
            W: (rows, inputs) float32, the values to approximate.
            candidates: levels to choose from; each row takes the candidate with the least loss.
            descent_passes: passes of coordinate descent after the sweep.
            first_column: (rows, inputs) float32, whose column that is first in the order is rounded
                in place of W's; None for W.
        """
        # Rows are independent: chunks bound the memory of the sweep.
        count = self._row_count(AT_ONCE // len(candidates))
        Q = torch.empty_like(W)
        cost = W.new_empty(len(W))
        # The inverse permutation: where each column of the weight stands in the order of rounding.
        position = torch.argsort(self.order)
        choice = torch.zeros(len(W), dtype=torch.int64, device=W.device)
        for start in range(0, len(W), count):
            rows = slice(start, start + count)
            E, choice[rows], unscaled = self._quantize_rows(
                W[rows],
                [levels.part(rows) for levels in candidates],
                descent_passes,
                None if first_column is None else first_column[rows],
            )
            # block by block, since reordering E as a whole would make a copy of it
            for left, right in panels(len(position), BLOCK):
                E_block = E.index_select(0, position[left:right]).t()
                torch.add(E_block, W[rows, left:right], out=Q[rows, left:right])
            cost[rows] = unscaled * self.unit
        return Rounded(Q, choice, cost)

    def _quantize_rows(
        self,
        W: torch.Tensor,
        candidates: Sequence[TensorLevels],
        descent_passes: int,
        first_column: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Round some rows.

        Returns:
            E, (inputs, rows) in the order of rounding; the choices, (rows,); and the costs, (rows,)
            divided by ``unit``.
        """
        first_values = None
        if first_column is not None:
            first_values = first_column[:, self.order[0]].repeat(len(candidates))
        columns = ColumnLevels(TensorLevels.stacked(candidates), self.order)
        E, Err, cost = self._sweep(
            W, len(candidates), columns, first_values, keep_err=bool(descent_passes)
        )
        E, Err, cost, levels, choice = _choose(E, Err, cost, candidates)
        # The descent goes on with the chosen scales alone.
        if len(candidates) > 1:
            columns = ColumnLevels(levels, self.order)
        for descent_pass in range(descent_passes):
            # The first pass takes Err from the sweep; a pass leaves Err undefined.
            if descent_pass:
                Err = self._project(E)
            cost = cost + self._descend(W, E, Err, columns)
        return E, choice, cost

    def _ordered(self, W: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Return some columns in the order of rounding, (columns, rows).

        A copy of all columns would double the memory.
        """
        return W.index_select(1, self.order[start:stop]).t().contiguous()

    def _sweep(
        self,
        W: torch.Tensor,
        count: int,
        columns: ColumnLevels,
        first_column: torch.Tensor | None,
        *,
        keep_err: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Round all columns once, in order, by Algorithm 1 of the paper.

        Args:
            W: (rows, inputs).
            count: number of candidates, which are swept side by side.
            columns: the levels of all candidates.
            first_column: (count * rows,), the values to round in the first column; None for W.
            keep_err: return Err, which takes as much memory as E.

        Returns:
            E and Err, (inputs, count * rows), and the costs, (count * rows,).
        """
        E = W.new_empty(W.shape[1], len(W) * count)
        # An empty view, so that _choose handles both cases alike.
        Err = torch.empty_like(E) if keep_err else E[:0]
        cost = E.new_zeros(E.shape[1])
        for start, stop in panels(len(E), BLOCK):
            W_block = self._ordered(W, start, stop)
            if count > 1:
                # (columns, count * rows): the candidates lie side by side.
                W_block = W_block.repeat(1, count)
            diagonal = self.HT.diagonal()[start:stop, None]
            feedback = self.HT[start:stop, :stop] / diagonal
            # The errors of all earlier blocks in one product ("lazy batch updates").
            if start:
                target = torch.addmm(W_block, feedback[:, :start], E[:start], alpha=-1)
            else:
                target = W_block.clone()
            _round_block(
                columns,
                start,
                W_block,
                target,
                feedback[:, start:],
                E[start:stop],
                None if start else first_column,
            )
            # Err_i = T_ii (q_i - target_i), and target - W - E is target - Q.
            Err_block = target.sub_(W_block).sub_(E[start:stop]).mul_(-diagonal)
            if keep_err:
                Err[start:stop] = Err_block
            cost += Err_block.square_().sum(0)
        return E, Err, cost

    def _project(self, E: torch.Tensor) -> torch.Tensor:
        """Return Err = T E, (inputs, rows)."""
        Err = torch.empty_like(E)
        for start, stop in panels(len(E)):
            T_block = self.HT[start:stop, start:stop].tril()
            torch.mm(T_block, E[start:stop], out=Err[start:stop])
            Err[start:stop].addmm_(self.HT[start:stop, :start], E[:start])
        return Err

    def _descend(
        self, W: torch.Tensor, E: torch.Tensor, Err: torch.Tensor, columns: ColumnLevels
    ) -> torch.Tensor:
        """Move each column to the best level for fixed other columns.

        Args:
            W: (rows, inputs).
            E: (inputs, rows), changed in place.
            Err: (inputs, rows), T E; undefined afterwards.

        Returns:
            The change of the cost, (rows,), at most 0.
        """
        change = E.new_zeros(E.shape[1])
        # The curvature of a column: the diagonal of (H + ridge) / unit.
        damped = self.diagonal + self.ridge[self.order] / self.unit
        for start, stop in panels(len(E), BLOCK):
            diagonal = damped[start:stop, None]
            Err_block = Err[start:stop]
            Q_block = self._ordered(W, start, stop).add_(E[start:stop])
            # the gradient T^T Err of the block; rows before the block hold the moves of columns
            # that have changed since Err was computed, and enter by H
            T_block = self.HT[start:stop, start:stop].tril()
            target = T_block.t() @ Err_block
            target.addmm_(self.HT[stop:, start:stop].t(), Err[stop:])
            target.addmm_(self.HT[:start, start:stop].t(), Err[:start])
            # the minimum of a parabola: q - gradient / curvature
            target.div_(-diagonal).add_(Q_block)
            feedback = self.HT[start:stop, start:stop].triu(1).t() / diagonal
            # the moves of the block overwrite its Err
            moves = Err_block
            _round_block(columns, start, Q_block, target, feedback, moves)
            E[start:stop] += moves
            # the parabola at q + move minus that at q: diagonal * move * (2 (q - target) + move)
            change += (
                Q_block.sub_(target)
                .mul_(2)
                .add_(moves)
                .mul_(moves)
                .mul_(diagonal)
                .sum(0)
            )
        return change


def _round_block(  # noqa: PLR0913
    columns: ColumnLevels,
    start: int,
    W: torch.Tensor,
    target: torch.Tensor,
    feedback: torch.Tensor,
    E: torch.Tensor,
    first_column: torch.Tensor | None = None,
) -> None:
    """Round the columns of a block in order: the inner loop of Algorithm 1.

    A column of a few thousand rows takes less time than the calls that round it. The loop over
    columns therefore does few operations, in one thread.

    Args:
        start: the position of the block's first column.
        W: (count, rows), the weight.
        target: (count, rows), the optimal values of the columns before any column of the block is
            rounded; the feedback of the block is added in place.
        feedback: (count, count), below the diagonal: row i, column j is the share of column j's
            error that column i compensates.
        E: (count, rows), receives Q - W.
        first_column: (rows,), the values to round in the first column; None for the target.
    """
    # -zero * scale - W, for all columns of the block at once.
    bases = columns.zero_values(start, start + len(W)).neg_().sub_(W).unbind(0)
    level = torch.empty_like(W[0])
    # views are made at once: indexing a tensor takes as long as an operation on a short column
    targets = target.unbind(0)
    errors = E.unbind(0)
    for left, right in panels(len(W), _PANEL):
        # A matrix product for the earlier panels of the block; within a panel, column by column.
        if left:
            target[left:right].addmm_(feedback[left:right, :left], E[:left], alpha=-1)
        E_panel = E[left:right].t()
        feedback_rows = feedback[left:right, left:right].unbind(0)
        # threads that wait for each other at each short operation take 100 times as long on a
        # busy machine
        with one_thread():
            for i in range(left, right):
                # The errors of the columns of the panel that are already rounded.
                if count := i - left:
                    shares = feedback_rows[count].narrow(0, 0, count)
                    targets[i].addmv_(E_panel.narrow(1, 0, count), shares, alpha=-1)
                values = targets[i]
                if i == 0 and first_column is not None:
                    values = first_column
                columns.round_column(start + i, values, bases[i], level, errors[i])


class ColumnLevels:
    """The levels of each column, in the order of rounding.

    Args:
        levels: the levels of the weight.
        order: (inputs,) int64, the columns of the weight in the order of rounding.
    """

    def __init__(self, levels: TensorLevels, order: torch.Tensor) -> None:
        # (groups, rows): the scales of a column are contiguous.
        scale = levels.scale.t().contiguous()
        zero = explicit_zero(levels.zero, levels.scale).t().contiguous()
        # the reciprocal of a subnormal scale is infinite; inf * 0 would be no number
        inverse = scale.reciprocal().clamp_(max=torch.finfo(torch.float32).max)
        self._nearest = levels.nearest
        self._zero_values = zero * scale
        self._rounding = list(
            zip(
                levels.base(zero).unbind(0),
                inverse.unbind(0),
                scale.unbind(0),
                strict=True,
            ),
        )
        # The group of a column depends on its position in the weight, whatever the order of
        # rounding.
        self._groups = order // levels.size
        self._group_list: list[int] = self._groups.tolist()

    def round_column(
        self,
        position: int,
        target: torch.Tensor,
        base: torch.Tensor,
        level: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Round a column, and write the difference to the weight.

        Args:
            position: the position of the column in the order.
            target: (rows,), the values to round.
            base: (rows,), the value of level 0 minus the weight.
            level: (rows,), receives the levels.
            out: (rows,), receives Q - W.
        """
        # level = nearest(target / scale + zero); Q - W = (level - zero) * scale - W, with base =
        # -zero * scale - W.
        start, inverse, scale = self._rounding[self._group_list[position]]
        torch.addcmul(start, target, inverse, out=level)
        torch.addcmul(base, self._nearest(level), scale, out=out)

    def zero_values(self, start: int, stop: int) -> torch.Tensor:
        """Return ``zero * scale`` of some columns: the value of level 0, negated.

        Args:
            start: the position of the first column.
            stop: the position after the last column.

        Returns:
            (columns, rows).
        """
        return self._zero_values.index_select(0, self._groups[start:stop])


def _choose(
    E: torch.Tensor,
    Err: torch.Tensor,
    cost: torch.Tensor,
    candidates: Sequence[TensorLevels],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, TensorLevels, torch.Tensor]:
    """Select the candidate with the least cost for each row.

    Args:
        E: (inputs, candidates * rows).
        Err: like E, or empty.
        cost: (candidates * rows,).

    Returns:
        E, Err, cost, levels and the index of the chosen candidate of each row. E, Err and cost are
        views of the first candidate, which is overwritten.
    """
    rows = len(cost) // len(candidates)
    errors = E.split(rows, -1)
    projections = Err.split(rows, -1)
    costs = cost.split(rows, -1)
    levels = candidates[0]
    choice = torch.zeros(rows, dtype=torch.int64, device=cost.device)
    for index in range(1, len(candidates)):
        # Strictly less: of equal candidates the first one stays.
        wins = costs[index] < costs[0]
        for per_candidate in (errors, projections, costs):
            torch.where(
                wins, per_candidate[index], per_candidate[0], out=per_candidate[0]
            )
        levels = levels.merged(candidates[index], wins)
        choice = torch.where(wins, index, choice)
    return errors[0], projections[0], costs[0], levels, choice


def _escalate(attempt: Callable[[float], bool], damping: float) -> float:
    """Multiply the damping by 10 until an attempt succeeds, and return it."""
    while not attempt(damping):
        # From 0, the escalation starts at 1e-5.
        damping = max(damping, 1e-6) * _ESCALATION
        if damping > _MOST_DAMPING:
            raise ArithmeticError("the products of the inputs are not finite")
    return damping


def _factor(flipped: torch.Tensor, H: torch.Tensor, diagonal: torch.Tensor) -> bool:
    """Factor H with another diagonal into ``flipped``; return whether H is positive definite."""
    flip(H, flipped)
    flipped.diagonal().copy_(diagonal.flip(0))
    return factor_flipped(flipped)
