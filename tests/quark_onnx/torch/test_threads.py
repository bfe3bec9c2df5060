"""The number of threads changes no result, and is restored after code that needs one thread."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quark_onnx.common.registry import ALGORITHMS
from quark_onnx.torch.config.spec import TensorSpec
from quark_onnx.torch.formats import quantized_tensor
from quark_onnx.torch.formats.quantized_tensor import quantize
from quark_onnx.torch.runtime.reductions import total
from quark_onnx.torch.runtime.threads import on_threads, one_thread

ROOT = Path(__file__).parents[3]
#: Scheme and algorithm of each run, with fewer steps where training takes long.
RUNS = [
    ["fp8"],
    ["mxfp4"],
    ["uint4_wo_32", "gptq"],
    ["int8", "gptaq"],
    ["uint4_wo_32", "qronos"],
    ["uint4_wo_32", "hqq"],
    ["uint4_wo_32", "autoround:steps=4"],
    ["uint4_wo_32", "distill:steps=3,sequences=4"],
    ["uint4_wo_32", "awq:steps=6"],
    ["uint4_wo_32", "clip"],
    ["int8", "smoothquant"],
    ["int8", "autosmoothquant"],
    ["fp8", "rotation", "gptaq"],
    ["fp8", "quarot"],
    ["fp8", "spinquant:steps=2"],
]


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


def digests(threads: int) -> dict[str, object]:
    """Return the digests of all runs in a process with a number of threads."""
    # MKL would use fewer threads than told where a machine has fewer cores, and its own variable
    # goes before that of OpenMP.
    settings = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "MKL_DYNAMIC": "FALSE",
    }
    script = "tests.quark_onnx.torch.threads_script"
    done = subprocess.run(
        [sys.executable, "-m", script, json.dumps(RUNS), str(threads)],
        env=os.environ | settings,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("threads") == threads
    return found


@pytest.mark.slow
def test_the_number_of_threads_changes_no_bit() -> None:
    """Of any algorithm, and of static scales of activations."""
    named = {text.partition(":")[0] for run in RUNS for text in run}
    assert set(ALGORITHMS) <= named
    assert digests(1) == digests(2)


def test_total_is_the_sum_to_the_last_bit_with_any_threads() -> None:
    values = torch.randn(700, 257, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    sums = list[torch.Tensor]()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            sums.append(total(values.t()))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(sums[0], sums[1]) and torch.equal(sums[0], sums[2])
    exact = float(values.double().sum())
    assert float(sums[0]) == pytest.approx(exact, rel=1e-4)
    assert float(total(values, torch.float64)) == pytest.approx(exact, rel=1e-12)
    assert total(torch.empty(0)) == 0


@pytest.mark.parametrize("gradients", [True, False])
def test_threads_keep_the_mode_of_autograd(gradients: bool) -> None:
    weight = torch.ones(3, requires_grad=True)
    with torch.set_grad_enabled(gradients):
        results = on_threads(lambda factor: weight * factor, [1, 2, 3, 4])
    assert [result.requires_grad for result in results] == [gradients] * 4
    assert [float(result.detach().sum()) for result in results] == [3, 6, 9, 12]


def test_parts_of_a_weight_are_quantized_as_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(37, 96).bfloat16()
    for spec in (
        TensorSpec("uint4", symmetric=False, block_size=32),
        TensorSpec("fp8e4m3"),
        TensorSpec("int8", per_channel=True),
        TensorSpec("mxfp4e2m1"),
    ):
        whole = quantize(weight, spec)
        monkeypatch.setattr(quantized_tensor, "AT_ONCE", 5 * 96)
        parts = quantize(weight, spec)
        monkeypatch.undo()
        assert parts.codes.float().equal(whole.codes.float())
        assert parts.scale.float().equal(whole.scale.float())
