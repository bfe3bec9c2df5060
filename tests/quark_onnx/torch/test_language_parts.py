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
from tests.torch_models import saved

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


#: By model type: how transformers stores what the model has under other names.
STORED_OTHERWISE = {
    "olmo_hybrid": "three convolutions are joined",
    "hrm_text": "fused projections are split",
    "step3p7": "the attention of the vision tower is fused",
    "molmo2": "projections of unequal sizes are split",
    "camembert": "the head comes first, and is stored as the embedding",
}


@pytest.mark.parametrize("family", STORED_OTHERWISE)
def test_what_transformers_saves_is_read(family: str, tiny: Any, tmp_path: Path) -> None:
    """Whatever names transformers gives to the tensors that it saves, each parameter is found: the float checkpoint
    computes the very logits of the model, and the quantized one has every tensor and loads again."""
    model = tiny.tiny_model(family)
    data = tiny.samples(model)
    source = saved(model, tmp_path / "model")
    checkpoint = FloatCheckpoint(source)
    output, report = quantized(source, config_for("fp8", exclude=checkpoint.usually_float()), data)
    assert not [note for note in report.notes if "no tensor" in note]
    with torch.no_grad():
        expected, read, found = (
            tiny.logits_of(each(**data[0])) for each in (model, load_checkpoint(source), load_checkpoint(output))
        )
    assert torch.equal(read, expected)
    assert 0 < float((found - expected).norm() / expected.norm()) < 0.3


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_exclude_adds_to_the_defaults(family: str, tiny: Any, tmp_path: Path) -> None:
    """`--exclude` never replaces what stays float at the defaults: heads and all outside of the language part."""
    saved(tiny.tiny_model(family), tmp_path / "model")
    output = tmp_path / "out"
    command = ["llm", "ptq", tmp_path / "model", "-o", output, "--scheme", "int4_wo_32", "--exclude", "*.q_proj"]
    assert main([str(each) for each in command]) == 0
    codes = {key for key in load_file(output / "model.safetensors") if key.endswith(".weight_scale")}
    assert codes and not any(".q_proj." in key for key in codes)
    assert all("language_model" in key or key.startswith("model.layers.") for key in codes), codes
    assert not any("lm_head" in key or "vision" in key or "visual" in key for key in codes)
    written = json.loads((output / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    assert any(name.endswith("lm_head") for name in written["exclude"])


def test_the_decoder_is_found_beside_a_larger_tower(tiny: Any) -> None:
    """The blocks are those of the decoder, even where a vision tower has more weights."""
    config = tiny.tiny_config("llava")
    config.vision_config.hidden_size, config.vision_config.intermediate_size = 128, 1024
    with torch.device("meta"):
        model = tiny_class("llava", tiny)._from_config(config)
    sizes = {
        part: sum(each.numel() for name, each in model.named_parameters() if part in name)
        for part in ("vision_tower", "language_model")
    }
    assert sizes["vision_tower"] > sizes["language_model"]
    assert list(blocks_of(model)) == ["model.language_model.layers.0", "model.language_model.layers.1"]


def tiny_class(family: str, tiny: Any) -> Any:
    import transformers

    return getattr(transformers, tiny.families()[family][0])


def test_a_tower_that_is_asked_for_and_not_reached_stays_float(tiny: Any, tmp_path: Path) -> None:
    """A layer outside of the blocks that the data does not reach stays float with a note; the model is not refused."""
    model = tiny.tiny_model("llava")
    source = saved(model, tmp_path / "model")
    output, report = quantized(source, config_for("fp8"), tiny.samples(model))
    tower = [name for name, each in model.named_modules() if "vision" in name and isinstance(each, torch.nn.Linear)]
    assert tower and not any(name in report.quantized for name in tower)
    for name in tower:
        assert f"{name} lies outside of the blocks, and was not run on the data: it stays float" in report.notes
        assert name in report.kept
    before, after = load_file(source / "model.safetensors"), load_file(output / "model.safetensors")
    for key in (key for key in before if "vision" in key):
        assert torch.equal(before[key], after[key])


@pytest.mark.parametrize(
    ("family", "layer"), [("llama", "lm_head"), ("bert", "cls.predictions.transform.dense"), ("fsmt", "encoder")]
)
def test_layers_outside_of_the_blocks_are_measured(family: str, layer: str, tiny: Any, tmp_path: Path) -> None:
    """A layer in front of the blocks or behind them gets the scale of what it reads in the float model."""
    model = tiny.tiny_model(family)
    data = tiny.samples(model)
    source = saved(model, tmp_path / "model")
    exclude = () if family == "llama" else FloatCheckpoint(source).usually_float()
    output, report = quantized(source, TorchConfig(scheme("fp8"), exclude=exclude), data)
    greatest = greatest_inputs(model, data)
    found = {name: each for name, each in load_checkpoint(output).named_modules() if name in report.quantized}
    outside = [name for name in found if layer in name]
    assert outside
    for name in outside:
        assert float(found[name].input.scale) == pytest.approx(greatest[name] / FP8_MAX, rel=1e-3), name
