"""Round the columns of a weight in order, with error feedback to the columns that follow.

A column of a few thousand rows takes less time than the calls that round it. The loop over columns
therefore does few operations, in one thread.
"""

from __future__ import annotations

import torch

from quark_onnx.torch.algorithms.gptq.triangular import panels
from quark_onnx.torch.algorithms.weight_rounding.levels import TensorLevels
from quark_onnx.torch.formats.affine import explicit_zero
from quark_onnx.torch.runtime.threads import one_thread

#: Columns whose feedback to later columns is applied as one product ("lazy batch updates").
BLOCK = 256
#: Columns of a panel, in which feedback is applied column by column.
_PANEL = 64


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


def round_block(  # noqa: PLR0913
    columns: ColumnLevels,
    start: int,
    W: torch.Tensor,
    target: torch.Tensor,
    feedback: torch.Tensor,
    E: torch.Tensor,
    first_column: torch.Tensor | None = None,
) -> None:
    """Round the columns of a block in order, with error feedback within the block.

    This is the inner loop of Algorithm 1 (Frantar et al. 2023).

    Args:
        columns: the levels of the columns.
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
