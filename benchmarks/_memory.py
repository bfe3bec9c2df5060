"""Memory of this process."""

from __future__ import annotations

import resource
import sys
import threading
import time
from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak_mb() -> float:
    """Peak resident memory of this process image.

    Linux counts in ru_maxrss also the process that this one was forked from, so there its own
    status is read.
    """
    if _STATUS.exists():
        return _field("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
        2**20 if sys.platform == "darwin" else 2**10
    )


class PrivatePeak:
    """The peak of this process's own memory from now on, without files that are mapped into it;
    looked at 200 times a second. NaN where the system does not tell.
    """

    def __init__(self) -> None:
        self.mb = 0.0 if _STATUS.exists() else float("nan")
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while _STATUS.exists():
            self.mb = max(self.mb, _field("RssAnon"))
            time.sleep(0.005)


def _field(name: str) -> float:
    lines = _STATUS.read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024
