"""Estimates of memory and disk space, compared with those of runs."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quark_onnx.torch.algorithms.gptq.hessian import largest_stage
from quark_onnx.torch.algorithms.memory import Shapes, memory_of
from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.checkpoints.layouts import layout_named
from quark_onnx.torch.checkpoints.safetensors_io import CheckpointReader, size_of_files
from quark_onnx.torch.config.algorithm_order import algorithm
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec
from quark_onnx.torch.config.torch_config import Attention, TorchConfig
from quark_onnx.torch.pipelines.estimate import Estimate, estimate
from quark_onnx.torch.pipelines.file_to_file import Writing, quantize_checkpoint
from quark_onnx.torch.pipelines.in_memory import chosen_layers
from quark_onnx.torch.pipelines.ptq import ptq
from quark_onnx.torch.pipelines.written_size import written_bytes
from tests.torch_models import llama, made, saved, tokens


def said(source: Path, config: TorchConfig, count: int = 0) -> Estimate:
    opened = FloatCheckpoint(source)
    return estimated(opened, config, count)


def estimated(
    source: FloatCheckpoint, config: TorchConfig, count: int, **settings: Any
) -> Estimate:
    """Return the estimate of a run that writes the layout of AMD Quark."""
    chosen = chosen_layers(source.model, config)[0]
    disk = written_bytes(source, config, layout_named("quark"))
    return estimate(source, chosen, count, disk=disk, **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name", ["uint4_wo_32", "int3_wo_32", "fp8", "int8", "mxfp4", "mxfp6_e2m3", "nvfp4"]
)
def test_disk(name: str, dtype: Any, tmp_path: Path) -> None:
    source = saved(
        made(llama(hidden_size=128, intermediate_size=512), dtype), tmp_path / "source"
    )
    config = TorchConfig(scheme(name), exclude=("lm_head",))
    found = said(source, config)
    quantize_checkpoint(source, tokens(), config, tmp_path / "out", progress=False)
    size = size_of_files(CheckpointReader(tmp_path / "out"))
    # the header is padded to eight bytes, and its offsets have other digits in another order
    assert found.disk == pytest.approx(size, abs=256)


def test_the_size_is_that_of_the_layout(tmp_path: Path) -> None:
    """Each layout has its own names, scales and packing, and tied heads are stored once."""
    config = llama(hidden_size=128, intermediate_size=512, tie_word_embeddings=True)
    source = saved(made(config), tmp_path / "source")
    np.save(tmp_path / "tokens.npy", np.arange(512).reshape(8, 64) % 96)
    scheme_config = TorchConfig(scheme("uint4_wo_32"), exclude=("lm_head",))
    for layout in ("quark", "compressed-tensors", "awq"):
        output = tmp_path / layout
        found = ptq(
            source,
            None,
            scheme_config,
            output,
            writing=Writing(layout=layout),
            progress=False,
        )
        size = size_of_files(CheckpointReader(output))
        assert found.estimate.disk == pytest.approx(size, abs=256), layout


MEASURED = """
import json, sys, torch
from pathlib import Path
from types import SimpleNamespace
from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.runtime.memory import resident
from quark_onnx.torch.pipelines.ptq import Text, config_for, ptq
source, output, data, scheme, *algorithms = sys.argv[1:]
source = FloatCheckpoint(source)
assert source.model is not None
before = resident()
config = config_for(scheme).with_(algorithms=tuple(algorithms))
found = ptq(source, Text(data, 2, 64), config, output, progress=False)
lines = Path("/proc/self/status").read_text().splitlines()
peak = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
print(json.dumps([found.estimate.memory - before, peak - before]))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="the peak is read from /proc"
)
@pytest.mark.parametrize("name", ["uint4_wo_128", "fp8", "mxfp4"])
def test_memory(name: str, tmp_path: Path) -> None:
    """Beyond what the process has before: 30 million weights in a block, 15 million in a matrix."""
    expected, taken = peak(
        tmp_path,
        {"hidden_size": 1024, "intermediate_size": 12288, "vocab_size": 8000},
        name,
    )
    assert taken > 40 << 20 and expected / 2 < taken < expected * 2


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="the peak is read from /proc"
)
@pytest.mark.parametrize(
    "algorithm",
    ["gptq", "qronos", "awq", "autoround:steps=1", "distill:steps=1,sequences=2"],
)
def test_memory_of_algorithms(algorithm: str, tmp_path: Path) -> None:
    expected, taken = peak(
        tmp_path,
        {"hidden_size": 1024, "intermediate_size": 2048},
        "uint4_wo_128",
        algorithm,
    )
    assert taken > 40 << 20 and expected / 3 < taken < expected * 3


