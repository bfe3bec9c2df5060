"""Memory use of the process.

glibc maps large arrays by themselves, and unmaps them when freed, until the first large array is
freed. From then on, glibc keeps arrays up to that size (32 MB at most, the size of a layer's
weights) on the heap, where fragmentation keeps freed memory from other uses. A fixed threshold
prevents the change.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

_STATUS, _SYSTEM = Path("/proc/self/statm"), Path("/proc/meminfo")
#: Resident bytes of a process with torch and transformers, where the system reports none.
_USUAL = 450 << 20
#: Size of a large array in bytes. Smaller arrays are allocated too often: the system clears the
#: pages of every mapping.
_LARGE = 4 << 20
#: Free bytes that glibc keeps at the top of the heap: the value that glibc reaches by itself.
_KEPT = 64 << 20
#: The parameters of mallopt, from malloc.h.
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1


def resident() -> int:
    """Return the resident memory of the process in bytes, including mapped files."""
    try:
        # The second number of statm is the resident set in pages (proc(5)).
        return int(_STATUS.read_text(encoding="ascii").split()[1]) * os.sysconf(
            "SC_PAGE_SIZE",
        )
    except (OSError, AttributeError):  # another system
        return _USUAL


@cache
def set_large_apart() -> None:
    """Let glibc return large arrays to the system as soon as they are freed.

    The setting holds for the whole process. Environment variables of the user have priority. Call
    the function before the first large array is allocated.
    """
    if _is_set_by_user():
        return
    if (library := glibc()) is not None:
        # Either call ends glibc's own adjustment of both thresholds (mallopt(3)), so both are set.
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE)
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT)


def _is_set_by_user() -> bool:
    """Return whether the environment has settings of malloc."""
    # mallopt would override the environment's settings, which have two spellings.
    if any(name.startswith("MALLOC_") for name in os.environ):
        return True
    return "glibc.malloc" in os.getenv("GLIBC_TUNABLES", "")


@cache
def glibc() -> Any:
    """Load glibc, where the system has it."""
    try:
        library = ctypes.CDLL("libc.so.6")
    except OSError:
        return None
    # an extension of glibc, which another C library may lack
    return library if hasattr(library, "mallopt") else None


def available() -> int:
    """Return the bytes of memory available without swapping; 4 GiB if unknown."""
    try:
        lines = _SYSTEM.read_text(encoding="ascii").splitlines()
        entry = next(line for line in lines if line.startswith("MemAvailable:"))
        # /proc/meminfo counts in KiB.
        return int(entry.split()[1]) << 10
    except (OSError, StopIteration):  # another system
        return 4 << 30
