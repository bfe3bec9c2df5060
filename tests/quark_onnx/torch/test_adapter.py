"""An adapter belongs to the weights: it is merged, or the folder is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quark_onnx.cli.dispatch import main
from quark_onnx.common.errors import ConfigError, ModelError
from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.checkpoints.recast import recast
from quark_onnx.torch.config.language import config_for
from quark_onnx.torch.pipelines.file_to_file import Writing, quantize_checkpoint
from tests.torch_families import config_of
from tests.torch_models import llama, logits, made, saved, tokens

Q, UP = "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.up_proj"
LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none"}
INT4 = config_for("int4_wo_32")


def with_adapter(
    folder: Path, layers: Any = (Q, UP), rank: int = 4, **settings: Any
) -> dict[str, Any]:
    """Add an adapter of random factors to a folder; return its tensors."""
    generator = torch.Generator().manual_seed(3)
    base, tensors = load_file(folder / "model.safetensors"), dict[str, Any]()
    for layer in layers:
        outputs, inputs = base[f"{layer}.weight"].shape
        if layer.endswith("c_fc"):  # a Conv1D has inputs first
            outputs, inputs = inputs, outputs
        for side, shape in {"A": (rank, inputs), "B": (outputs, rank)}.items():
            name = f"base_model.model.{layer}.lora_{side}.weight"
            tensors[name] = torch.randn(shape, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = json.dumps(LORA | settings)
    (folder / "adapter_config.json").write_text(config, encoding="utf-8")
    return tensors


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return saved(made(llama()), tmp_path / "model")


def quantized(source: Any, output: Path, layout: str = "quark") -> Any:
    writing = Writing(layout=layout)
    return quantize_checkpoint(
        source, None, INT4, output, writing=writing, progress=False
    )


def test_a_folder_with_an_adapter_is_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By everything that reads weights, with the two ways out; a result has no adapter."""
    with_adapter(source)
    out = tmp_path / "out"
    for read in (
        FloatCheckpoint,
        load_checkpoint,
        lambda folder: recast(folder, out, "bfloat16"),
        lambda folder: quantized(folder, out),
    ):
        with pytest.raises(ModelError, match=r"has an adapter .*; merge first: .*peft"):
            read(source)
    line = [str(source), "-o", str(out)]
    for words in (
        ["llm", "ptq", *line, "--scheme", "int4_wo_32"],
        ["llm", "gguf", *line[:-1], f"{out}.gguf"],
    ):
        assert main(words) != 0
        assert "merge first" in capsys.readouterr().err
    assert not out.exists()
    ptq = ["llm", "ptq", *line, "--scheme", "int4_wo_32", "--no-verdict"]
    assert main([*ptq, "--merge-adapter"]) == 0
    assert not list(out.glob("adapter*"))
    assert "adapter" not in (out / "config.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("settings", "scales"),
    [
        ({}, (2.0, 2.0)),
        ({"use_rslora": True}, (8 / math.sqrt(4), 8 / math.sqrt(4))),
        ({"alpha_pattern": {"q_proj": 3}}, (0.75, 2.0)),
        ({"alpha_pattern": {r"model.layers.0.mlp.\w+": 1.5}}, (2.0, 0.375)),
        ({"r": 9, "rank_pattern": {"up_proj|q_proj": 4}}, (2.0, 2.0)),
        ({"init_lora_weights": "gaussian", "lora_dropout": 0.1}, (2.0, 2.0)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_weights(
    dtype: Any, settings: Any, scales: Any, source: Path, tmp_path: Path
) -> None:
    """W + s B A in float64, rounded to the type of W."""
    model = made(llama(), dtype)
    saved(model, source)
    factors = with_adapter(source, **settings)
    merged = FloatCheckpoint(source, merge_adapter=True)
    weights = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if name.endswith(".weight")
    }
    assert "merged into the weights of 2 layers" in merged.reader.notes[0]
    for layer, scale in zip((Q, UP), scales, strict=True):
        a, b = (
            factors[f"base_model.model.{layer}.lora_{side}.weight"].double()
            for side in "AB"
        )
        weights[f"{layer}.weight"] = (
            weights[f"{layer}.weight"].double() + scale * (b @ a)
        ).to(dtype)
    loaded = merged.load().state_dict()
    for name, wanted in weights.items():
        close = 4e-6 if dtype == torch.float32 else 2**-8
        assert torch.allclose(loaded[name].float(), wanted.float(), close, close), name
    report = quantized(merged, tmp_path / "out")
    assert any("is merged into" in note for note in report.notes)
    # the same bytes as from a folder of the merged weights
    model.load_state_dict({**model.state_dict(), **loaded})
    quantized(saved(model, tmp_path / "merged"), tmp_path / "wanted")
    found, wanted = (
        load_file(tmp_path / name / "model.safetensors") for name in ("out", "wanted")
    )
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_layer_with_inputs_first(tmp_path: Path) -> None:
    model = made(config_of("gpt2"))
    source, layer = saved(model, tmp_path / "model"), "transformer.h.0.mlp.c_fc"
    factors = with_adapter(source, [layer], fan_in_fan_out=True)
    a, b = (factors[f"base_model.model.{layer}.lora_{side}.weight"] for side in "AB")
    found = FloatCheckpoint(source, merge_adapter=True).load().get_submodule(layer)
    wanted = model.get_submodule(layer).weight + 2 * (b @ a).T
    assert torch.allclose(found.weight, wanted, atol=1e-5)


def test_the_adapter_of_a_quantized_model(source: Path, tmp_path: Path) -> None:
    quantized(source, tmp_path / "int4", "compressed-tensors")
    before = FloatCheckpoint(tmp_path / "int4").load()
    with_adapter(source)
    for file in source.glob("adapter*"):
        (tmp_path / "int4" / file.name).write_bytes(file.read_bytes())
    after = FloatCheckpoint(tmp_path / "int4", merge_adapter=True)
    factors = load_file(source / "adapter_model.safetensors")
    a, b = (factors[f"base_model.model.{Q}.lora_{side}.weight"] for side in "AB")
    wanted = before.get_submodule(Q).weight + 2 * (b @ a)
    assert torch.allclose(after.load().get_submodule(Q).weight, wanted, atol=1e-5)
    # its codes are those of the base model
    assert after.codes_of(f"{Q}.weight") is None


def test_pickled_factors(source: Path) -> None:
    with_adapter(source)
    wanted = logits(FloatCheckpoint(source, merge_adapter=True).load(), tokens()[0])
    file = source / "adapter_model.safetensors"
    torch.save(load_file(file), source / "adapter_model.bin")
    file.unlink()
    found = logits(FloatCheckpoint(source, merge_adapter=True).load(), tokens()[0])
    assert torch.equal(found, wanted)


def extra(name: str, *shape: int) -> Any:
    return lambda tensors: tensors.update({name: torch.ones(shape)})


@pytest.mark.parametrize(
    ("settings", "change", "message"),
    [
        ({"peft_type": "IA3"}, None, "its peft_type is 'IA3'; merge it first"),
        ({"use_dora": True}, None, "use_dora is True; merge it first"),
        ({"bias": "all"}, None, "bias is all"),
        ({"modules_to_save": ["lm_head"]}, None, "modules_to_save is"),
        ({"a_setting_of_tomorrow": 3}, None, "a_setting_of_tomorrow is 3"),
        ({"init_lora_weights": "pissa"}, None, "init_lora_weights is pissa"),
        ({"r": 8}, None, "the rank of .* is 8, and 4 in the tensors"),
        ({"lora_alpha": "x"}, None, "lora_alpha of .* is 'x'; it must be a number"),
        ({"alpha_pattern": [1]}, None, "alpha_pattern is no object"),
        ({}, extra("base_model.model.lm_head.weight", 3, 3), "has the tensor base_mod"),
        (
            {},
            extra(f"base_model.model.{UP}.lora_B.weight", 96, 3),
            "lora_A and lora_B of .* do not fit each other",
        ),
        (
            {},
            extra(f"base_model.model.{UP}.lora_B.weight", 95, 4),
            r"make \[95, 64\], and its weight is \[96, 64\]",
        ),
        (
            {},
            lambda tensors: tensors.pop(f"base_model.model.{Q}.lora_A.weight"),
            "lora_A and lora_B of .*q_proj do not fit",
        ),
        (
            {},
            lambda tensors: tensors.update(
                {
                    "base_model.model.a.b.lora_A.weight": torch.ones(4, 2),
                    "base_model.model.a.b.lora_B.weight": torch.ones(2, 4),
                }
            ),
            "a.b is no linear layer of the base model",
        ),
        ({}, dict.clear, "it has no tensors"),
    ],
)
def test_what_is_no_plain_lora_is_refused(
    settings: Any, change: Any, message: str, source: Path
) -> None:
    tensors = with_adapter(source, **settings)
    if change is not None:
        change(tensors)
        save_file(tensors, source / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=message):
        FloatCheckpoint(source, merge_adapter=True)


def test_a_shared_weight_is_refused(tmp_path: Path) -> None:
    model = made(llama(tie_word_embeddings=True))
    source = saved(model, tmp_path / "model")
    with_adapter(source, [Q])
    for side, shape in {"A": (4, 64), "B": (96, 4)}.items():
        tensors = load_file(source / "adapter_model.safetensors")
        tensors[f"base_model.model.lm_head.lora_{side}.weight"] = torch.ones(shape)
        save_file(tensors, source / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="lm_head is shared with another layer"):
        FloatCheckpoint(source, merge_adapter=True)


def test_nothing_to_merge(source: Path) -> None:
    with pytest.raises(ConfigError, match="has no adapter to merge"):
        FloatCheckpoint(source, merge_adapter=True)
    (source / "adapter_config.json").write_text(json.dumps(LORA), encoding="utf-8")
    with pytest.raises(ModelError, match=r"and no adapter_model\.safetensors"):
        FloatCheckpoint(source, merge_adapter=True)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"target_modules": "all-linear"}),
        ("llama", {"target_modules": ["q_proj", "down_proj"], "use_rslora": True}),
        (
            "llama",
            {
                "target_modules": ["q_proj", "v_proj"],
                "rank_pattern": {"q_proj": 2},
                "alpha_pattern": {"layers.1.self_attn.v_proj": 5},
            },
        ),
        ("gpt2", {"target_modules": ["c_attn", "c_fc"]}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
# peft asks by the former name
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_peft_merges_to_the_same_bits(
    dtype: Any, family: str, settings: Any, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    config = llama() if family == "llama" else config_of(family)
    model, source = made(config, dtype), tmp_path / "model"
    saved(model, source)
    settings = {"r": 4, "lora_alpha": 8, **settings}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**settings))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.2)
    adapted.save_pretrained(source)
    wanted = adapted.merge_and_unload().state_dict()
    found = FloatCheckpoint(source, merge_adapter=True).load().state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
