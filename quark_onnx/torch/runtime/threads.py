"""How many threads operations use: many short ones are best done by one.

Where an operation is shared, its threads wait for each other at its end. A processor that does
other work, too, lets them wait until it comes back to them: a hundred times longer than what takes
a few microseconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """What is computed in this context is computed by one thread of the CPU.

    It is the thread that opens it whose operations are meant, and that has its number back
    afterwards; threads that are begun meanwhile stay with one, as torch has it.

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
