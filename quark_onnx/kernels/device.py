"""Choose where arrays are processed: numpy on the CPU, or torch on a GPU.

The only module outside ``quark_onnx.torch`` that imports torch, and only where a GPU may be.
"""

from __future__ import annotations

import ctypes
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

#: Names of devices.
DEVICES = ("auto", "cpu", "cuda")
#: Drivers of GPUs: loadable libraries, and a file. Without any, torch is not imported.
_DRIVERS = ("libcuda.so.1", "nvcuda.dll")
_DRIVER_FILE = Path("/dev/kfd")


@dataclass(frozen=True)
class Device:
    """A module with the functions of numpy, and the place of its arrays.

    Attributes:
        xp: numpy or torch.
        place: torch's name of the device; empty for numpy.
    """

    xp: Any = np
    place: str = ""

    @property
    def parallel(self) -> bool:
        """Whether a single operation occupies the full device."""
        return self.place not in ("", "cpu")

    def put(self, array: Any) -> Any:
        """Return a numpy array as an array of the device."""
        if self.place:
            # A copy: from_numpy shares memory, and warns of arrays that cannot be written.
            return self.xp.from_numpy(np.array(array)).to(self.place)
        return array

    def get(self, array: Any) -> Any:
        """Return an array of the device as a numpy array."""
        if self.place:
            return array.cpu().numpy()
        return array


def device_for(name: str) -> Device:
    """Return the device of a name; "auto" is a GPU if torch sees one.

    Raises:
        LookupError: there is no such device.
    """
    # The driver comes first: the import of torch takes seconds.
    if name == "cpu" or (name == "auto" and not (has_driver() and sees_gpu())):
        return Device()
    if not sees_gpu():
        raise LookupError("torch is not installed, or sees no GPU")
    import torch

    return Device(torch, "cuda")


@cache
def has_driver() -> bool:
    """Return whether a GPU driver is present.

    Importing torch only to find none would take seconds.
    """
    for library in _DRIVERS:
        try:
            ctypes.CDLL(library)
        # The library is missing, or of another platform.
        except OSError:
            continue
        return True
    # The device of AMD's driver (ROCm).
    return _DRIVER_FILE.exists()


@cache
def sees_gpu() -> bool:
    """Return whether torch is installed and has a GPU."""
    # find_spec looks for the package without importing it.
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())
