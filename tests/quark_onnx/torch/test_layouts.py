"""Checkpoints in each layout, decoded bit by bit from what the formats' own documents say.

What they refuse.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from quark_onnx.common.errors import ConfigError, ModelError
from quark_onnx.torch.checkpoints.export import write_checkpoint
from quark_onnx.torch.checkpoints.layouts import LAYOUTS, layout_named, read_layout
from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec
from quark_onnx.torch.config.torch_config import KVCache, TorchConfig
from quark_onnx.torch.formats.bit_packing import pack_words, unpack_words
from quark_onnx.torch.models.names import NamesInTransformers
from quark_onnx.torch.models.quantized_layer import QuantizedLayer
from quark_onnx.torch.pipelines.file_to_file import Writing, quantize_checkpoint
from quark_onnx.torch.pipelines.in_memory import quantize_model
from quark_onnx.torch.validate import validate
from tests.torch_families import config_of
from tests.torch_models import llama, logits, made, saved, tokens

T = TensorSpec
_TOKENS = {"per_channel": True, "dynamic": True}
OWN = {
    "int8 outputs": LayerSpec(T("int8", per_channel=True)),
    "int8 alone": LayerSpec(T("int8")),
    "int8 blocks": LayerSpec(T("int8", block_size=32)),
    "uint8 blocks": LayerSpec(T("uint8", symmetric=False, block_size=32)),
    "uint4 symmetric": LayerSpec(T("uint4", block_size=32)),
    "int4 asymmetric": LayerSpec(T("int4", symmetric=False, per_channel=True)),
    "fp8 alone": LayerSpec(T("fp8e4m3")),
    "nvfp4 alone": LayerSpec(T("nvfp4")),
    "fp8 tokens": LayerSpec(T("fp8e4m3"), T("fp8e4m3", **_TOKENS)),
    "int8 asymmetric inputs": LayerSpec(T("int8"), T("uint8", symmetric=False)),
    "int4 int8": LayerSpec(T("int4", block_size=32), T("int8", **_TOKENS)),
    "int4 half": LayerSpec(T("int4", block_size=32, scale="float16")),
    "uint4 half": LayerSpec(
        T("uint4", symmetric=False, block_size=32, scale="float16")
    ),
    "uint4 half outputs": LayerSpec(
        T("uint4", symmetric=False, per_channel=True, scale="float16")
    ),
}
CASES = [
    *(
        ("compressed-tensors", name)
        for name in (
            *(
                "fp8",
                "ptpc_fp8",
                "int8",
                "int8_per_channel",
                "int4_wo_32",
                "int4_wo_per_channel",
                "uint4_wo_32",
            ),
            *(
                "uint4_wo_per_channel",
                "int4_wa_64",
                "int3_wo_32",
                "uint3_wo_32",
                "uint2_wo_32",
                "mxfp4",
            ),
            *("mxfp4_weight_only", "mxfp8", "nvfp4", *list(OWN)[:11]),
        )
    ),
    *(("awq", name) for name in ("int4 half", "uint4 half", "uint4 half outputs")),
    *(
        (layout, name)
        for layout in ("fp8", "finegrained-fp8")
        for name in ("fp8", "fp8 tokens")
    ),
    *(
        ("oga", name)
        for name in ("int4_wo_32", "uint4_wo_32", "int4 half", "uint4_wo_64")
    ),
]
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_E2M1, -_E2M1])
#: AutoAWQ's order_map: which of eight columns the nibbles of a number hold, from the lowest on.
_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def spec_of(name: str) -> LayerSpec:
    return OWN.get(name) or scheme(name)


def quantized(
    name: str, dtype: Any = torch.float32, **settings: Any
) -> tuple[Any, TorchConfig]:
    model = made(llama(hidden_size=128, intermediate_size=192), dtype)
    config = TorchConfig(spec_of(name), exclude=("lm_head",), **settings)
    quantize_model(model, tokens(), config, progress=False)
    return model, config


def described(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))[
        "quantization_config"
    ]


def stream(words: Any, bits: int, count: int) -> Any:
    """Codes of a row after the other of a stream of bits, the lowest bit first."""
    flat = np.unpackbits(words.numpy().view(np.uint8), axis=-1, bitorder="little")[
        ..., : count * bits
    ]
    return (flat.reshape(len(words), count, bits) << np.arange(bits)).sum(-1)


def nibbles(words: Any) -> Any:
    """Columns of AutoAWQ's numbers."""
    found = np.empty((*words.shape, 8), np.int64)
    for place, column in enumerate(_ORDER):
        found[..., column] = words.numpy() >> 4 * place & 15
    return found.reshape(len(words), -1)


