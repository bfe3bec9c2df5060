"""Return freed memory to the operating system."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

#: Bytes that are worth the walk through the heap, which takes 20 ms after an import of torch.
_LEAST = 1 << 23


def return_freed_memory(freed: int = _LEAST) -> None:
    """Return the memory that this process has freed, where the allocator can do that.

    glibc keeps what a closed session has freed, in pieces between the memory of others, and takes
    new memory for the large tensors of the next session.

    Args:
        freed: about how many bytes have been freed; nothing is done for few.
    """
    trim = _malloc_trim()
    if trim is not None and freed >= _LEAST:
        trim(0)


@cache
def _malloc_trim() -> Any:
    """Return glibc's ``malloc_trim``; None for other allocators."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):  # musl
        return None
