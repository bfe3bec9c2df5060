"""Where arrays are worked on: numpy on the processor, or torch on a GPU. The one module that
imports torch, and only where a GPU may be.
"""

from __future__ import annotations

import ctypes
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

#: How a device may be called.
DEVICES = ("auto", "cpu", "cuda")
#: Drivers of GPUs: libraries that can be loaded, and a file. Without one of them torch need not
#: even be asked.
_DRIVERS, _DRIVER_FILE = ("libcuda.so.1", "nvcuda.dll"), Path("/dev/kfd")


@dataclass(frozen=True)
class Device:
    """A module with the functions of numpy, and its arrays.

    Attributes:
        xp: numpy or torch.
        place: what torch calls the device; empty for numpy.
    """

    xp: Any = np
    place: str = ""

    @property
    def parallel(self) -> bool:
        """Whether one operation occupies all of it, so that there is no sense in doing several at a
        time.
        """
        return self.place not in ("", "cpu")

    def put(self, array: Any) -> Any:
        """An array of numpy as one of the device."""
        return (
            self.xp.from_numpy(np.array(array)).to(self.place) if self.place else array
        )

    def get(self, array: Any) -> Any:
        """The reverse of ``put``."""
        return array.cpu().numpy() if self.place else array


def device_for(name: str) -> Device:
    """The device that is called so; "auto" is a GPU where torch sees one.

    Raises:
        LookupError: there is no such device.
    """
    if name == "cpu" or (name == "auto" and not (_driven() and _sees_gpu())):
        return Device()
    if not _sees_gpu():
        raise LookupError("torch is not installed, or sees no GPU")
    import torch

    return Device(torch, "cuda")


@cache
def _driven() -> bool:
    """Whether there is a driver of a GPU.

    To import torch only to hear that there is none would take seconds.
    """
    for library in _DRIVERS:
        try:
            ctypes.CDLL(library)
        except OSError:
            continue
        return True
    return _DRIVER_FILE.exists()


@cache
def _sees_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())
