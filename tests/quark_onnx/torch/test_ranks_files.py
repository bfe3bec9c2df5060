"""From file to file, two processes that share the data write what one process writes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from quark_onnx.cli.dispatch import main
from tests.torch_models import llama, made, saved

ROOT = Path(__file__).parents[3]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model of two blocks, and windows of tokens that make three batches."""
    rng = np.random.default_rng(0)
    np.save(tmp_path / "tokens.npy", rng.integers(0, 96, (24, 64)))
    return saved(made(llama()), tmp_path / "float")


def command(source: Path, output: str, *options: str) -> list[str]:
    """Arguments of the command line."""
    data = ["--data", str(source.parent / "tokens.npy"), "--length", "64"]
    target = ["-o", str(source.parent / output)]
    return ["llm", "ptq", str(source), *target, *data, *options]


def run_two(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run the command line in two processes on this machine."""
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*program, "--nproc-per-node", "2", "-m", "quark_onnx", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--scheme", "uint4_wo_32", "--no-verdict"],
        # ranges of activations are the same, in whatever order samples come
        ["--scheme", "fp8", "--html", "page.html", "--json", "out.json"],
        # sums over tokens have the order of the samples
        ["--scheme", "uint4_wo_32", "--algorithm", "gptq", "--no-verdict"],
        ["--scheme", "uint4_wo_32", "--algorithm", "awq", "--no-verdict"],
    ],
    ids=lambda options: "-".join(options[1:4:2]),
)
def test_equal_bytes(
    options: list[str], source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(source.parent)
    assert main([*command(source, "one", *options), "--quiet"]) == 0
    done = run_two(command(source, "two", *options))
    assert not done.returncode, done.stderr
    assert bytes_of(source.parent / "two") == bytes_of(source.parent / "one")
    assert done.stdout.count("14 layers are quantized") == 1
    assert {path.name for path in source.parent.iterdir()} <= {
        "float",
        "one",
        "two",
        "tokens.npy",
        "page.html",
        "out.json",
    }


@pytest.mark.slow
def test_windows_of_one_batch_are_shared(source: Path) -> None:
    """Eight windows of 64 tokens are one batch of one process, and two of two processes."""
    rng = np.random.default_rng(1)
    np.save(source.parent / "tokens.npy", rng.integers(0, 96, (8, 64)))
    options = ["--scheme", "fp8", "--no-verdict"]
    done = run_two(command(source, "two", *options))
    assert not done.returncode, done.stderr
    assert main(command(source, "one", *options)) == 0
    one, two = (
        load_file(source.parent / name / "model.safetensors") for name in ("one", "two")
    )
    assert list(one) == list(two)
    for name, tensor in one.items():
        # products of batches of another size may have other last bits
        torch.testing.assert_close(two[name].float(), tensor.float(), rtol=1e-5, atol=0)


@pytest.mark.slow
def test_fewer_windows_than_processes(source: Path) -> None:
    np.save(source.parent / "tokens.npy", np.zeros((1, 64), np.int64))
    done = run_two(command(source, "two", "--scheme", "fp8", "--no-verdict"))
    assert done.returncode
    assert (
        "each of 2 processes needs a calibration window, and there are" in done.stderr
    )
    assert not (source.parent / "two").exists()


@pytest.mark.slow
def test_one_process_stores_finished_blocks(source: Path) -> None:
    options = ["--scheme", "fp8", "--resume", str(source.parent / "kept")]
    done = run_two(command(source, "out", *options))
    assert done.returncode
    assert "finished blocks are stored by a single process" in done.stderr
    assert not (source.parent / "out").exists()
