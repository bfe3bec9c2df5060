"""What a run is said to take is what it takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quark_onnx.torch.checkpoint import Reader
from quark_onnx.torch.config import TorchConfig
from quark_onnx.torch.estimate import Estimate, estimate
from quark_onnx.torch.files import quantize_checkpoint
from quark_onnx.torch.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.quantize import chosen_layers
from quark_onnx.torch.schemes import scheme
from tests.torch_models import llama, made, saved, tokens


def said(source: Path, config: TorchConfig, count: int = 0) -> Estimate:
    opened = FloatCheckpoint(source)
    return estimate(opened, chosen_layers(opened.model, config)[0], count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["uint4_wo_32", "int3_wo_32", "fp8", "int8", "mxfp4", "mxfp6_e2m3", "nvfp4"])
def test_disk(name: str, dtype: Any, tmp_path: Path) -> None:
    source = saved(made(llama(hidden_size=128, intermediate_size=512), dtype), tmp_path / "source")
    config = TorchConfig(scheme(name), exclude=("lm_head",))
    found = said(source, config)
    quantize_checkpoint(source, tmp_path / "out", config, tokens(), progress=False)
    reader = Reader(tmp_path / "out")
    assert found.disk == pytest.approx(sum(reader.get(name).nbytes for name in reader), rel=0.01)


MEASURED = """
import json, sys, torch
from pathlib import Path
from quark_onnx.torch.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.memory import resident
from quark_onnx.torch.ptq import Text, config_for, ptq
source, output, data, scheme = sys.argv[1:]
source = FloatCheckpoint(source)
assert source.model is not None
before = resident()
found = ptq(source, output, config_for(scheme), text=Text(data, 2, 64), progress=False)
lines = Path("/proc/self/status").read_text().splitlines()
peak = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
print(json.dumps([found.estimate.memory - before, peak - before]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
@pytest.mark.parametrize("name", ["uint4_wo_128", "fp8", "mxfp4"])
def test_memory(name: str, tmp_path: Path) -> None:
    """Beyond what the process has before: 30 million weights in a block, 15 million in a matrix."""
    import numpy as np

    torch.manual_seed(0)
    settings = {"hidden_size": 1024, "intermediate_size": 12288, "num_hidden_layers": 1, "vocab_size": 8000}
    source = saved(made(llama(**settings, dtype="bfloat16"), torch.bfloat16), tmp_path / "source")
    np.save(tmp_path / "tokens.npy", np.arange(128).reshape(2, 64))
    command = [sys.executable, "-c", MEASURED, str(source), str(tmp_path / "out"), str(tmp_path / "tokens.npy"), name]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected, taken = json.loads(done.stdout.splitlines()[-1])
    assert taken > 40 << 20 and expected / 2 < taken < expected * 2


def test_a_size_is_said_in_its_unit() -> None:
    assert str(Estimate(1 << 20, 5 << 30, 5.0)) == "about 1 MiB of memory, 5.0 GiB of disk, 5 s"
    assert str(Estimate(0, 0, 3 * 3600.0)).endswith("3.0 h")
