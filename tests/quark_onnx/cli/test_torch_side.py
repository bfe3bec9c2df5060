"""What the command line sets up for torch."""

from __future__ import annotations

import os

import pytest

from quark_onnx.cli.torch_side import torch_side


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"GOMP_SPINCOUNT"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY"}),
    ],
)
def test_threads_of_torch_wait_asleep_unless_told_otherwise(
    given: dict[str, str], expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    torch_side("quark_onnx.torch.config.schemes")
    found = {
        name for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY") if name in os.environ
    }
    assert found == expected
    assert all(os.environ[name] == value for name, value in given.items())