def real(tensor: Any) -> Any:
    """A tensor of floats in numpy."""
    if tensor.dtype == torch.float8_e4m3fn:
        return (
            tensor.view(torch.uint8)
            .numpy()
            .view(ml_dtypes.float8_e4m3fn)
            .astype(np.float32)
        )
    return tensor.float().numpy()


def spread(scale: Any, columns: int) -> Any:
    """Scales of blocks for each column."""
    return np.repeat(scale, columns // scale.shape[-1], -1)


def by_compressed_tensors(parts: dict[str, Any], group: dict[str, Any]) -> Any:
    arguments, form = group["weights"], group["format"]
    scale, bits = real(parts["weight_scale"]), arguments["num_bits"]
    if form == "pack-quantized":
        rows, columns = parts["weight_shape"].tolist()
        codes = stream(parts["weight_packed"], bits, columns)
        zero: Any = 1 << bits - 1
        if not arguments["symmetric"]:
            zero = spread(
                stream(parts["weight_zero_point"].t().contiguous(), bits, rows).T,
                columns,
            )
        return (codes - zero).astype(np.float32) * spread(scale, columns)
    if form in ("int-quantized", "float-quantized"):
        return real(parts["weight"]) * (
            scale if arguments["strategy"] == "channel" else scale[0]
        )
    if form == "mxfp8-quantized":
        values = real(parts["weight"])
    else:
        packed = parts["weight_packed"].numpy()
        values = _E2M1[
            np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
        ]
    if form == "nvfp4-pack-quantized":
        return values * spread(
            scale / parts["weight_global_scale"].numpy(), values.shape[1]
        )
    return values * np.exp2(
        spread(parts["weight_scale"].numpy().astype(np.float32) - 127, values.shape[1])
    )


def by_awq(parts: dict[str, Any], codes: str, zeros: str, scales: str) -> Any:
    found, zero, scale = (
        nibbles(parts[codes]),
        nibbles(parts[zeros]),
        real(parts[scales]),
    )
    each = len(found) // len(scale)
    return (
        (found - np.repeat(zero, each, 0)).astype(np.float32)
        * np.repeat(scale, each, 0)
    ).T


def decoded(layout: str, parts: dict[str, Any], found: dict[str, Any]) -> Any:
    """The weight of a layer, as the format has it."""
    if layout == "compressed-tensors":
        return by_compressed_tensors(parts, found["config_groups"]["group_0"])
    if layout == "awq":
        return by_awq(parts, "qweight", "qzeros", "scales")
    if layout == "oga":
        return by_awq(parts, "weight", "weight_zero_point", "weight_scale")
    return (
        real(parts["weight"])
        * parts["weight_scale" if layout == "fp8" else "weight_scale_inv"].numpy()
    )


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_codes_are_those_of_the_model(layout: str, name: str, tmp_path: Path) -> None:
    model, config = quantized(name)
    write_checkpoint(model, config, tmp_path / "out", layout=layout)
    stored, found = (
        load_file(tmp_path / "out" / "model.safetensors"),
        described(tmp_path / "out"),
    )
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLayer)
    }
    assert len(layers) == 14
    for key, layer in layers.items():
        parts = {
            end.removeprefix(f"{key}."): tensor
            for end, tensor in stored.items()
            if end.startswith(f"{key}.")
        }
        weight = decoded(layout, parts, found)
        assert weight.dtype == np.float32 and weight.shape == layer.shape
        if (
            layer.spec.weight.dtype.name == "nvfp4"
        ):  # the scale of the tensor is stored as its inverse
            np.testing.assert_allclose(weight, layer.weight.numpy(), rtol=3e-7)
        else:
            np.testing.assert_array_equal(weight, layer.weight.numpy())
    loaded, ours = (
        logits(load_checkpoint(tmp_path / "out"), tokens()[0]),
        logits(model, tokens()[0]),
    )
    torch.testing.assert_close(
        loaded, ours, rtol=0, atol=1e-4 if "nvfp4" in name else 0
    )
    clients = {"fp8": ("vllm",), "finegrained-fp8": ("transformers",)}.get(
        layout, ("vllm", "transformers")
    )
    refused = {
        (each, finding.rule)
        for each in clients
        for finding in validate(tmp_path / "out", each).findings
    }
    refused.discard(
        ("transformers", "ct-zero-points")
    )  # a warning: an option of the library decodes them
    # The model is float32, and the library decodes these formats to bfloat16.
    decoded_to_bfloat16 = layout == "compressed-tensors" and name.startswith(
        ("mxfp", "nvfp4")
    )
    assert refused == (
        {("transformers", "ct-bfloat16")} if decoded_to_bfloat16 else set()
    )


