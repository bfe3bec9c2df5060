"""Number of threads of torch operations: short operations are fastest on one thread.

Threads of an operation wait for the slowest thread. On a busy processor the wait may be a hundred
times longer than an operation of a few microseconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


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
