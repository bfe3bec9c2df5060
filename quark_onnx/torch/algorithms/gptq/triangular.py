"""Symmetric matrices stored as one triangle, and their factors; in place, panel by panel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from quark_onnx.torch.runtime.threads import one_thread

#: Columns of a panel: a product with so many is as fast as with all, and with so few, little is
#: computed twice.
PANEL = 256
#: Rows that are copied at once.
_ROWS = 128


def panels(count: int, width: int = PANEL) -> Iterator[tuple[int, int]]:
    """Where panels start and stop.

    >>> list(panels(5, 2))
    [(0, 2), (2, 4), (4, 5)]
    """
    return ((start, min(count, start + width)) for start in range(0, count, width))


def add_products(total: Any, x: Any) -> None:
    """Add x^T x to the upper half of a matrix.

    Below its diagonal, what is nearest to it changes, too.

    Args:
        total: (inputs, inputs); changed.
        x: (tokens, inputs).
    """
    for start, stop in panels(len(total)):
        total[start:stop, start:].addmm_(x[:, start:stop].t(), x[:, start:])


def mirror(total: Any) -> None:
    """Put the upper half of a matrix below its diagonal, too."""
    for start, stop in panels(len(total), _ROWS):
        own = total[start:stop, start:stop].triu_()
        own.add_(own.triu(1).t())
        total[stop:, start:stop].copy_(total[start:stop, stop:].t())


def quadratic(off: Any, matrix: Any, diagonal: Any) -> Any:
    """The form x S x of each row x, (rows,), of a symmetric matrix S whose upper half is read.

    Args:
        off: (rows, inputs).
        matrix: (inputs, inputs), S above its diagonal.
        diagonal: (inputs,), that of S.

    >>> quadratic(torch.tensor([[1.0, 2.0]]), torch.tensor([[9.0, 3.0], [9.0, 9.0]]), torch.tensor([1.0, 1.0]))
    tensor([17.])
    """  # noqa: E501
    total = off.new_zeros(len(off))
    for start, stop in panels(len(matrix)):
        upper = matrix[start:stop, start:].triu(1)
        upper.diagonal().copy_(diagonal[start:stop] / 2)
        total += (off[:, start:] @ upper.t()).mul_(off[:, start:stop]).sum(1)
    return total.mul_(2)


def turned(matrix: Any, order: Any) -> Any:
    """A symmetric matrix with its rows and columns in an order, in float32.

    Args:
        matrix: (inputs, inputs), both halves.
        order: (inputs,) int64.
    """
    found = matrix.new_empty(matrix.shape, dtype=torch.float32)
    for start, stop in panels(len(matrix), _ROWS):
        found[start:stop] = matrix.index_select(0, order[start:stop]).index_select(
            1,
            order,
        )
    return found


def upside_down(matrix: Any, out: Any) -> None:
    """Put a matrix upside down, and its right side left, into another of any type."""
    count = len(matrix)
    for start, stop in panels(count, _ROWS):
        out[start:stop] = matrix[count - stop : count - start].flip(0, 1)


def factored(work: Any) -> bool:
    """Put the lower factor T of a symmetric matrix A = T^T T, upside down, in the place of A upside
    down.

    It is the transposed Cholesky factor, and takes as long. One thread factors it: with several,
    bits would depend on how many there are.

    Args:
        work: (inputs, inputs) float32, contiguous; its upper half is read.

    Returns:
        Whether there is one; what is in the matrix is of no use otherwise.
    """
    columns = work.t()  # as LAPACK has matrices
    failed = torch.empty((), dtype=torch.int32, device=work.device)
    with one_thread():
        torch.linalg.cholesky_ex(columns, out=(columns, failed))
    return not failed.item() and bool(torch.isfinite(work.diagonal()).all())


def put_below(factor: Any, matrix: Any) -> None:
    """Put a lower triangle that is upside down on and below the diagonal of a matrix."""
    count = len(matrix)
    for start, stop in panels(count, _ROWS):
        own = factor[count - stop : count - start].flip(0, 1)
        matrix[start:stop, :start] = own[:, :start]
        square = own[:, start:stop].to(matrix.dtype)
        matrix[start:stop, start:stop].triu_(1).add_(square.tril_())
