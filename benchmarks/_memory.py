"""Memory of this process."""

from __future__ import annotations

import resource
import sys
import threading
import time
from contextlib import suppress
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
    """The peak of a process's own memory from now on, without files that are mapped into it; looked
    at a thousand times a second. NaN where the system does not tell.

    Another process is watched better than this one, which waits while native code holds Python's
    lock.

    Attributes:
        start: memory now, in MB.
        mb: the peak so far, in MB.
    """

    def __init__(self, process: int | str = "self") -> None:
        self._status = Path(f"/proc/{process}/status")
        self.start = self.mb = float("nan")
        if self._status.exists():
            self.start = self.mb = _field("RssAnon", self._status)
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        # Both errors come when the process ends.
        with suppress(OSError, StopIteration):
            while True:
                self.mb = max(self.mb, _field("RssAnon", self._status))
                time.sleep(0.001)


def _field(name: str, status: Path = _STATUS) -> float:
    lines = status.read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024
