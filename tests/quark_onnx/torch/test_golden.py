"""Checkpoints against those that AMD Quark 0.13 wrote for the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from quark_onnx.torch.checkpoints.export import write_checkpoint
from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.checkpoints.quark_json import from_json, to_json
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.spec import TensorSpec
from quark_onnx.torch.config.torch_config import KVCache, TorchConfig
from quark_onnx.torch.pipelines.in_memory import quantize_model
from tests.torch_models import data_folder

pytestmark = pytest.mark.realdata

SCHEMES = {
    "fp8": "fp8",
    "int8": "int8",
    "uint4_wo_128": "uint4_wo_128",
    "uint4_wo_128_order": "uint4_wo_128",
    "int4_wo_128": "int4_wo_128",
    "mxfp4_weight_only": "mxfp4_weight_only",
    "fp8_kvfp8": "fp8",
}


def golden() -> Path:
    return data_folder() / "golden" / "quark_exports"


def config_of(name: str) -> TorchConfig:
    cache = KVCache(TensorSpec("fp8e4m3")) if "kv" in name else None
    return TorchConfig(scheme(SCHEMES[name]), exclude=("lm_head",), kv_cache=cache)


@pytest.mark.parametrize("name", SCHEMES)
def test_exports_equal_the_listings(name: str, tmp_path: Path) -> None:
    base = golden() / "_base" / "base_float32_False_256_512_False_2"
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    data = [torch.randint(0, 512, (1, 32), generator=generator) for _ in range(2)]
    config = config_of(name)
    quantize_model(model, data, config, progress=False)
    write_checkpoint(
        model,
        config,
        tmp_path / "out",
        pack_method="order" if "order" in name else "reorder",
    )
    found = load_file(tmp_path / "out" / "model.safetensors")
    listed = sorted(
        f"{key}\t{str(tensor.dtype)[6:]}\t{list(tensor.shape)}"
        for key, tensor in found.items()
    )
    lines = (golden() / name / "tensors.tsv").read_text(encoding="utf-8").splitlines()
    assert listed == sorted(line for line in lines if not line.startswith("#"))
    expected = json.loads((golden() / name / "config.json").read_text(encoding="utf-8"))
    written = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert written.pop("transformers_version") == transformers.__version__
    del expected["transformers_version"]  # that of the peer
    assert written == expected
    weights = golden() / name / "model.safetensors"
    if weights.exists():
        compare_weights(found, load_file(weights))
    with torch.no_grad():
        assert torch.equal(
            load_checkpoint(tmp_path / "out")(data[0]).logits, model(data[0]).logits
        )


def compare_weights(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Codes, scales and zero points of weights are the same to the bit.

    Scales of activations depend on the data.
    """
    compared = 0
    for key, tensor in expected.items():
        if not key.endswith(("input_scale", "output_scale", "input_zero_point")):
            assert torch.equal(
                found[key].reshape(-1).view(torch.uint8),
                tensor.reshape(-1).view(torch.uint8),
            ), key
            compared += 1
    assert compared > 30


@pytest.mark.parametrize("name", SCHEMES)
def test_configurations_are_read_as_they_are_written(name: str) -> None:
    found = json.loads((golden() / name / "config.json").read_text(encoding="utf-8"))[
        "quantization_config"
    ]
    config, method = from_json(found)
    assert config == config_of(name)
    assert to_json(config, method=method) == found


@pytest.mark.parametrize("name", ["fp8", "int8", "uint4_wo_128"])
def test_checkpoints_of_amd_quark_are_read(name: str, tmp_path: Path) -> None:
    """Its weights under its configuration: what its definition of the format says they are."""
    model = load_checkpoint(golden() / name)
    stored = load_file(golden() / name / "model.safetensors")
    layer = "model.layers.1.mlp.down_proj"
    scale, codes = stored[f"{layer}.weight_scale"].float(), stored[f"{layer}.weight"]
    if name == "uint4_wo_128":
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        nibbles = torch.stack(
            [codes >> 4 * order.index(column) & 15 for column in range(8)], -1
        ).flatten(1)
        zeros = stored[f"{layer}.weight_zero_point"]
        zeros = torch.stack(
            [zeros >> 4 * order.index(column) & 15 for column in range(8)], -1
        ).flatten(1)
        expected = (
            (nibbles - zeros.repeat_interleave(128, 0))
            * scale.repeat_interleave(128, 0)
        ).t()
    else:
        expected = codes.float() * scale
    assert torch.equal(model.get_submodule(layer).weight, expected.bfloat16())
