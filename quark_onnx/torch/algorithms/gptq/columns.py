"""Round the columns of a weight in order, with error feedback to the columns that follow.

All that is done for a column alone is done by few operations on tensors that are there already, in
one thread: a column takes its time for each of them, however short it is.
"""

from __future__ import annotations

from typing import Any

import torch

from quark_onnx.torch.algorithms.gptq.levels import TensorLevels
from quark_onnx.torch.runtime.threads import one_thread

#: Columns whose effect on the columns behind is gathered before it is applied; and those of such a
#: part.
BLOCK = 256
_PART = 64


class Columns:
    """Steps of columns in their order, inputs first.

    Args:
        steps: those of the weight.
        order: of its columns.
    """

    def __init__(self, steps: TensorLevels, order: Any) -> None:
        scale = steps.scale.t().contiguous()
        if steps.zero is None:
            zero = torch.zeros_like(scale)
        else:
            zero = steps.zero.t().contiguous()
        # a scale may be less than what has an inverse; what it belongs to is 0 then
        inverse = scale.reciprocal().clamp_(max=torch.finfo(torch.float32).max)
        self._nearest = steps.nearest
        self._offset = zero * scale
        self._rows = list(
            zip(
                *(part.unbind(0) for part in (steps.base(zero), inverse, scale)),
                strict=True,
            ),
        )
        self._place = order // steps.size
        self._places: list[int] = self._place.tolist()

    def move(self, place: int, value: Any, beside: Any, level: Any, out: Any) -> None:
        """Put how far a column moves to the level nearest to a value, all (rows,).

        Args:
            beside: what level 0 stands for, less what the column is.
            level: that of the column, afterwards.
        """
        base, inverse, scale = self._rows[self._places[place]]
        torch.addcmul(base, value, inverse, out=level)
        torch.addcmul(beside, self._nearest(level), scale, out=out)

    def offset(self, start: int, stop: int) -> Any:
        """What level 0 stands for in some columns, negated: (columns, rows)."""
        return self._offset.index_select(0, self._place[start:stop])


class Turns:
    """What is needed to round blocks of columns, one column after the other.

    Args:
        columns: their steps.
        like: (any, rows) float32.
    """

    def __init__(self, columns: Columns, like: Any) -> None:
        rows = like.shape[1]
        self._columns = columns
        self._left = like.new_empty(BLOCK, rows)
        self._beside = like.new_empty(BLOCK, rows)
        self._moves = like.new_empty(_PART, rows)
        self._level = like.new_empty(rows)
        self._shares = like.new_empty(BLOCK, BLOCK)
        # looking at parts of tensors takes time, too
        self._views = (
            self._left.unbind(0),
            self._beside.unbind(0),
            self._moves.unbind(0),
        )
        self._before = [self._moves[:count].t() for count in range(_PART)]
        self._coefficients = [
            self._shares[place, place - place % _PART : place] for place in range(BLOCK)
        ]

    def left(self, count: int) -> Any:
        """(count, rows), where the caller puts what columns of a block would best be before they
        are rounded, if none of the block moved.
        """
        return self._left[:count]

    def take(
        self,
        start: int,
        now: Any,
        shares: Any,
        moves: Any,
        first: Any = None,
    ) -> None:
        """Round the columns of a block; ``left`` then holds what each of them would best have been.

        Args:
            start: the first of the columns.
            now: (count, rows) what they are.
            shares: (count, count), below the diagonal: how much of the move of one column, along
                the rows, the next best value of another is less by.
            moves: (count, rows), how far each column moves away from what it is; changed.
            first: (rows,) what the first column is rounded from; None for what is best.
        """
        count = len(now)
        self._shares[:count, :count] = shares
        torch.sub(
            self._columns.offset(start, start + count).neg_(),
            now,
            out=self._beside[:count],
        )
        for part in range(0, count, _PART):
            stop = min(count, part + _PART)
            if part:
                self._left[part:stop].addmm_(
                    self._shares[part:stop, :part],
                    moves[:part],
                    alpha=-1,
                )
            with one_thread():
                self._part(start, part, stop, first if not part else None)
            moves[part:stop] = self._moves[: stop - part]

    def _part(self, start: int, part: int, stop: int, first: Any) -> None:
        lefts, besides, moves = self._views
        level = self._level
        move = self._columns.move
        for place in range(part, stop):
            left = lefts[place]
            index = place - part
            if index:
                left.addmv_(self._before[index], self._coefficients[place], alpha=-1)
            move(
                start + place,
                left if index or first is None else first,
                besides[place],
                level,
                moves[index],
            )
