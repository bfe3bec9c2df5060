"""Peak memory of this process."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def peak_mb() -> float:
    """Peak resident memory of this process image.

    Linux counts in ru_maxrss also the process that this one was forked from, so there its own status is read.
    """
    status = Path("/proc/self/status")
    if status.exists():
        lines = status.read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
