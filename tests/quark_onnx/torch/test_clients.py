"""Checkpoints as transformers with amd-quark reads them: the same logits, to the bit.

``QUARK_ONNX_AMD_QUARK_PYTHON`` names the Python of an environment with amd-quark 0.13 and transformers 5.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from quark_onnx.torch.config import KVCache, TorchConfig
from quark_onnx.torch.export import export_safetensors
from quark_onnx.torch.quantize import quantize_model
from quark_onnx.torch.schemes import scheme
from quark_onnx.torch.spec import TensorSpec
from tests.torch_models import llama, logits, made, tokens

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
"""


@pytest.mark.slow
def test_transformers_with_amd_quark(tmp_path: Path) -> None:
    python = os.environ.get(VARIABLE)
    if not python:
        pytest.skip(f"{VARIABLE} is not set; it names the Python of an environment with amd-quark")
    expected = {}
    for name in SCHEMES:
        model = made(llama(hidden_size=128, intermediate_size=192), torch.bfloat16)
        cache = KVCache(TensorSpec("fp8e4m3")) if name.endswith("+kv") else None
        config = TorchConfig(scheme(name.removesuffix("+kv")), exclude=("lm_head",), kv_cache=cache)
        quantize_model(model, config, tokens(), progress=False)
        folder = tmp_path / name
        export_safetensors(model, folder, config)
        (folder / "tokens.json").write_text(json.dumps(tokens()[0][0].tolist()), encoding="utf-8")
        expected[str(folder)] = logits(model, tokens()[0])
    environment = {**os.environ, "QUARK_DISABLE_COMPILE": "1"}
    done = subprocess.run([python, "-c", CLIENT, *expected], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    for folder, ours in expected.items():
        assert torch.equal(torch.tensor(found[folder]), ours), Path(folder).name
