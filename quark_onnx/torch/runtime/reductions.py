"""Sums whose bits do not depend on the number of threads.

torch splits a sum of many elements to a single number over its threads: another number of threads
adds in another order. Sums along an axis are computed by one thread for each result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: Elements that are added as one row. torch splits sums of 32,768 elements and more.
_ROW = 4096


def total(values: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the sum of all elements, a tensor without axes.

    Args:
        values: the elements, of any shape.
        dtype: type of the sum; that of the elements if None.

    >>> import torch
    >>> total(torch.ones(3, 20_000))
    tensor(60000.)
    """
    flat = values.reshape(-1)
    # torch adds a sum of this size on one thread.
    if len(flat) <= _ROW:
        return flat.sum(dtype=dtype)
    whole = len(flat) // _ROW * _ROW
    # One partial sum for each row of (rows, 4096), each added by one thread.
    rows = flat[:whole].view(-1, _ROW).sum(1, dtype=dtype)
    # Partial sums are added by the same rule, so that the order is fixed for any size.
    return total(rows, dtype) + flat[whole:].sum(dtype=dtype)
