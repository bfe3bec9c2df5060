"""Number of threads of torch operations: short operations are fastest on one thread.

Threads of an operation wait for the slowest thread. On a busy processor the wait may be a hundred
times longer than an operation of a few microseconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to a single CPU thread within the context.

    The setting belongs to the thread that enters the context, and is restored at the end. Threads
    that start meanwhile keep one thread, as in torch.

    >>> with one_thread():
    ...     torch.get_num_threads()
    1
    """
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(threads)


def on_threads(
    function: Callable[[_Item], _Result], items: Iterable[_Item]
) -> list[_Result]:
    """Return the results of a function, called on as many threads as torch has.

    Each operation runs on one thread. Autograd is on or off as in the calling thread.

    >>> on_threads(lambda number: number + 1, [1, 2])
    [2, 3]
    """
    gradients = torch.is_grad_enabled()
    inference = torch.is_inference_mode_enabled()

    def called(item: _Item) -> _Result:
        with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
            return function(item)

    threads = torch.get_num_threads()
    with one_thread(), ThreadPoolExecutor(threads) as pool:
        return list(pool.map(called, items))
