"""Checkpoints whose tensors transformers splits, joins, permutes or renames: read, quantized, and
loaded again.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.models.quantized_layer import QuantizedLayer
from quark_onnx.torch.pipelines.file_to_file import quantize_checkpoint
from quark_onnx.torch.pipelines.ptq import config_for
from tests.torch_models import saved

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
pytestmark = pytest.mark.skipif(
    not BENCHMARKS.is_dir(), reason="the benchmarks are not part of this distribution"
)

#: By model type: names of stored tensors that stay as they are, because nothing that they become is
#: quantized.
FAMILIES = {
    "olmo_hybrid": ("q_conv1d", "k_conv1d", "v_conv1d", "attention_layer_norm"),
    "hrm_text": (),
    "mistral_large4": ("vision_encoder",),
    "step3p7": ("vision_model",),
    "kimi_k25": ("vision_tower",),
    "molmo2": ("vision",),
}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("_tiny_models")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_float_checkpoint_of_transformers_loads(
    family: str, tiny: Any, tmp_path: Path
) -> None:
    """What ``save_pretrained`` writes is read to the bit, whatever conversions the family has."""
    model = tiny.tiny_model(family)
    source = saved(model, tmp_path / "model")
    with torch.no_grad():
        batch = tiny.samples(model)[0]
        assert torch.equal(
            tiny.logits_of(load_checkpoint(source)(**batch)),
            tiny.logits_of(model(**batch)),
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_is_what_transformers_loads(
    family: str, tiny: Any, tmp_path: Path
) -> None:
    """Each tensor of a result is one that transformers finds a place for, and none is missing. The
    oracle is ``from_pretrained`` on the same names with dequantized weights.
    """
    model = tiny.tiny_model(family)
    source = saved(model, tmp_path / "model")
    checkpoint = FloatCheckpoint(source)
    config = config_for("uint4_wo_32", exclude=checkpoint.usually_float())
    output = tmp_path / "out"
    report = quantize_checkpoint(checkpoint, None, config, output, progress=False)
    reopened = load_checkpoint(output)
    stored = load_file(output / "model.safetensors")
    layers = {
        name: each
        for name, each in reopened.named_modules()
        if isinstance(each, QuantizedLayer)
    }
    assert set(layers) == set(report.quantized)
    codes = {
        key
        for key, tensor in stored.items()
        if key.endswith(".weight") and not tensor.is_floating_point()
    }
    assert len(codes) == len(layers)
    floats = {
        key: each
        for key, each in stored.items()
        if key not in codes and "_scale" not in key and "_zero" not in key
    }
    assert {
        key
        for key in load_file(source / "model.safetensors")
        if any(part in key for part in FAMILIES[family])
    } <= set(floats)
    names = checkpoint_names(output, reopened)
    floats |= {
        names[name] + ".weight": each.weight.contiguous()
        for name, each in layers.items()
    }
    plain = tmp_path / "plain"
    plain.mkdir()
    content = json.loads((output / "config.json").read_text(encoding="utf-8"))
    del content["quantization_config"]
    (plain / "config.json").write_text(json.dumps(content), encoding="utf-8")
    save_file(floats, plain / "model.safetensors", metadata={"format": "pt"})
    cls = getattr(transformers, content["architectures"][0])
    loaded, info = cls.from_pretrained(plain, output_loading_info=True)
    assert (
        not info["missing_keys"]
        and not info["unexpected_keys"]
        and not info["mismatched_keys"]
    )
    with torch.no_grad():
        batch = tiny.samples(model)[0]
        expected = tiny.logits_of(loaded.eval()(**batch))
        found = tiny.logits_of(reopened(**batch))
    assert float((found - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("family", ["olmo_hybrid", "hrm_text"])
@pytest.mark.parametrize("excluded", [(), ("*.q_proj",), ("*.v_proj", "*.up_proj")])
def test_parts_of_a_fused_tensor_that_stay_float_are_written_apart(
    family: str, excluded: tuple[str, ...], tiny: Any, tmp_path: Path
) -> None:
    """A stored tensor is dropped once one layer that is made of it is quantized.

    Its other parts come back by name.
    """
    model = tiny.tiny_model(family)
    source = saved(model, tmp_path / "model")
    config = config_for("fp8", exclude=("lm_head", *excluded))
    quantize_checkpoint(
        source, tiny.samples(model), config, tmp_path / "out", progress=False
    )
    reopened = load_checkpoint(tmp_path / "out")
    floats = dict(reopened.named_parameters())
    assert floats
    for name, parameter in floats.items():
        assert torch.equal(parameter, model.get_parameter(name)), name


def checkpoint_names(folder: Path, model: Any) -> dict[str, str]:
    """The names of quantized layers in a checkpoint, by those in memory: with the same codes."""
    stored = load_file(folder / "model.safetensors")
    scales = {
        key.removesuffix(".weight_scale"): each
        for key, each in stored.items()
        if key.endswith(".weight_scale")
    }
    found = dict[str, str]()
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedLayer):
            scale = layer.scale.t()
            found[name] = next(
                key
                for key, each in scales.items()
                if each.shape == scale.shape and torch.equal(each, scale)
            )
    return found
