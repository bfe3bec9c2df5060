"""Two processes that share the data find what one finds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.quark_onnx.torch.ranks_script import quantized

ROOT = Path(__file__).parents[3]


def run(folder: Path, *what: str) -> subprocess.CompletedProcess[str]:
    """Two processes on this machine."""
    script = str(Path(__file__).with_name("ranks_script.py"))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        script,
    ]
    return subprocess.run(
        [*command, str(folder), *what],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "scheme", "algorithms"),
    [
        ("llama3", "int8", "autosmoothquant+gptaq"),
        ("llama3", "uint4_wo_32", "awq"),
        ("mixtral", "fp8", "gptq"),
        ("qwen3_moe", "mxfp4", "qronos"),
    ],
)
def test_two_processes_find_what_one_finds(
    family: str, scheme: str, algorithms: str, tmp_path: Path
) -> None:
    done = run(tmp_path, family, scheme, algorithms)
    assert not done.returncode, done.stderr
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    alone = quantized(family, scheme, algorithms)
    assert list(first) == list(second) == list(alone)
    # experts see few tokens, and their scales may differ in the last bit
    if "llama" in family:
        for name, tensor in alone.items():
            assert torch.equal(first[name], tensor), name
    same = total = 0
    for name, tensor in alone.items():
        assert torch.equal(first[name], second[name]), name  # to the bit
        if name.endswith(" scale"):
            torch.testing.assert_close(first[name], tensor, rtol=1e-5, atol=0)
        same += int(torch.isclose(first[name], tensor, rtol=1e-4, atol=1e-6).sum())
        total += tensor.numel()
    assert same > 0.99 * total


@pytest.mark.slow
def test_a_single_batch_is_split(tmp_path: Path) -> None:
    done = run(tmp_path, "llama3", "uint4_wo_32", "gptq", "one")
    assert not done.returncode, done.stderr
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    alone = quantized("llama3", "uint4_wo_32", "gptq", "one")
    for name, tensor in alone.items():
        assert torch.equal(first[name], second[name]), name
        # Hessians are summed in another order, with other last bits.
        same = torch.isclose(first[name], tensor, rtol=1e-4, atol=1e-6)
        assert same.float().mean() > 0.9, name


@pytest.mark.slow
def test_what_needs_all_samples_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "llama3", "uint4_wo_32", "autoround")
    assert (
        done.returncode
        and "autoround needs all samples at once; run it in one process" in done.stderr
    )
