"""Runs that are killed at any moment, and go on to the bytes that they would have written."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.torch_models import llama, made, saved

#: Says when the work begins, so that it is not the imports that are killed.
RUN = """
import sys, torch
from pathlib import Path
from tests.torch_models import tokens
from quark_onnx.torch.pipelines.file_to_file import Writing, quantize_checkpoint
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.config.schemes import scheme
source, output, state, name, algorithms = sys.argv[1:]
torch.set_num_threads(1)
config = TorchConfig(scheme(name), exclude=("lm_head",), algorithms=tuple(algorithms.split()))
data = tokens(12, 32)
print("ready", flush=True)
quantize_checkpoint(source, data, config, output, writing=Writing(resume=Path(state)), progress=False)
"""  # noqa: E501


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def started(*arguments: str) -> subprocess.Popen[str]:
    """A run that has begun its work."""
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, *arguments], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout as told:
        assert told.readline() == "ready\n"
    return process


def reached(state: Path) -> float:
    """Blocks that are done, or tenths of what follows them all."""
    ends = [
        safe_open(str(file), framework="pt").get_tensor("done")
        for file in state.glob("end-*.safetensors")
    ]
    return (
        len(list(state.glob("block-*.safetensors")))
        + sum(float(end) for end in ends) / 4
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "algorithms"),
    [
        (
            "uint4_wo_32",
            "rotation awq:clip=false,steps=4 gptq:coordinate_descent_passes=0",
        ),
        ("mxfp4", "autosmoothquant:steps=4 autoround:steps=3"),
        ("int8", "smoothquant qronos"),
        ("mxfp4", "gptq distill:steps=40,sequences=16,lr=0.02"),
    ],
)
def test_killed_at_random_moments(name: str, algorithms: str, tmp_path: Path) -> None:
    source, state = (
        str(saved(made(llama(num_hidden_layers=4)), tmp_path / "source")),
        tmp_path / "state",
    )
    assert (
        started(
            source, str(tmp_path / "whole"), str(tmp_path / "unused"), name, algorithms
        ).wait()
        == 0
    )
    run, moments = (
        (source, str(tmp_path / "out"), str(state), name, algorithms),
        random.Random(name),
    )
    for done in range(4):  # while it works on a block, the first or a later one
        process = started(*run)
        while process.poll() is None and reached(state) < done:
            time.sleep(0.002)
        time.sleep(moments.uniform(0, 0.1))
        process.kill()
        process.wait()
        if (tmp_path / "out").exists():
            break
    assert done > 1, "the run was over before it could be killed"
    if not (tmp_path / "out").exists():
        assert started(*run).wait() == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
