"""Run work on all cores, with results independent of the number of cores.

Parts have a fixed size, and each runs on a single core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from calibrators.onnx_runtime.cpu_features import available_cores
from calibrators.onnx_runtime.interrupt import Lanes

T = TypeVar("T")
R = TypeVar("R")


def slabs(count: int, size: int) -> list[slice]:
    """Return consecutive slices of ``count`` items.

    >>> slabs(5, 2)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return [slice(start, min(count, start + size)) for start in range(0, count, size)]


def side_by_side(work: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """Yield the results of work on items in order, computed on all cores, few in memory."""
    cores = available_cores()
    if len(items) == 1:
        yield work(items[0])
        return
    with Lanes(cores) as lanes:
        yield from lanes.in_order(work, items)
