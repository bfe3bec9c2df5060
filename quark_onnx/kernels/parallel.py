"""Work on all cores that gives the same on any number of them: in parts of fixed size, each on one
core.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from calibrators.onnx_runtime.interrupt import Lanes

T = TypeVar("T")
R = TypeVar("R")


def slabs(count: int, size: int) -> list[slice]:
    """Consecutive parts of ``count`` things.

    >>> slabs(5, 2)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return [slice(start, min(count, start + size)) for start in range(0, count, size)]


def side_by_side(work: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """The results of some work, in order, made on all cores; few of them are alive at a time."""
    cores = os.cpu_count() or 1
    if len(items) == 1:
        yield work(items[0])
        return
    with Lanes(cores) as pool:
        todo = iter(items)
        running = [pool.submit(work, item) for item in islice(todo, 2 * cores)]
        while running:
            done = running.pop(0)
            result = done.result()
            running += [pool.submit(work, item) for item in islice(todo, 1)]
            yield result