@given(st.integers(1, 8), st.integers(1, 70), st.integers(0, 2**32 - 1))
def test_streams_of_bits(bits: int, count: int, seed: int) -> None:
    codes = torch.from_numpy(
        np.random.default_rng(seed).integers(0, 1 << bits, (3, count))
    )
    words = pack_words(codes, bits)
    assert words.shape == (3, -(-count * bits // 32))
    np.testing.assert_array_equal(stream(words, bits, count), codes.numpy())
    assert torch.equal(unpack_words(words, bits, count).long(), codes)


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("quark", "uint4_wo_32"),
        ("compressed-tensors", "int8"),
        ("awq", "uint4_wo_32"),
        ("fp8", "fp8"),
        ("oga", "int4_wo_32"),
    ],
)
def test_files_hold_what_a_model_in_memory_does(
    layout: str, name: str, tmp_path: Path
) -> None:
    source = saved(made(llama(), torch.bfloat16), tmp_path / "source")
    config = TorchConfig(scheme(name), exclude=("lm_head",))
    quantize_checkpoint(
        source,
        tokens(),
        config,
        tmp_path / "files",
        writing=Writing(layout=layout),
        progress=False,
    )
    model = load_checkpoint(source)
    config = layout_named(layout).adapted(config)
    quantize_model(model, tokens(), config, progress=False)
    write_checkpoint(model, config, tmp_path / "memory", layout=layout)
    files, memory = (
        load_file(tmp_path / each / "model.safetensors") for each in ("files", "memory")
    )
    assert files.keys() == memory.keys()
    for key, tensor in files.items():
        assert tensor.dtype == memory[key].dtype and torch.equal(tensor, memory[key]), (
            key
        )
    assert described(tmp_path / "files") == described(tmp_path / "memory")
    assert (
        read_layout(described(tmp_path / "files"))[1].method == LAYOUTS[layout].method
    )


def test_scales_of_awq_are_half_and_chosen_so(tmp_path: Path) -> None:
    source = saved(made(llama()), tmp_path / "source")
    config = TorchConfig(scheme("uint4_wo_32"), exclude=("lm_head",))
    report = quantize_checkpoint(
        source,
        None,
        config,
        tmp_path / "out",
        writing=Writing(layout="awq"),
        progress=False,
    )
    assert {spec.weight.scale for spec in report.quantized.values() if spec.weight} == {
        "float16"
    }
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {
        tensor.dtype for name, tensor in stored.items() if name.endswith("scales")
    } == {torch.float16}
    entry = {
        "bits": 4,
        "group_size": 32,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["lm_head"],
    }
    assert described(tmp_path / "out") == {"quant_method": "awq", **entry}
    model = made(llama())
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1e-6)
    quantize_model(model, None, config, progress=False)
    with pytest.raises(
        ConfigError,
        match=(
            r"model.layers.0.mlp.up_proj: scales lie between .*, which float16 cannot"
        ),
    ):
        write_checkpoint(model, config, tmp_path / "memory", layout="awq")
    assert not (tmp_path / "memory").exists()


