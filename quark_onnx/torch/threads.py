"""How many threads operations use: many short ones are best done by one.

Where an operation is shared, its threads wait for each other at its end. A processor that does other work, too, lets
them wait until it comes back to them: a hundred times longer than what takes a few microseconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """What is computed in this context is computed by one thread of the CPU.

    >>> with one_thread():
    ...     torch.get_num_threads()
    1
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
