"""Give memory that is free back to the system: glibc keeps what lies between small objects that live on."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


def give_back() -> None:
    """Return free memory, where the C library can be asked to."""
    if (trim := _trim()) is not None:
        trim(0)


@cache
def _trim() -> Any:
    try:
        return ctypes.CDLL("libc.so.6").malloc_trim
    except (OSError, AttributeError):  # another system, or another library
        return None
