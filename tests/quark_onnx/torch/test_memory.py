"""What is freed goes back to the system, and does not wait among small objects."""

from __future__ import annotations

import subprocess
import sys

import pytest

from quark_onnx.torch.memory import _glibc

#: Arrays of 6 MB, between which lie small objects; a large one was freed before, as weights are. Prints how much of
#: what half of them had came back once they were gone.
SCRIPT = """
import ctypes, sys
from quark_onnx.torch import memory
if sys.argv[1:] == ["apart"]:
    memory.set_large_apart()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def filled(size):
    found = libc.malloc(size)
    ctypes.memset(found, 1, size)
    return found

libc.free(filled(30 << 20))
blocks = [filled(size) for _ in range(20) for size in (6 << 20, 64)]
before = memory.resident()
for block in blocks[::4]:
    libc.free(block)
print((before - memory.resident()) / (10 * (6 << 20)))
"""


@pytest.mark.skipif(_glibc() is None, reason="the C library is not glibc")
def test_large_arrays_go_back_when_they_are_freed() -> None:
    def share(*arguments: str) -> float:
        command = [sys.executable, "-c", SCRIPT, *arguments]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert share("apart") > 0.9
    assert share() < 0.1  # as it is without
