"""Round the columns of a weight in order, with error feedback to the columns that follow.

A column of a few thousand rows takes less time than the calls that round it. The loop over columns
therefore does few operations, on preallocated tensors, in one thread.
"""

from __future__ import annotations

from typing import Any

import torch

from quark_onnx.torch.algorithms.weight_rounding.levels import TensorLevels
from quark_onnx.torch.formats.affine import explicit_zero
from quark_onnx.torch.runtime.threads import one_thread

#: Columns whose feedback to later columns is applied as one product ("lazy batch updates").
BLOCK = 256
#: Columns of a block whose feedback is applied column by column.
_PART = 64


class ColumnLevels:
    """The levels of each column, in the order of rounding.

    Args:
        levels: the levels of the weight.
        order: (inputs,) int64, the columns of the weight in the order of rounding.
    """

    def __init__(self, levels: TensorLevels, order: Any) -> None:
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
            base: (rows,), the value of level 0 less the weight.
            level: (rows,), receives the levels.
            out: (rows,), receives Q - W.
        """
        # level = nearest(target / scale + zero); Q - W = (level - zero) * scale - W, with base =
        # -zero * scale - W.
        start, inverse, scale = self._rounding[self._group_list[position]]
        torch.addcmul(start, target, inverse, out=level)
        torch.addcmul(base, self._nearest(level), scale, out=out)

    def zero_values(self, start: int, stop: int) -> Any:
        """Return ``zero * scale`` of some columns: the value of level 0, negated.

        Args:
            start: the position of the first column.
            stop: the position after the last column.

        Returns:
            (columns, rows).
        """
        return self._zero_values.index_select(0, self._groups[start:stop])


class ColumnRounder:
    """Round blocks of columns, column by column.

    Args:
        levels: the levels of the columns.
        like: (any, rows) float32, for the number of rows and the device.
    """

    def __init__(self, levels: ColumnLevels, like: Any) -> None:
        rows = like.shape[1]
        self._levels = levels
        self._target = like.new_empty(BLOCK, rows)
        self._base = like.new_empty(BLOCK, rows)
        self._E = like.new_empty(_PART, rows)
        self._level = like.new_empty(rows)
        self._feedback = like.new_empty(BLOCK, BLOCK)
        # views are made once: indexing a tensor takes as long as an operation on a short column
        self._target_rows = self._target.unbind(0)
        self._base_rows = self._base.unbind(0)
        self._E_rows = self._E.unbind(0)
        # (rows, count) and (count,): the errors of the part so far, and their feedback to a column.
        self._E_before = [self._E[:count].t() for count in range(_PART)]
        self._feedback_rows = [
            self._feedback[column, column - column % _PART : column]
            for column in range(BLOCK)
        ]

    def target(self, count: int) -> Any:
        """Return the buffer for the targets of a block, which the caller fills.

        Args:
            count: columns of the block.

        Returns:
            (count, rows): the optimal values of the columns before any column of the block is
            rounded. ``round_block`` adds the feedback of the block.
        """
        return self._target[:count]

    def round_block(
        self,
        start: int,
        W: torch.Tensor,
        feedback: torch.Tensor,
        E: torch.Tensor,
        first: torch.Tensor | None = None,
    ) -> None:
        """Round the columns of a block; the targets include all feedback afterwards.

        Args:
            start: the position of the block's first column.
            W: (count, rows), the weight.
            feedback: (count, count), below the diagonal: row i, column j is the share of column j's
                error that column i compensates.
            E: (count, rows), receives Q - W.
            first: (rows,), the values to round in the first column; None for the target.
        """
        count = len(W)
        self._feedback[:count, :count] = feedback
        # -zero * scale - W, for all columns of the block at once.
        torch.sub(
            self._levels.zero_values(start, start + count).neg_(),
            W,
            out=self._base[:count],
        )
        for part in range(0, count, _PART):
            stop = min(count, part + _PART)
            # A matrix product for the earlier parts of the block; within a part, column by column.
            if part:
                self._target[part:stop].addmm_(
                    self._feedback[part:stop, :part], E[:part], alpha=-1
                )
            # threads that wait for each other at each short operation take 100 times as long on a
            # busy machine
            with one_thread():
                self._round_part(start, part, stop, first if part == 0 else None)
            E[part:stop] = self._E[: stop - part]

    def _round_part(self, start: int, part: int, stop: int, first: Any) -> None:
        # local names: attribute look-ups count in this loop
        targets = self._target_rows
        bases = self._base_rows
        errors = self._E_rows
        level = self._level
        round_column = self._levels.round_column
        for column in range(part, stop):
            target = targets[column]
            index = column - part
            if index:
                target.addmv_(
                    self._E_before[index], self._feedback_rows[column], alpha=-1
                )
            round_column(
                start + column,
                target if index or first is None else first,
                bases[column],
                level,
                errors[index],
            )
