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
from typing import Any

import numpy as np
import pytest
import torch

from quark_onnx.common.errors import MissingDependency
from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.config.language import config_for
from quark_onnx.torch.exports import oga
from quark_onnx.torch.exports.oga import ryzen_ai_flows, write_oga
from quark_onnx.torch.exports.oga_cache import measure_cache, rounded_cache
from quark_onnx.torch.pipelines.file_to_file import Writing, quantize_checkpoint
from quark_onnx.torch.pipelines.ptq import Text
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
    with pytest.raises(MissingDependency, match=r"pip install '.*\[oga\]'"):
        write_oga(tmp_path / "absent", tmp_path / "oga")


@pytest.mark.parametrize("cache", [None, "int4"])
def test_both_references_are_reported(
    cache: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are compared with a float KV cache, and with the cache that the model has."""
    source = with_tokenizer(saved(made(llama()), tmp_path / "float"))
    checkpoint = tmp_path / "checkpoint"
    config = config_for("uint4_wo_32", exclude=("lm_head",))
    writing = Writing(layout="oga")
    quantize_checkpoint(
        source, None, config, checkpoint, writing=writing, progress=False
    )
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(0, 96, (4, 16)))
    measured: list[Any] = [None]

    def measure(*arguments: Any) -> Any:
        measured.append(measure_cache(*arguments))
        return measured[-1]

    def generate(_: Path, prompts: list[list[int]], new_tokens: int) -> list[Any]:
        """Generate as onnxruntime-genai does, with transformers and the rounded cache."""
        model: Any = load_checkpoint(checkpoint, dtype=torch.float32)
        results = []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            with torch.no_grad(), rounded_cache(model, measured[-1]):
                after = model(input_ids=ids).logits[0, -1].tolist()
                text = model.generate(ids, max_new_tokens=new_tokens, do_sample=False)
            results.append((text[0, len(prompt) :].tolist(), after))
        return results

    def build(_: Path, folder: Path, *__: Any) -> None:
        folder.mkdir()

    monkeypatch.setattr(oga, "check_oga", lambda _: None)
    monkeypatch.setattr(oga, "measure_cache", measure)
    monkeypatch.setattr(oga, "run_builder", build)
    monkeypatch.setattr(oga, "generated_tokens", generate)
    text = Text(str(tmp_path / "ids.npy"), 4, 16)
    found = oga.write_oga(
        checkpoint, tmp_path / "oga", new_tokens=8, kv_cache=cache, text=text
    )
    assert found.equal == found.tokens > 8
    if cache is None:
        assert (found.float_cache_equal, found.float_cache_tokens) == (
            found.equal,
            found.tokens,
        )
        assert "float KV cache" not in str(found)
        return
    assert found.float_cache_equal < found.float_cache_tokens
    assert (
        f"{found.float_cache_equal} of {found.float_cache_tokens} tokens as transformers"
        " does with a float KV cache"
    ) in str(found)
    assert f"{found.equal} of {found.tokens} with the same int4 KV cache" in str(found)
