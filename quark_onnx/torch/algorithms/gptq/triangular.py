"""Cholesky factors of symmetric matrices in triangular storage, panel by panel.

A Hessian of 16,384 inputs takes 1 GiB in float32. Each function therefore works in place, or with
temporaries of a few panels.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quark_onnx.torch.runtime import distributed
from quark_onnx.torch.runtime.threads import one_thread

#: Columns of a panel: wide enough for a product at full speed, and narrow enough that little below
#: the diagonal is computed in vain.
PANEL = 256
#: Rows that are copied at once.
ROWS = 128


def panels(count: int, width: int = PANEL) -> Iterator[tuple[int, int]]:
    """Iterate over the first index and the end of each panel.

    Args:
        count: rows or columns of the matrix.
        width: rows or columns of a panel; the last panel may have fewer.

    >>> list(panels(5, 2))
    [(0, 2), (2, 4), (4, 5)]
    """
    return ((start, min(count, start + width)) for start in range(0, count, width))


def add_products(total: torch.Tensor, x: torch.Tensor) -> None:
    """Add X^T X to the upper triangle of a matrix.

    Each of several processes adds to its own panels. ``distributed.summed`` at the end completes
    the matrix exactly, since the panels of the other processes are zero.

    Args:
        total: (inputs, inputs), changed in place. Elements below the diagonal are undefined
            afterwards.
        x: (tokens, inputs).
    """
    for start, stop in distributed.dealt(list(panels(len(total)))):
        # Panel by panel from the diagonal on: half of the work of the full product.
        total[start:stop, start:].addmm_(x[:, start:stop].t(), x[:, start:])


def mirror(total: torch.Tensor) -> None:
    """Copy the upper triangle of a matrix to the lower one.

    Args:
        total: (inputs, inputs), changed in place.
    """
    for start, stop in panels(len(total), ROWS):
        # Below the diagonal of a square lie numbers that add_products left undefined.
        square = total[start:stop, start:stop].triu_()
        square.add_(square.triu(1).t())
        total[stop:, start:stop].copy_(total[start:stop, stop:].t())


def quadratic_form(
    rows: torch.Tensor, matrix: torch.Tensor, diagonal: torch.Tensor
) -> torch.Tensor:
    """Return x^T S x for each row x and a symmetric matrix S.

    Args:
        rows: (rows, inputs).
        matrix: (inputs, inputs), S above the diagonal; the other elements are not read.
        diagonal: (inputs,), the diagonal of S.

    Returns:
        (rows,).

    >>> S = torch.tensor([[9.0, 3.0], [9.0, 9.0]])
    >>> quadratic_form(torch.tensor([[1.0, 2.0]]), S, torch.tensor([1.0, 1.0]))
    tensor([17.])
    """
    total: torch.Tensor = rows.new_zeros(len(rows))
    for start, stop in panels(len(matrix)):
        # x^T S x = 2 x^T U x, with U the upper triangle and half of the diagonal
        upper = matrix[start:stop, start:].triu(1)
        upper.diagonal().copy_(diagonal[start:stop] / 2)
        total += (rows[:, start:] @ upper.t()).mul_(rows[:, start:stop]).sum(1)
    return total.mul_(2)


def permute(matrix: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return a symmetric matrix with rows and columns permuted, in float32.

    Args:
        matrix: (inputs, inputs), both triangles.
        order: (inputs,) int64, the old index of each new row and column.
    """
    permuted = matrix.new_empty(matrix.shape, dtype=torch.float32)
    for start, stop in panels(len(matrix), ROWS):
        # Rows first and then columns: at most ROWS rows are copied in between.
        rows = matrix.index_select(0, order[start:stop])
        permuted[start:stop] = rows.index_select(1, order)
    return permuted


def flip(matrix: torch.Tensor, out: torch.Tensor) -> None:
    """Reverse the rows and the columns of a matrix.

    Args:
        matrix: (inputs, inputs).
        out: (inputs, inputs) of any type, overwritten.
    """
    count = len(matrix)
    for start, stop in panels(count, ROWS):
        out[start:stop] = matrix[count - stop : count - start].flip(0, 1)


def factor_flipped(flipped: torch.Tensor) -> bool:
    """Replace A by the lower triangular T with A = T^T T; both matrices are stored flipped.

    A Cholesky factorization gives A = L L^T. On the flipped matrix it gives T^T T, at the same
    cost.

    Args:
        flipped: (inputs, inputs) float32, contiguous, overwritten; only the upper triangle is read.

    Returns:
        False for a matrix that is not positive definite, or not finite; the matrix is undefined
        then.
    """
    columns = flipped.t()  # LAPACK stores matrices by columns
    info = torch.empty((), dtype=torch.int32, device=flipped.device)
    # several threads would split sums by their number, and codes would depend on the machine
    with one_thread():
        torch.linalg.cholesky_ex(columns, out=(columns, info))
    return not info.item() and bool(torch.isfinite(flipped.diagonal()).all())


def store_lower(flipped: torch.Tensor, matrix: torch.Tensor) -> None:
    """Store a flipped lower triangle on and below the diagonal of a matrix.

    Args:
        flipped: (inputs, inputs), T as ``factor_flipped`` leaves it.
        matrix: (inputs, inputs), changed in place; elements above the diagonal are kept.
    """
    count = len(matrix)
    for start, stop in panels(count, ROWS):
        rows = flipped[count - stop : count - start].flip(0, 1)
        matrix[start:stop, :start] = rows[:, :start]
        square = rows[:, start:stop].to(matrix.dtype)
        matrix[start:stop, start:stop].triu_(1).add_(square.tril_())
