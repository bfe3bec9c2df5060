"""What the tests of exports share."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _one_table_of_operators() -> Iterator[None]:
    """Build torch's table of ONNX functions once.

    Each export builds it again, which takes more than half of the time of a small model.
    """
    from torch.onnx._internal.exporter import _registration

    registry = _registration.ONNXRegistry
    with pytest.MonkeyPatch.context() as patch:
        once = functools.cache(registry.from_torchlib)
        patch.setattr(registry, "from_torchlib", staticmethod(once))
        yield
