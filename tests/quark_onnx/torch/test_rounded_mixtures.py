"""Layers with schemes of their own whose outputs are rounded for attention: config.json says what
the files hold.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quark_onnx.torch import LLMTemplate, ModelExporter, ModelQuantizer
from quark_onnx.torch.checkpoints.export import write_checkpoint
from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.pipelines.file_to_file import quantize_checkpoint
from quark_onnx.torch.pipelines.in_memory import quantize_model
from quark_onnx.torch.pipelines.ptq import config_for
from quark_onnx.torch.validate import validate
from tests.torch_models import llama, logits, made, saved, tokens

_EXACT = tuple((f"model.layers.1.self_attn.{side}_proj", "ptpc_fp8") for side in "qkv")
#: Schemes of layers, and whether vLLM takes them: it makes one layer of queries, keys and values.
LAYERS: dict[str, tuple[tuple[tuple[str, str], ...], bool]] = {
    "all alike": ((("*self_attn*", "mxfp4"),), True),
    "by class": ((("*[qkv]_proj", "int8"),), True),
    "one block": ((("*layers.0.*", "mxfp4"),), True),
    "one block in another way": ((("*layers.0.*", "int8"), ("*v_proj", "fp8")), True),
    "by name": (_EXACT, True),
    "under the glob of keys": ((("*k_proj", "mxfp4"),), False),
    "glob of keys in one block": ((("*0.self_attn.k_proj", "int8"),), False),
}


@pytest.mark.parametrize("attention", [None, "fp8"])
@pytest.mark.parametrize("cache", ["fp8", "fp8-rope"])
@pytest.mark.parametrize("case", LAYERS)
def test_what_is_written_is_what_is_read(
    case: str, cache: str, attention: str | None, tmp_path: Path
) -> None:
    layers, taken = LAYERS[case]
    config = config_for("fp8", kv_cache=cache, attention=attention, layers=layers)
    model = made(llama())
    source = saved(made(llama()), tmp_path / "source")
    quantize_model(model, tokens(), config, progress=False)
    write_checkpoint(model, config, tmp_path / "memory")
    quantize_checkpoint(source, tokens(), config, tmp_path / "files", progress=False)
    for folder in (tmp_path / "memory", tmp_path / "files"):
        loaded = load_checkpoint(folder)
        assert torch.equal(logits(loaded, tokens()[0]), logits(model, tokens()[0]))
        for name, layer in model.named_modules():
            if hasattr(layer, "spec") and hasattr(layer, "origin"):
                assert loaded.get_submodule(name).spec == layer.spec
        verdict = validate(folder, "vllm")
        assert verdict.right is taken, verdict.text()


@pytest.mark.parametrize("layout", ["compressed-tensors", "fp8"])
def test_other_layouts(layout: str, tmp_path: Path) -> None:
    layers: Any = (
        (("*self_attn*", "ptpc_fp8"),)
        if layout == "compressed-tensors"
        else (("*_proj", "fp8"),)
    )
    config = config_for("fp8", kv_cache="fp8", layers=layers)
    model = made(llama())
    quantize_model(model, tokens(), config, progress=False)
    write_checkpoint(model, config, tmp_path / "out", layout=layout)
    assert torch.equal(
        logits(load_checkpoint(tmp_path / "out"), tokens()[0]),
        logits(model, tokens()[0]),
    )


def test_names_of_layers_behind_the_globs_of_the_cache(tmp_path: Path) -> None:
    """AMD Quark's entries of the cache go before what is said of single layers: they are written
    so, too.
    """
    name = "model.layers.0.self_attn.k_proj"
    config = LLMTemplate.get("llama").get_config(
        "fp8", kv_cache_scheme="fp8", layer_config={name: "mxfp4"}
    )
    model = ModelQuantizer(config).quantize_model(made(llama()), tokens())
    assert str(model.get_submodule(name).spec.weight.dtype.name) == "fp8e4m3"
    ModelExporter(tmp_path / "out").export_safetensors_model(model)
    assert torch.equal(
        logits(load_checkpoint(tmp_path / "out"), tokens()[0]),
        logits(model, tokens()[0]),
    )
    assert validate(tmp_path / "out", "vllm").right


def test_one_entry_stands_for_layers_that_are_alike(tmp_path: Path) -> None:
    config = config_for("fp8", kv_cache="fp8", layers=(("*self_attn*", "mxfp4"),))
    model = made(llama())
    quantize_model(model, tokens(), config, progress=False)
    write_checkpoint(model, config, tmp_path / "out")
    content = json.loads(
        (tmp_path / "out" / "config.json").read_text(encoding="utf-8")
    )["quantization_config"]
    assert list(content["layer_quant_config"]) == ["*k_proj", "*v_proj", "*self_attn*"]
    assert content["kv_cache_quant_config"]["*k_proj"]["weight"]["dtype"] == "fp4"