@pytest.mark.parametrize(
    ("layout", "name"), [("compressed-tensors", "ptpc_fp8"), ("fp8", "fp8")]
)
def test_keys_and_values(layout: str, name: str, tmp_path: Path) -> None:
    model, config = quantized(name, kv_cache=KVCache(T("fp8e4m3")))
    write_checkpoint(model, config, tmp_path / "out", layout=layout)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for index, block in enumerate(model.model.layers):
        for side in "kv":
            scale = getattr(block.self_attn, f"{side}_proj").output.scale
            assert torch.equal(
                stored[f"model.layers.{index}.self_attn.{side}_scale"].reshape(()),
                scale,
            )
    assert not any("output_scale" in key for key in stored)
    assert torch.equal(
        logits(load_checkpoint(tmp_path / "out"), tokens()[0]),
        logits(model, tokens()[0]),
    )
    verdict = validate(tmp_path / "out", "vllm")
    assert verdict.right and not verdict.findings, str(verdict)
    if layout == "compressed-tensors":
        kept = described(tmp_path / "out")["kv_cache_scheme"]
        assert (kept["num_bits"], kept["type"], kept["strategy"], kept["dynamic"]) == (
            8,
            "float",
            "tensor",
            False,
        )


def test_layers_that_differ_are_groups(tmp_path: Path) -> None:
    own = (
        ("*.down_proj", scheme("int8_per_channel")),
        ("*.o_proj", scheme("mxfp4_weight_only")),
    )
    model, config = quantized("uint4_wo_32", layers=own)
    write_checkpoint(model, config, tmp_path / "out", layout="compressed-tensors")
    found = described(tmp_path / "out")
    assert found["format"] == "mixed-precision" and found["ignore"] == ["lm_head"]
    groups = {
        group["format"]: group["targets"] for group in found["config_groups"].values()
    }
    assert groups == {
        "int-quantized": [f"model.layers.{index}.mlp.down_proj" for index in (0, 1)],
        "mxfp4-pack-quantized": [
            f"model.layers.{index}.self_attn.o_proj" for index in (0, 1)
        ],
        "pack-quantized": ["Linear"],
    }
    assert torch.equal(
        logits(load_checkpoint(tmp_path / "out"), tokens()[0]),
        logits(model, tokens()[0]),
    )
    assert validate(tmp_path / "out", "vllm").right


@pytest.mark.parametrize("layout", ["compressed-tensors", "fp8"])
def test_experts_that_saw_no_data_are_quantized_like_the_others(
    layout: str, tmp_path: Path
) -> None:
    source = saved(made(config_of("qwen2_moe")), tmp_path / "source")
    data = [torch.tensor([[5, 6]])]
    config = TorchConfig(scheme("fp8"), exclude=("lm_head",))
    writing = Writing(layout=layout)
    report = quantize_checkpoint(
        source, data, config, tmp_path / "out", writing=writing, progress=False
    )
    assert any("was not run on the data" in note for note in report.notes)
    loaded = load_checkpoint(tmp_path / "out")
    assert all(
        loaded.get_submodule(name).input.scale is not None for name in report.quantized
    )
    assert torch.isfinite(logits(loaded, tokens()[0])).all()
    assert validate(tmp_path / "out", "vllm").right


@pytest.mark.parametrize("name", ["int4_wo_32", "fp8"])
def test_experts_keep_the_names_that_clients_know(name: str, tmp_path: Path) -> None:
    source = saved(made(config_of("mixtral")), tmp_path / "source")
    config, writing = (
        TorchConfig(scheme(name), exclude=("lm_head",)),
        Writing(layout="compressed-tensors"),
    )
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in load_file(
        source / "model.safetensors"
    )
    quantize_checkpoint(
        source, tokens(9), config, tmp_path / "out", writing=writing, progress=False
    )
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight_scale" in load_file(
        tmp_path / "out/model.safetensors"
    )
    model = load_checkpoint(source)
    quantize_model(model, tokens(9), config, progress=False)
    assert torch.equal(
        logits(load_checkpoint(tmp_path / "out"), tokens()[0]),
        logits(model, tokens()[0]),
    )
    write_checkpoint(model, config, tmp_path / "memory", layout="compressed-tensors")
    assert (
        load_file(tmp_path / "memory/model.safetensors").keys()
        == load_file(tmp_path / "out/model.safetensors").keys()
    )
    source = saved(made(config_of("gpt_oss")), tmp_path / "stacked")
    with pytest.raises(
        ConfigError,
        match=(
            r"would not find model.layers.0.mlp.experts.0.gate_proj: .* of gpt_oss have"
        ),
    ):
        quantize_checkpoint(
            source,
            tokens(),
            config,
            tmp_path / "other",
            writing=writing,
            progress=False,
        )


