"""Memory of this process: how much it has, and giving free memory back: glibc keeps what lies between small objects."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

_STATUS = Path("/proc/self/statm")
#: Of a process with torch and transformers in it, where the system does not tell.
_USUAL = 450 << 20


def resident() -> int:
    """Bytes of this process that are in memory now, files that are mapped into it included."""
    try:
        return int(_STATUS.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, AttributeError):  # another system
        return _USUAL


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
