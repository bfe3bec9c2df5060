"""Checkpoints as transformers with amd-quark reads them: the same logits, to the bit.

``QUARK_ONNX_AMD_QUARK_PYTHON`` names the Python of an environment with amd-quark 0.13 and
transformers 5.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from quark_onnx.torch.checkpoints.export import write_checkpoint
from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.checkpoints.safetensors_io import CheckpointReader
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.spec import TensorSpec
from quark_onnx.torch.config.torch_config import Attention, KVCache, TorchConfig
from quark_onnx.torch.pipelines.in_memory import quantize_model
from tests.torch_models import llama, logits, made, saved, tokens

VARIABLE = "QUARK_ONNX_AMD_QUARK_PYTHON"
SCHEMES = (
    "fp8",
    "fp8+kv",
    "ptpc_fp8",
    "int8",
    "int4_wo_32",
    "uint4_wo_64",
    "uint4_wo_per_channel",
    "mxfp4",
    "mxfp4_weight_only",
    "mxfp6_e2m3",
    "mxfp6_e3m2",
    "mxfp4_fp8",
    "amdfp4",
    "amdfp4_g32",
)
CLIENT = """
import json, sys, torch
from transformers import AutoModelForCausalLM
found = {}
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, device_map="cpu").eval()
    with torch.no_grad():
        found[folder] = model(torch.tensor([json.load(open(folder + "/tokens.json"))])).logits.float().tolist()
print(json.dumps(found))
"""  # noqa: E501
#: What amd-quark itself makes of a float model: logits in front of the export, which gives k and v
#: one scale.
PEER = """
import json, sys, torch
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from transformers import AutoModelForCausalLM
source, cache = sys.argv[1], sys.argv[3] or None
data = [torch.tensor(each) for each in json.load(open(source + "/tokens.json"))]
model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, attn_implementation="eager").eval()
config = LLMTemplate.get("llama").get_config("fp8", kv_cache_scheme=cache, attention_scheme="fp8")
quantizer = ModelQuantizer(config)
model = quantizer.freeze(quantizer.quantize_model(model, data))
with torch.no_grad():
    found = model(data[0]).logits.float().tolist()
export_safetensors(model, sys.argv[2])
print(json.dumps(found))
"""  # noqa: E501


def peer(program: str, *arguments: str) -> Any:
    """What a program of an environment with amd-quark prints last."""
    python = os.environ.get(VARIABLE)
    if not python:
        pytest.skip(
            f"{VARIABLE} is not set; it names the Python of an environment with"
            " amd-quark"
        )
    environment = {**os.environ, "QUARK_DISABLE_COMPILE": "1"}
    done = subprocess.run(
        [python, "-c", program, *arguments],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.slow
def test_transformers_with_amd_quark(tmp_path: Path) -> None:
    expected = {}
    for name in SCHEMES:
        model = made(llama(hidden_size=128, intermediate_size=192), torch.bfloat16)
        cache = KVCache(TensorSpec("fp8e4m3")) if name.endswith("+kv") else None
        config = TorchConfig(
            scheme(name.removesuffix("+kv")), exclude=("lm_head",), kv_cache=cache
        )
        quantize_model(model, tokens(), config, progress=False)
        folder = tmp_path / name
        write_checkpoint(model, config, folder)
        (folder / "tokens.json").write_text(
            json.dumps(tokens()[0][0].tolist()), encoding="utf-8"
        )
        expected[str(folder)] = logits(model, tokens()[0])
    found = peer(CLIENT, *expected)
    for folder, ours in expected.items():
        assert torch.equal(torch.tensor(found[folder]), ours), Path(folder).name


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["fp8", ""])
def test_attention_of_amd_quark(cache: str, tmp_path: Path) -> None:
    """Queries and probabilities as amd-quark itself rounds them, in memory and in its checkpoint;
    transformers, which loads that, rounds no probabilities.
    """
    plain, fp8 = (
        made(llama(hidden_size=128, intermediate_size=192), torch.bfloat16),
        TensorSpec("fp8e4m3"),
    )
    source, theirs, ours = (
        saved(plain, tmp_path / "source"),
        tmp_path / "theirs",
        tmp_path / "ours",
    )
    (source / "tokens.json").write_text(
        json.dumps([each.tolist() for each in tokens()]), encoding="utf-8"
    )
    expected = torch.tensor(peer(PEER, str(source), str(theirs), cache))
    kept = KVCache(fp8) if cache else None
    config = TorchConfig(
        scheme("fp8"),
        exclude=("lm_head",),
        kv_cache=kept,
        attention=Attention(fp8, fp8),
    )
    quantize_model(plain, tokens(), config, progress=False)
    assert torch.equal(logits(plain, tokens()[0]), expected)
    write_checkpoint(plain, config, ours)
    described = [
        json.loads((each / "config.json").read_text(encoding="utf-8"))
        for each in (ours, theirs)
    ]
    assert described[0]["quantization_config"] == described[1]["quantization_config"]
    files = [CheckpointReader(each) for each in (ours, theirs)]
    assert set(files[0]) == set(files[1])
    for name in files[0]:
        if not name.endswith(("k_proj.output_scale", "v_proj.output_scale")):
            assert torch.equal(
                files[0].get(name).float(), files[1].get(name).float()
            ), name
    models = {str(each): load_checkpoint(each) for each in (ours, theirs)}
    for folder, model in models.items():
        (Path(folder) / "tokens.json").write_text(
            json.dumps(tokens()[0][0].tolist()), encoding="utf-8"
        )
        if not cache or folder == str(ours):
            assert torch.equal(logits(model, tokens()[0]), expected)
        for block in model.model.layers:
            block.self_attn.q_proj.probabilities = None
        model.set_attn_implementation("sdpa")
    for folder, found in peer(CLIENT, *models).items():
        assert torch.equal(torch.tensor(found), logits(models[folder], tokens()[0])), (
            folder
        )
