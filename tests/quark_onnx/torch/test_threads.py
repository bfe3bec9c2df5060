"""A context in which one thread computes gives back the number of threads that there was."""

from __future__ import annotations

import pytest
import torch

from quark_onnx.torch.runtime.threads import one_thread


def test_threads_are_there_again_after_an_error() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with pytest.raises(KeyboardInterrupt), one_thread(), one_thread():
            assert torch.get_num_threads() == 1
            raise KeyboardInterrupt
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
