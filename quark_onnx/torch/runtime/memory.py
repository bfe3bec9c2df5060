"""Memory of this process: its size, and returning free memory to the system, as glibc keeps
fragments.

It takes large arrays from the system, and gives them back at once, until the first one is freed:
from then on it keeps all that are not larger (up to 32 MB, as weights of a layer are) among small
objects, where what is free is of no use to others, by chance more or less of it. Told what is
large, it stays with that.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

_STATUS, _SYSTEM = Path("/proc/self/statm"), Path("/proc/meminfo")
#: Of a process with torch and transformers in it, where the system does not tell.
_USUAL = 450 << 20
#: Bytes that are large. Less would be asked for too often: each time the system hands out pages of
#: zeros.
_LARGE = 4 << 20
#: Free bytes behind the last small object that are kept: what glibc comes to by itself.
_KEPT = 64 << 20
#: What mallopt calls these, in malloc.h.
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1


def resident() -> int:
    """Bytes of this process that are in memory now, files that are mapped into it included."""
    try:
        return int(_STATUS.read_text(encoding="ascii").split()[1]) * os.sysconf(
            "SC_PAGE_SIZE",
        )
    except (OSError, AttributeError):  # another system
        return _USUAL


def release_memory() -> None:
    """Return free memory, where the C library can be asked to."""
    if (library := _glibc()) is not None:
        library.malloc_trim(0)


@cache
def set_large_apart() -> None:
    """From now on, and in the whole process, return large arrays as soon as they are freed, where
    the C library can be asked to, and the user has not told it something else. Best before the
    first one is made.
    """
    told = any(
        name.startswith("MALLOC_") for name in os.environ
    ) or "glibc.malloc" in os.getenv("GLIBC_TUNABLES", "")
    if not told and (library := _glibc()) is not None:
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE)
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT)


@cache
def _glibc() -> Any:
    """None for another library, or on another system."""
    try:
        library = ctypes.CDLL("libc.so.6")
    except OSError:
        return None
    return (
        library
        if hasattr(library, "malloc_trim") and hasattr(library, "mallopt")
        else None
    )


def available() -> int:
    """Bytes that the system can give without swapping; 4 GiB where it does not tell."""
    try:
        lines = _SYSTEM.read_text(encoding="ascii").splitlines()
        found = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(found.split()[1]) << 10
    except (OSError, StopIteration):  # another system
        return 4 << 30