def peak(folder: Path, settings: dict[str, Any], *arguments: str) -> tuple[int, int]:
    """Return the estimated and the measured bytes of a run in a separate process."""
    import numpy as np

    source = saved(
        made(llama(num_hidden_layers=1, dtype="bfloat16", **settings), torch.bfloat16),
        folder / "source",
    )
    np.save(folder / "tokens.npy", np.arange(128).reshape(2, 64) % 96)
    command = [
        sys.executable,
        "-c",
        MEASURED,
        str(source),
        str(folder / "out"),
        str(folder / "tokens.npy"),
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected, taken = json.loads(done.stdout.splitlines()[-1])
    return expected, taken


def test_hidden_states_of_a_multimodal_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hidden_size stands in text_config, and nowhere else."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    model = importlib.import_module("_tiny_models").tiny_model("llava")
    source = FloatCheckpoint(saved(model, tmp_path / "source"))
    config = TorchConfig(scheme("fp8"), exclude=source.usually_float())
    few, many = (
        estimated(source, config, count, samples=count).memory
        for count in (1 << 22, 1 << 23)
    )
    width = source.model.config.text_config.hidden_size
    value = next(source.model.parameters()).dtype.itemsize
    assert many - few == pytest.approx((1 << 22) * width * value, rel=0.1)


def test_a_model_whose_text_config_is_null(tmp_path: Path) -> None:
    """Its own sizes count, also for quantized probabilities."""
    folder = saved(made(llama()), tmp_path / "source")
    config = TorchConfig(
        LayerSpec(), attention=Attention(TensorSpec("fp8e4m3"), TensorSpec("fp8e4m3"))
    )
    found = list[int]()
    for change in ({}, {"text_config": None}):
        path = folder / "config.json"
        content = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps(content | change), encoding="utf-8")
        source = FloatCheckpoint(folder)
        found.append(estimated(source, config, 4096, samples=8).memory)
    # probabilities take 16 MB at least; the process itself takes more now and then
    assert abs(found[0] - found[1]) < 8 << 20


def test_memory_of_algorithms_by_shapes() -> None:
    layers = {
        f"m.{block}.{name}": (64, 32)
        for block in range(2)
        for name in ("attn.q", "attn.k", "mlp.up")
    }
    layers |= {f"m.{block}.mlp.down": (32, 64) for block in range(2)}
    shapes = Shapes(layers, 10**5, 4, 1000, 10)
    assert shapes.groups == {
        (f"m.{block}.{parent}", size): outputs
        for block in range(2)
        for parent, size, outputs in (
            ("attn", 32, 2 * 64),
            ("mlp", 32, 64),
            ("mlp", 64, 32),
        )
    }
    assert largest_stage(shapes) == 64**2
    experts = {f"m.0.experts.{expert}.up": (64, 32) for expert in range(8)}
    assert largest_stage(Shapes(experts, 1, 1, 1, 1)) == 8 * 32**2  # one stage

    def memory(text: str) -> int:
        return memory_of((algorithm(text),), shapes)[0]

    assert memory("qronos") - memory("gptq") == 4 * largest_stage(shapes)
    both, _ = memory_of((algorithm("awq"), algorithm("gptq")), shapes)
    assert both == max(memory("awq"), memory("gptq"))
    assert memory("hqq") > 0
    without_data = replace(shapes, tokens=0, samples=0)
    assert memory_of((algorithm("hqq"),), without_data) == (0, ())


def test_an_algorithm_without_an_estimate_is_named() -> None:
    shapes = Shapes({"m.0.q": (32, 32)}, 4096, 4, 10, 1)
    assert memory_of((SimpleNamespace(name="mine"),), shapes) == (0, ("mine",))
    assert str(Estimate(1 << 20, 1 << 20, ("mine",))).endswith(
        "1 MiB of disk, and the memory of mine"
    )


def test_a_size_is_said_in_its_unit() -> None:
    assert str(Estimate(1 << 20, 5 << 30)) == "about 1 MiB of memory, 5.0 GiB of disk"
