"""Checkpoints that are quantized already are decoded; what has the format asked for is copied."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quark_onnx.common.errors import ConfigError, ModelError
from quark_onnx.torch.checkpoints.decoded import decoded_reader
from quark_onnx.torch.checkpoints.export import write_checkpoint
from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.checkpoints.quark_tensors import has_place
from quark_onnx.torch.config.language import config_for
from quark_onnx.torch.config.schemes import SCHEMES
from quark_onnx.torch.config.spec import TensorSpec
from quark_onnx.torch.config.torch_config import KVCache
from quark_onnx.torch.models.heads import usually_float
from quark_onnx.torch.models.quantized_layer import (
    QuantizedLayer,
    kind_of,
    outputs_first,
)
from quark_onnx.torch.pipelines.file_to_file import Writing, quantize_checkpoint
from quark_onnx.torch.pipelines.in_memory import quantize_model
from tests.quark_onnx.torch.test_layer_choice import mixture_of
from tests.torch_families import config_of
from tests.torch_models import data_folder, llama, logits, made, saved, tokens

LAYER = "model.layers.0.mlp.up_proj"


def rewritten(folder: Path, quantization: Any, change: Any) -> Path:
    """A float checkpoint whose weights of layers are replaced by what ``change`` makes of them."""
    source = saved(made(llama()), folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors |= change(name.removesuffix(".weight"), tensors.pop(name))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    path = folder / "config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["quantization_config"] = quantization
    path.write_text(json.dumps(content), encoding="utf-8")
    return source


def fp8_blocks(name: str, weight: Any) -> dict[str, Any]:
    """DeepSeek's: each block of 32 x 32 has a scale."""
    rows, columns = (-(-size // 32) for size in weight.shape)
    scale = torch.rand(rows, columns) / 100 + 0.001
    return {
        f"{name}.weight": (10 * weight).to(torch.float8_e4m3fn),
        f"{name}.weight_scale_inv": scale,
    }


def gptq(name: str, weight: Any) -> dict[str, Any]:
    """Random codes of 4 bits in groups of 32 inputs, in an order of their own."""
    outputs, inputs = weight.shape
    generator = torch.Generator().manual_seed(len(name))

    def codes(*shape: int) -> Any:
        return torch.randint(0, 16, shape, generator=generator)

    def packed(values: Any) -> Any:
        words = torch.zeros(values.shape[0] // 8, values.shape[1], dtype=torch.int64)
        for place in range(8):
            words |= values[place::8] << (4 * place)
        return torch.where(words > 0x7FFFFFFF, words - (1 << 32), words).int()

    order = torch.randperm(inputs, generator=generator) // 32
    return {
        f"{name}.qweight": packed(codes(inputs, outputs)),
        f"{name}.qzeros": packed(codes(inputs // 32, outputs).T).T,
        f"{name}.scales": torch.rand(inputs // 32, outputs, generator=generator) / 10,
        f"{name}.g_idx": order.int(),
    }


def test_fp8_blocks(tmp_path: Path) -> None:
    quantization = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    folder = rewritten(tmp_path / "fp8", quantization, fp8_blocks)
    stored = load_file(folder / "model.safetensors")
    weight = stored[f"{LAYER}.weight"].float()
    expected = torch.empty_like(weight)
    for row in range(weight.shape[0]):
        for column in range(weight.shape[1]):
            scale = stored[f"{LAYER}.weight_scale_inv"][row // 32, column // 32]
            expected[row, column] = weight[row, column] * scale
    reader = decoded_reader(folder, torch.float32)
    assert torch.equal(reader.get(f"{LAYER}.weight"), expected)
    assert f"{LAYER}.weight_scale_inv" not in reader


def test_parts_are_the_stored_tensors(tmp_path: Path) -> None:
    """The thread that reads ahead reads what a decoded tensor is computed from."""
    quantization = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    source = rewritten(tmp_path / "source", quantization, fp8_blocks)
    reader = decoded_reader(source, torch.float32)
    parts = [part for tensor in reader.tensors.values() for part in tensor.parts]
    stored = load_file(source / "model.safetensors")
    assert sorted(part.name for part in parts) == sorted(stored)


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq(version: str, tmp_path: Path) -> None:
    quantization = {"quant_method": "gptq", "bits": 4, "checkpoint_format": version}
    folder = rewritten(tmp_path / "gptq", quantization, gptq)
    stored = load_file(folder / "model.safetensors")
    parts = {end: stored[f"{LAYER}.{end}"] for end in ("qweight", "qzeros", "scales")}
    groups = stored[f"{LAYER}.g_idx"]
    found = decoded_reader(folder, torch.float32).get(f"{LAYER}.weight")
    less = 1 if version == "gptq" else 0
    for i, o in ((0, 0), (9, 3), (63, 95), (17, 40)):
        group = int(groups[i])
        code = int(parts["qweight"][i // 8, o]) >> 4 * (i % 8) & 15
        zero = (int(parts["qzeros"][group, o // 8]) >> 4 * (o % 8) & 15) + less
        expected = (code - zero) * float(parts["scales"][group, o])
        assert float(found[o, i]) == pytest.approx(expected, rel=1e-6)


def test_mxfp4_of_gpt_oss(tmp_path: Path) -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    generator = torch.Generator().manual_seed(0)
    blocks, scales = (
        torch.randint(0, 256, shape, generator=generator).to(torch.uint8)
        for shape in ((2, 6, 3, 16), (2, 6, 3))
    )
    scales = scales // 8 + 112
    name = "model.layers.0.mlp.experts.down_proj"
    save_file(
        {f"{name}_blocks": blocks, f"{name}_scales": scales},
        tmp_path / "model.safetensors",
    )
    content = {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    reader = decoded_reader(tmp_path, torch.bfloat16)
    found = reader.get(name)
    expected = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    assert tuple(found.shape) == reader.shape(name) == (2, 96, 6)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("layout", "scheme"),
    [
        ("compressed-tensors", "int4_wo_32"),
        ("compressed-tensors", "uint4_wo_32"),
        ("compressed-tensors", "int8_per_channel"),
        ("compressed-tensors", "fp8"),
        ("compressed-tensors", "mxfp4_weight_only"),
        ("awq", "uint4_wo_32"),
        ("fp8", "fp8"),
    ],
)
def test_layouts_are_decoded_and_the_same_format_is_copied(
    layout: str, scheme: str, tmp_path: Path
) -> None:
    model = made(llama(intermediate_size=128))
    config = config_for(scheme)
    quantize_model(model, tokens(), config, progress=False)
    write_checkpoint(model, config, tmp_path / "first", layout=layout)
    first = load_checkpoint(tmp_path / "first")
    source = FloatCheckpoint(tmp_path / "first")
    floats = source.load()
    layers = {
        name: module
        for name, module in first.named_modules()
        if isinstance(module, QuantizedLayer)
    }
    for name, layer in layers.items():
        weight = floats.get_submodule(name).weight
        assert torch.equal(weight, layer.quantized.dequantize())
    report = quantize_checkpoint(
        source, tokens(), config, tmp_path / "again", progress=False
    )
    again = load_checkpoint(tmp_path / "again")
    assert sorted(report.kept_codes) == sorted(layers)
    for name, layer in layers.items():
        other = again.get_submodule(name).quantized
        assert torch.equal(other.dequantize(), layer.quantized.dequantize())
    # another format is what the decoded weights are rounded to
    report = quantize_checkpoint(
        tmp_path / "first",
        None,
        config_for("mxfp8"),
        tmp_path / "other",
        progress=False,
    )
    assert report.kept_codes == []
    quantize_model(floats, None, config_for("mxfp8"), progress=False)
    found = load_checkpoint(tmp_path / "other")
    assert torch.equal(logits(found, tokens()[0]), logits(floats, tokens()[0]))


def dequantized(model: Any) -> dict[str, Any]:
    """The weights of the quantized layers of a model, by the names of its float layers."""
    return {
        name: module.weight
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLayer)
    }


QUARK = [
    (family, scheme, {})
    for family, schemes in {
        "llama": [
            name
            for name, spec in SCHEMES.items()
            if spec.weight is not None
            and has_place(spec.weight)
            and not name.endswith(("_64", "_128", "_256"))
        ],
        # inputs first, experts in stacks of several kinds, and other names in files
        "gpt2": ["int4_wo_32", "int8", "uint4_wo_per_channel", "mxfp4"],
        "qwen3_moe": ["uint4_wo_32", "fp8"],
        "mixtral": ["uint4_wo_32", "int8_per_channel"],
        "dbrx": ["int4_wo_32"],
        "llama4": ["uint4_wo_32"],
        "gpt_oss": ["int8"],
        "granitemoe": ["int4_wo_32"],
        # 90 outputs and inputs, which do not fill packed words
        "odd": ["uint4_wo_per_channel", "int4_wo_32", "int4_wo_per_channel"],
    }.items()
    for scheme in schemes
] + [
    ("llama", "uint4_wo_32", {"pack_method": "order"}),
    ("llama", "int8", {"weight_format": "fake_quantized"}),
    ("llama", "mxfp4", {"weight_format": "fake_quantized"}),
    ("llama", "fp8", {"kv": True}),
]


def made_of(family: str) -> Any:
    if family == "llama":
        return made(llama(), torch.bfloat16)
    if family == "granitemoe":
        return mixture_of(family).to(torch.bfloat16)
    if family == "odd":
        return made(llama(intermediate_size=90), torch.bfloat16)
    return made(config_of(family), torch.bfloat16)


@pytest.mark.parametrize(("family", "scheme", "settings"), QUARK)
def test_the_layout_of_amd_quark_is_decoded(
    family: str, scheme: str, settings: Any, tmp_path: Path
) -> None:
    """decode(write(codes)) is what the codes stand for, for every format and kind of layer.

    Codes of the format asked for are kept, and scales of activations are left out.
    """
    model = made_of(family)
    exclude = usually_float(model)
    settings = dict(settings)
    cache = KVCache(TensorSpec("fp8e4m3")) if settings.pop("kv", False) else None
    config = config_for(scheme, exclude=exclude).with_(kv_cache=cache)
    data = tokens()
    quantize_model(model, data, config, progress=False)
    first = tmp_path / "first"
    write_checkpoint(model, config, first, **settings)
    source = FloatCheckpoint(first)
    floats, wanted = source.load(), dequantized(model)
    assert wanted
    for name, weight in wanted.items():
        layer = floats.get_submodule(name)
        assert torch.equal(outputs_first(layer.weight, kind_of(layer)), weight), name
    with_scales = [name for name in load_file_of(first) if _SCALE.search(name)]
    assert bool(with_scales) == any(
        "calibrated scale" in n for n in source.reader.notes
    )
    again = tmp_path / "again"
    weights_alone = config_for("uint4_wo_32", exclude=exclude)
    kept = config_for(scheme, exclude=exclude)
    report = quantize_checkpoint(source, data, kept, again, progress=False)
    cast = kept.default.weight is not None and kept.default.weight.is_cast
    assert cast or sorted(report.kept_codes) == sorted(
        name for name in wanted if report.quantized[name].weight is not None
    )
    same = dequantized(load_checkpoint(again))
    assert same.keys() == wanted.keys()
    assert all(torch.equal(same[name], wanted[name]) for name in wanted)
    # nothing of the source's format is left in a result of another one
    other = tmp_path / "other"
    quantize_checkpoint(
        first,
        None,
        weights_alone,
        other,
        writing=Writing(layout="quark"),
        progress=False,
    )
    assert not [name for name in load_file_of(other) if _SCALE.search(name)]
    load_checkpoint(other)


_SCALE = re.compile(r"\.(input|output|prob_output)_(scale|zero_point)")


def load_file_of(folder: Path) -> dict[str, Any]:
    return load_file(folder / "model.safetensors")


def test_layers_that_the_model_lacks_are_not_decoded(tmp_path: Path) -> None:
    folder, config = tmp_path / "model", config_for("int8")
    model = made(llama())
    quantize_model(model, tokens(), config, progress=False)
    write_checkpoint(model, config, folder)
    tensors = load_file_of(folder)
    tensors |= {
        name.replace("layers.1.", "layers.2."): tensor.clone()
        for name, tensor in tensors.items()
        if "layers.1." in name
    }
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"layers\.2\.\S+, which LlamaForCausalLM"):
        FloatCheckpoint(folder)


@pytest.mark.parametrize("setting", ["r4", "online_r1_rotation"])
def test_rotations_of_a_running_model_are_not_decoded(
    setting: str, tmp_path: Path
) -> None:
    folder, config = tmp_path / "model", config_for("int8")
    model = made(llama())
    quantize_model(model, tokens(), config, progress=False)
    write_checkpoint(model, config, folder)
    path = folder / "config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    rotation = {"name": "rotation", "r1": True, "r3": False}
    content["quantization_config"]["algo_config"] = [rotation]
    path.write_text(json.dumps(content), encoding="utf-8")
    FloatCheckpoint(folder)
    rotation[setting] = True
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ModelError, match=f"a rotation with {setting}, which the model"):
        FloatCheckpoint(folder)
    with pytest.raises(ConfigError, match=f"a rotation with {setting}"):
        load_checkpoint(folder)


def test_a_damaged_weight_of_amd_quark_is_named(tmp_path: Path) -> None:
    folder, config = tmp_path / "model", config_for("uint4_wo_32")
    model = made(llama())
    quantize_model(model, None, config, progress=False)
    write_checkpoint(model, config, folder)
    tensors = load_file_of(folder)
    tensors[f"{LAYER}.weight"] = tensors[f"{LAYER}.weight"][:32].clone()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=rf"the tensors of {LAYER}\.weight do not fit"):
        FloatCheckpoint(folder).load()


@pytest.mark.realdata
@pytest.mark.parametrize("name", ["fp8", "int8", "uint4_wo_128"])
def test_checkpoints_of_amd_quark_are_decoded(name: str, tmp_path: Path) -> None:
    """Its own exports become other layouts; the codes of weights stay as they are."""
    folder = data_folder() / "golden" / "quark_exports" / name
    wanted = dequantized(load_checkpoint(folder))
    source = FloatCheckpoint(folder)
    floats = source.load()
    for layer, weight in wanted.items():
        assert torch.equal(floats.get_submodule(layer).weight, weight)
    config = config_for(name, exclude=("lm_head",))
    generator = torch.Generator().manual_seed(0)
    data = [torch.randint(0, 512, (1, 32), generator=generator) for _ in range(2)]
    writing = Writing(layout="quark" if name == "int8" else "compressed-tensors")
    report = quantize_checkpoint(
        source, data, config, tmp_path / "out", writing=writing, progress=False
    )
    assert sorted(report.kept_codes) == sorted(wanted)
    found = dequantized(load_checkpoint(tmp_path / "out"))
    assert all(torch.equal(found[layer], wanted[layer]) for layer in wanted)


def test_file_to_file_from_blocks(tmp_path: Path) -> None:
    quantization = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    folder = rewritten(tmp_path / "fp8", quantization, fp8_blocks)
    writing = Writing(layout="compressed-tensors")
    config = config_for("int4_wo_32").with_(algorithms=("gptq",))
    quantize_checkpoint(
        folder, tokens(), config, tmp_path / "out", writing=writing, progress=False
    )
    content = json.loads((tmp_path / "out/config.json").read_text(encoding="utf-8"))
    assert content["quantization_config"]["quant_method"] == "compressed-tensors"
    names = load_file(tmp_path / "out" / "model.safetensors")
    assert not [name for name in names if name.endswith("weight_scale_inv")]
    floats = FloatCheckpoint(folder).load()
    wanted = logits(floats, tokens()[0])
    found = logits(load_checkpoint(tmp_path / "out"), tokens()[0])
    assert float((found - wanted).norm() / wanted.norm()) < 0.5


def test_what_cannot_be_decoded(tmp_path: Path) -> None:
    folder = saved(made(llama()), tmp_path / "float")
    path = folder / "config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    for quantization, message in (
        ({"quant_method": "bitsandbytes"}, "bitsandbytes.*gptq, awq, compressed-ten"),
        ({"quant_method": "gptq", "bits": 3}, "bits is 3; 2, 4 and 8 are decoded"),
        ({"quant_method": "gptq", "bits": 4}, "but none of its tensors are"),
    ):
        content["quantization_config"] = quantization
        path.write_text(json.dumps(content), encoding="utf-8")
        with pytest.raises(ModelError, match=message):
            FloatCheckpoint(folder)
