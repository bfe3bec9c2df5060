"""Return freed memory to the operating system."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any


def return_freed_memory() -> None:
    """Return the memory that this process has freed, where the allocator can do that.

    glibc keeps what a closed session has freed, in pieces between the memory of others, and takes
    new memory for the large tensors of the next session.
    """
    trim = _malloc_trim()
    if trim is not None:
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