@pytest.mark.parametrize(
    ("layout", "name", "message"),
    [
        (
            "awq",
            "fp8",
            r"default, weight fp8e4m3.*, input fp8e4m3.*, has no place .* 'awq': it has"
            r" weights alone; these have one: "
            "quark, compressed-tensors, fp8, finegrained-fp8$",
        ),
        (
            "awq",
            "int8 outputs",
            (
                "it has integers of 4 bits alone; these have one: quark,"
                " compressed-tensors$"
            ),
        ),
        (
            "fp8",
            "ptpc_fp8",
            (
                "it has fp8e4m3 with one scale for a weight; these have one: quark,"
                " compressed-tensors$"
            ),
        ),
        ("fp8", "fp8 alone", "it has weights and inputs, both"),
        (
            "oga",
            "uint4_wo_per_channel",
            "it has blocks of 16, 32, 64, 128, 256; these have one: quark, .*awq$",
        ),
        ("compressed-tensors", "mxfp6_e2m3", "these have one: quark$"),
        ("compressed-tensors", "mxfp4_fp8", "these have one: quark$"),
        ("compressed-tensors", "bf16", "these have one: quark$"),
        ("quark", "mx6", "no layout has; it can be evaluated"),
    ],
)
def test_formats_without_a_place_are_refused_before_any_work(
    layout: str, name: str, message: str, tmp_path: Path
) -> None:
    config = TorchConfig(spec_of(name), exclude=("lm_head",))
    with pytest.raises(ConfigError, match=message):
        quantize_checkpoint(
            tmp_path / "none",
            None,
            config,
            tmp_path / "out",
            writing=Writing(layout=layout),
        )


