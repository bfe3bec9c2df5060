"""What is freed goes back to the system, and does not wait among small objects."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quark_onnx.torch.checkpoints import float_checkpoint
from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.runtime.memory import glibc
from tests.torch_models import llama, made, saved

#: What malloc is told by the user; another library would be malloc by the last.
TOLD = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
#: Arrays of 6 MB, between which lie small objects; a large one was freed before, as weights are.
#: Prints how much of what half of them had came back once they were gone.
SCRIPT = """
import ctypes
from quark_onnx.torch.runtime import memory
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
"""  # noqa: E501


@pytest.mark.skipif(glibc() is None, reason="the C library is not glibc")
def test_large_arrays_go_back_when_they_are_freed() -> None:
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(TOLD)
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        check=True,
        env=env,
    )
    assert float(done.stdout) > 0.9


@pytest.mark.skipif(glibc() is None, reason="the C library is not glibc")
def test_what_the_user_has_told_malloc_stays() -> None:
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(TOLD)
    }
    env["MALLOC_MMAP_THRESHOLD_"] = str(32 << 20)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        check=True,
        env=env,
    )
    assert float(done.stdout) < 0.1


def test_a_checkpoint_that_is_opened_sets_large_arrays_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, called = saved(made(llama()), tmp_path / "source"), list[bool]()
    monkeypatch.setattr(
        float_checkpoint, "set_large_apart", lambda: called.append(True)
    )
    FloatCheckpoint(source)
    assert called
