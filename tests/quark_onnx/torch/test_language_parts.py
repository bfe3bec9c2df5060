"""Families of transformers from file to file: their language part is quantized, and nothing else unless asked for."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from quark_onnx.cli import main
from quark_onnx.torch.config import TorchConfig
from quark_onnx.torch.files import quantize_checkpoint
from quark_onnx.torch.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.load import load_checkpoint
from quark_onnx.torch.ptq import config_for
from quark_onnx.torch.schemes import scheme
from quark_onnx.torch.structure import blocks_of
from tests.torch_models import llama, made, saved

if TYPE_CHECKING:
    from quark_onnx.torch.report import TorchReport

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
pytestmark = pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="the benchmarks are not part of this distribution")

#: By model type: what the names of quantized layers begin with.
FAMILIES: dict[str, tuple[str, ...]] = {
    "gemma3": ("model.language_model.layers.",),
    "qwen2_vl": ("model.language_model.layers.",),
    "qwen2_5_vl": ("model.language_model.layers.",),
    "qwen3_vl": ("model.language_model.layers.",),
    "mistral3": ("model.language_model.layers.",),
    "llava": ("model.language_model.layers.",),
    "llama4": ("language_model.model.layers.",),
    "gemma4_text": ("model.layers.", "model.per_layer_model_projection"),
    "whisper": ("model.encoder.layers.", "model.decoder.layers."),
    "t5": ("encoder.block.", "decoder.block."),
    "bart": ("model.encoder.layers.", "model.decoder.layers."),
}
#: The greatest finite number of float8_e4m3fn.
FP8_MAX = 448.0


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("_tiny_models")


def quantized(source: Path, config: TorchConfig, data: Any) -> tuple[Path, TorchReport]:
    output = source.parent / "out"
    return output, quantize_checkpoint(source, output, config, data, progress=False)


def greatest_inputs(model: Any, data: list[dict[str, Any]]) -> dict[str, float]:
    """The greatest magnitude that each linear layer of a float model reads, recorded by hooks."""
    found = dict[str, float]()

    def hook(name: str) -> Any:
        def record(module: Any, args: tuple[Any, ...]) -> None:
            found[name] = max(found.get(name, 0.0), float(args[0].abs().max()))

        return record

    layers = {name: each for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
    hooks = [each.register_forward_pre_hook(hook(name)) for name, each in layers.items()]
    with torch.no_grad():
        for batch in data:
            model(**batch, use_cache=False)
    for each in hooks:
        each.remove()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_fp8_of_the_language_part(family: str, tiny: Any, tmp_path: Path) -> None:
    """At the defaults, fp8 quantizes the language part alone, wherever its layers lie: those outside of the list of
    blocks are measured like the others. Towers, projectors and heads keep their bits, and the result runs."""
    model = tiny.tiny_model(family)
    data = tiny.samples(model)
    source = saved(model, tmp_path / "model")
    usual = FloatCheckpoint(source).usually_float()
    output, report = quantized(source, config_for("fp8", exclude=usual), data)
    assert report.quantized and all(name.startswith(FAMILIES[family]) for name in report.quantized)
    for start in FAMILIES[family]:
        assert any(name.startswith(start) for name in report.quantized)
    before, after = load_file(source / "model.safetensors"), load_file(output / "model.safetensors")
    codes = {key for key, tensor in after.items() if tensor.dtype == torch.float8_e4m3fn}
    assert len(codes) == len(report.quantized)
    for key in before.keys() & after.keys() - codes:
        assert torch.equal(before[key], after[key]), key
    assert not {key for key in before.keys() - after.keys() if ".experts." not in key}
    # Experts share the greatest scale of their block.
    greatest = {name: each for name, each in greatest_inputs(model, data).items() if ".experts." not in name}
    reopened = load_checkpoint(output)
    measured = {name: each for name, each in reopened.named_modules() if name in report.quantized and name in greatest}
    assert measured
    for name, layer in measured.items():
        assert float(layer.input.scale) == pytest.approx(greatest[name] / FP8_MAX, rel=1e-3), name
    with torch.no_grad():
        expected, found = (tiny.logits_of(each(**data[0])) for each in (model, reopened))
    assert 0 < float((found - expected).norm() / expected.norm()) < 0.3