ODD = {"hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 5}


def uneven(**settings: Any) -> TorchConfig:
    return TorchConfig(scheme("uint4_wo_32"), **{"exclude": ("lm_head",), **settings})


@pytest.mark.parametrize(
    ("layout", "config", "settings", "message"),
    [
        (
            "awq",
            uneven(kv_cache=KVCache(T("fp8e4m3"))),
            {},
            "kv_cache, fp8e4m3 .* 'awq': keys and values stay float",
        ),
        (
            "awq",
            uneven(layers=(("*.o_proj", scheme("uint4_wo_64")),)),
            {},
            "blocks of 32, and .*o_proj 64; .* 'awq' has one",
        ),
        (
            "awq",
            TorchConfig(scheme("uint4_wo_per_channel"), exclude=("lm_head",)),
            {"intermediate_size": 100},
            r"gate_proj has 100 outputs, and the layout 'awq' puts eight",
        ),
        (
            "awq",
            uneven(),
            ODD,
            r"80 inputs, which blocks of 32 .*a scheme that fits: uint4_wo_per_channel",
        ),
        (
            "compressed-tensors",
            uneven(),
            {"intermediate_size": 100},
            r"down_proj has 100 inputs, which blocks of 32 .*\(2 of 14 layers\), .*'compressed-",
        ),
        (
            "compressed-tensors",
            uneven(layers={"model.embed_tokens": scheme("uint4_wo_32")}),
            {},
            "embed_tokens is a Embedding",
        ),
        (
            "oga",
            uneven(exclude=("*.o_proj",)),
            {},
            r"layers.0.self_attn.o_proj stays float, and the model builder",
        ),
        (
            "oga",
            uneven(layers=(("*.o_proj", scheme("uint4_wo_64")),)),
            {},
            "o_proj 64; the layout 'oga' has one",
        ),
    ],
)
def test_models_without_a_place_are_refused_before_any_work(
    layout: str,
    config: TorchConfig,
    settings: dict[str, Any],
    message: str,
    tmp_path: Path,
) -> None:
    source = saved(made(llama(**settings)), tmp_path / "source")
    with pytest.raises(ConfigError, match=message):
        quantize_checkpoint(
            source,
            None,
            config,
            tmp_path / "out",
            writing=Writing(layout=layout),
            progress=False,
        )
    model = load_checkpoint(source)
    quantize_model(model, tokens(), config, progress=False)
    with pytest.raises(ConfigError, match=message):
        write_checkpoint(model, config, tmp_path / "out", layout=layout)
    assert not (tmp_path / "out").exists()


def test_other_families(tmp_path: Path) -> None:
    source = saved(made(config_of("gpt2")), tmp_path / "gpt2")
    config = TorchConfig(scheme("int4_wo_32"), exclude=("lm_head",))
    with pytest.raises(
        ConfigError,
        match=(
            "c_attn is a Conv1D, and the layout 'awq' has a place for Linear layers"
            " alone"
        ),
    ):
        quantize_checkpoint(
            source,
            None,
            config,
            tmp_path / "out",
            writing=Writing(layout="awq"),
            progress=False,
        )
    source = saved(made(config_of("opt")), tmp_path / "opt")
    with pytest.raises(
        ConfigError, match=r"fc1|k_proj has no place in the layout 'oga'"
    ):
        quantize_checkpoint(
            source,
            None,
            config,
            tmp_path / "out",
            writing=Writing(layout="oga"),
            progress=False,
        )


def test_names_that_are_parts_of_others(tmp_path: Path) -> None:
    """AutoAWQ's readers look for parts of names; transformers reads fp8 with a rule of its own."""
    quantized = {"model.layers.0.mlp.gate_proj": scheme("uint4_wo_32")}
    floats = ["model.layers.0.mlp.gate"]
    with pytest.raises(
        ConfigError,
        match=(
            r"mlp.gate stays float, and its name is a part of"
            r" model.layers.0.mlp.gate_proj"
        ),
    ):
        layout_named("awq").quantization_config(quantized, floats, TorchConfig())
    layout_named("finegrained-fp8").quantization_config(
        {"model.layers.0.mlp.gate_proj": scheme("fp8")}, floats, TorchConfig()
    )


NAMES_IN_TRANSFORMERS = (
    *("lm_head", "model.lm_head", "model.layers.1.fc1", "model.layers.11.fc1"),
    *("model.layers.1.mlp.gate", "model.layers.1.mlp.gate_proj", "models.fc2"),
    "model.layers.11.fc10",
)


@pytest.mark.parametrize(
    "pattern",
    [
        *("lm_head", "fc1", "1.fc1", "gate", "mlp.gate", "mlp", "layers.1", ""),
        *("model.layers.1", "model.layers.1.mlp.gate", "model.layers.1."),
        *("model.layers.*", "model|lm_head", r"model\.layers\.\d+\.fc1", "odel"),
    ],
)
def test_names_of_float_layers_in_transformers(pattern: str) -> None:
    from transformers.quantizers.quantizers_utils import should_convert_module

    for patterns in ([pattern], [pattern, "(other)"], ["x.y", pattern, "z|a", "y"]):
        names = NamesInTransformers(patterns)
        for name in NAMES_IN_TRANSFORMERS:
            found = names.match(name)
            assert found is not should_convert_module(name, patterns), (name, patterns)


def test_float_layers_whose_names_transformers_finds_elsewhere() -> None:
    """The end of a name is compared without its dot."""
    quantized = {"model.layers.11.fc1": scheme("fp8")}
    with pytest.raises(ConfigError, match=r"1.fc1 stays float"):
        layout_named("finegrained-fp8").quantization_config(
            quantized, ["1.fc1"], TorchConfig()
        )


def test_the_head_of_oga_has_a_size_of_its_own(tmp_path: Path) -> None:
    model = made(llama(hidden_size=128, intermediate_size=192))
    config = TorchConfig(
        scheme("int4_wo_32"), layers=(("lm_head", scheme("uint4_wo_64")),)
    )
    quantize_model(model, None, config, progress=False)
    write_checkpoint(model, config, tmp_path / "out", layout="oga")
    found = described(tmp_path / "out")
    # npu-reference 9.1: the first part of a name is looked up, and dtype and group_size of what is
    # found are read
    assert found["quant_method"] == "quark" and list(found["layer_quant_config"]) == [
        "lm_head"
    ]
    entries = [found["global_quant_config"], found["layer_quant_config"]["lm_head"]]
    assert [
        (each["weight"]["dtype"], each["weight"]["group_size"]) for each in entries
    ] == [
        ("uint4", 32),
        ("uint4", 64),
    ]
    assert torch.equal(
        logits(load_checkpoint(tmp_path / "out"), tokens()[0]),
        logits(model, tokens()[0]),
    )
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored["model.layers.0.mlp.up_proj.weight"].shape == (128, 24)
    assert stored["model.layers.0.mlp.up_proj.weight_zero_point"].shape == (4, 24)
    assert (nibbles(stored["model.layers.0.mlp.up_proj.weight_zero_point"]) == 8).all()


@pytest.mark.parametrize(
    ("layout", "name", "lost"),
    [
        ("compressed-tensors", "uint4_wo_32", "weight_zero_point"),
        ("compressed-tensors", "int8", "weight"),
        ("awq", "uint4 half", "qzeros"),
        ("fp8", "fp8", "input_scale"),
    ],
)
def test_tensors_that_are_missing_or_do_not_fit(
    layout: str, name: str, lost: str, tmp_path: Path
) -> None:
    model, config = quantized(name)
    write_checkpoint(model, config, tmp_path / "out", layout=layout)
    file, key = (
        tmp_path / "out" / "model.safetensors",
        f"model.layers.1.mlp.up_proj.{lost}",
    )
    stored = load_file(file)
    kept = stored.pop(key)
    save_file(stored, file)
    with pytest.raises(
        ModelError, match=rf"model.layers.1.mlp.up_proj .*there is no '{lost}'"
    ):
        load_checkpoint(tmp_path / "out")
    if kept.ndim == 2:
        save_file(stored | {key: kept[:-1].contiguous()}, file)
        with pytest.raises(ModelError, match=r"model.layers.1.mlp.up_proj do not fit"):
            load_checkpoint(tmp_path / "out")


def test_a_run_of_another_layout_is_not_resumed(tmp_path: Path) -> None:
    source = saved(made(llama()), tmp_path / "source")
    config = TorchConfig(scheme("fp8"), exclude=("lm_head",))
    for layout in ("compressed-tensors", "fp8"):
        writing = Writing(layout=layout, resume=tmp_path / layout)
        quantize_checkpoint(
            source,
            tokens(),
            config,
            tmp_path / f"{layout}-1",
            writing=writing,
            progress=False,
        )
        quantize_checkpoint(
            source,
            tokens(),
            config,
            tmp_path / f"{layout}-2",
            writing=writing,
            progress=False,
        )
        first, second = (
            tmp_path / f"{layout}-{index}" / "model.safetensors" for index in (1, 2)
        )
        assert first.read_bytes() == second.read_bytes()
    with pytest.raises(
        ConfigError, match="holds the work of another run: its configuration differs"
    ):
        quantize_checkpoint(
            source,
            tokens(),
            config,
            tmp_path / "out",
            writing=Writing(resume=tmp_path / "fp8"),
        )


def groups(**group: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def test_settings_of_layouts() -> None:
    with pytest.raises(
        ConfigError,
        match="unknown layout 'gptq'; known: awq, compressed-tensors, finegrained-fp8",
    ):
        Writing(layout="gptq")
    with pytest.raises(
        ConfigError,
        match="pack_method is 'order'; the layout 'awq' has an order of its own",
    ):
        Writing(layout="awq", pack_method="order")


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (
            {"quant_method": "gptq"},
            "quant_method is 'gptq'; this reads quark, compressed-tensors, awq, fp8$",
        ),
        ({"quant_method": "awq", "bits": 8}, "bits 8 and version 'gemm'"),
        ({"quant_method": "awq", "bits": 4, "group_size": None}, "group_size None"),
        (
            {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
            },
            r"weight_block_size \[128",
        ),
        ({"quant_method": "compressed-tensors"}, "config_groups None"),
        (
            groups(targets=["re:.*"], weights=None),
            "the pattern 're:",
        ),
        (
            groups(targets=["Linear"], weights={"strategy": "block"}),
            "int8 with the strategy 'block'",
        ),
    ],
)
def test_configurations_that_cannot_be_read(
    found: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_layout(found)
