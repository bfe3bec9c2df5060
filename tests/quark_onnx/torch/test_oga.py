"""llm oga: what onnxruntime-genai generates is what transformers generates.

The tests that build a model run where QUARK_ONNX_OGA_PYTHON names the Python of an environment with
onnxruntime-genai and this package's dependencies.
"""

from __future__ import annotations

import json
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from quark_onnx.common.errors import MissingDependency
from quark_onnx.torch.exports.oga import ryzen_ai_flows, write_oga
from tests.answers import check_described
from tests.torch_models import llama, made, saved, with_tokenizer

VARIABLE = "QUARK_ONNX_OGA_PYTHON"


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``quark-onnx llm oga`` where onnxruntime-genai is installed."""
    python = os.environ.get(VARIABLE)
    if not python:
        pytest.skip(f"{VARIABLE} is not set")
    root = Path(__file__).parents[3]
    return subprocess.run(
        [python, "-m", "quark_onnx", "llm", "oga", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
        check=False,
    )


@pytest.mark.slow
def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    source = with_tokenizer(saved(made(llama()), tmp_path / "float"))
    output = tmp_path / "oga"
    run = command(str(source), "-o", str(output), "--scheme", "uint4_wo_32", "--json")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    check_described(found)
    assert found["equal_tokens"] == found["tokens"] > 32
    assert found["logit_difference"] < 1e-4
    names = {path.name for path in output.iterdir()}
    assert names >= {"genai_config.json", "model.onnx", "checkpoint", "ryzen_ai.json"}
    written = json.loads((output / "ryzen_ai.json").read_text(encoding="utf-8"))
    assert written == ryzen_ai_flows()
    # the checkpoint inside is what 'llm oga' takes as well
    again = command(str(output / "checkpoint"), "-o", str(tmp_path / "again"), "--json")
    assert again.returncode == 0, again.stderr
    model = (tmp_path / "again" / "model.onnx").read_bytes()
    assert model == (output / "model.onnx").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["int8", "int4"])
def test_quantized_cache(cache: str, tmp_path: Path) -> None:
    """onnxruntime-genai generates what transformers does with rounded keys and values."""
    source = with_tokenizer(saved(made(llama()), tmp_path / "float"))
    ids = np.random.default_rng(0).integers(0, 96, (8, 512))
    np.save(tmp_path / "ids.npy", ids)
    output = tmp_path / "oga"
    run = command(
        *(str(source), "-o", str(output), "--scheme", "uint4_wo_32", "--json"),
        *("--kv-cache", cache, "--data", str(tmp_path / "ids.npy")),
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["kv_cache"] == cache
    assert found["equal_tokens"] == found["tokens"] > 32
    assert found["logit_difference"] < 1e-4 < found["cache_difference"]


@pytest.mark.skipif(
    find_spec("onnxruntime_genai") is not None, reason="onnxruntime-genai is installed"
)
def test_without_onnxruntime_genai(tmp_path: Path) -> None:
    with pytest.raises(MissingDependency, match=r"quark-onnx(-core)?\[oga\]"):
        write_oga(tmp_path / "absent", tmp_path / "oga")
