"""Checkpoints in each layout as the libraries that they are for read them: the same logits, the
same codes.

Each test runs where its library is installed: compressed-tensors with accelerate,
onnxruntime-genai, gptqmodel.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quark_onnx.torch.checkpoints.export import write_checkpoint
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec
from quark_onnx.torch.config.torch_config import KVCache, TorchConfig
from quark_onnx.torch.formats.affine import Params
from quark_onnx.torch.formats.quantized_tensor import fake_quantize
from quark_onnx.torch.models.quantized_layer import QuantizedLayer
from quark_onnx.torch.pipelines.in_memory import quantize_model
from tests.child import child
from tests.torch_models import llama, logits, made, tokens

CLIENT = """
import torch
from pathlib import Path
from transformers import AutoModelForCausalLM, AwqConfig, CompressedTensorsConfig
settings = {"decompressed": CompressedTensorsConfig, "awq": lambda dequantize: AwqConfig(backend="torch_awq")}
def answer(checkpoint):
    folder, dtype, how = checkpoint.split("|")
    more = {"quantization_config": settings[how](dequantize=True)} if how else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), device_map="cpu", **more).eval()
    with torch.no_grad():
        torch.save(model(torch.load(Path(folder) / "tokens.pt")).logits.float(), Path(folder) / "logits.pt")
    return "loaded"
"""  # noqa: E501
T = TensorSpec
_TOKENS = {"per_channel": True, "dynamic": True}
OWN = {
    "int8 alone": LayerSpec(T("int8", per_channel=True)),
    "int8 asymmetric inputs": LayerSpec(
        T("int8", per_channel=True), T("uint8", symmetric=False)
    ),
    "int4 int8": LayerSpec(T("int4", block_size=32), T("int8", **_TOKENS)),
    "fp8 alone": LayerSpec(T("fp8e4m3")),
    "fp8 static": LayerSpec(T("fp8e4m3", per_channel=True), T("fp8e4m3")),
    "fp8 tokens": LayerSpec(T("fp8e4m3"), T("fp8e4m3", **_TOKENS)),
    "nvfp4 alone": LayerSpec(T("nvfp4")),
}
#: Schemes, and the type of the model in which the library computes what is computed here, to the
#: bit: its activations are rounded in the type of the model, and its blocks of floats decoded to
#: bfloat16.
COMPRESSED = [
    *(
        (name, "float32")
        for name in (
            "fp8",
            "ptpc_fp8",
            "int8",
            "int8_per_channel",
            "int4_wa_64",
            "int4_wo_32",
        )
    ),
    *(
        (name, "float32")
        for name in (
            "uint4_wo_32",
            "uint4_wo_per_channel",
            "int3_wo_32",
            *list(OWN)[:6],
        )
    ),
    *(
        (name, "bfloat16")
        for name in (
            "fp8",
            "ptpc_fp8",
            "int4_wo_per_channel",
            "uint4_wo_64",
            "int8 alone",
        )
    ),
    *((name, "bfloat16") for name in ("mxfp4", "mxfp4_weight_only", "nvfp4 alone")),
]


def needs(*libraries: str) -> None:
    for library in libraries:
        if find_spec(library) is None:
            pytest.skip(f"{library} is not installed")


def written(
    folder: Path, name: str, layout: str, dtype: str = "float32", **settings: Any
) -> Any:
    """A quantized model that has been written, with tokens beside it."""
    model = made(llama(hidden_size=128, intermediate_size=192), getattr(torch, dtype))
    config = TorchConfig(
        OWN.get(name) or scheme(name), **{"exclude": ("lm_head",), **settings}
    )
    quantize_model(model, tokens(), config, progress=False)
    write_checkpoint(model, config, folder, layout=layout)
    torch.save(tokens()[0], folder / "tokens.pt")
    return model


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[..., None]]:
    """Load checkpoints in a process that knows nothing of this package."""
    with child(CLIENT) as ask:

        def load(*checkpoints: str) -> None:
            for checkpoint in checkpoints:
                assert ask(checkpoint) == "loaded"

        yield load


@pytest.mark.slow
def test_compressed_tensors(tmp_path: Path, run: Callable[..., None]) -> None:
    needs("compressed_tensors", "accelerate")
    expected, lines = {}, list[str]()
    for name, dtype in COMPRESSED:
        folder = tmp_path / f"{name} {dtype}"
        expected[folder] = logits(
            written(folder, name, "compressed-tensors", dtype), tokens()[0]
        )
        # its releases 0.18 on have no room for zero points unless they decode at once
        lines.append(
            f"{folder}|{dtype}|{'decompressed' if name.startswith('uint') else ''}"
        )
    run(*lines)
    for folder, ours in expected.items():
        assert torch.equal(torch.load(folder / "logits.pt"), ours), folder.name


def test_compressed_tensors_of_many_kinds(
    tmp_path: Path, run: Callable[..., None]
) -> None:
    needs("compressed_tensors", "accelerate")
    own = (
        ("*.down_proj", scheme("int8_per_channel")),
        ("*.o_proj", scheme("ptpc_fp8")),
    )
    model = written(tmp_path / "out", "int4_wo_32", "compressed-tensors", layers=own)
    run(f"{tmp_path / 'out'}|float32|")
    assert torch.equal(
        torch.load(tmp_path / "out" / "logits.pt"), logits(model, tokens()[0])
    )


def test_keys_and_values_of_compressed_tensors(
    tmp_path: Path, run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("compressed_tensors", "accelerate")
    spec = T("fp8e4m3")
    model = written(
        tmp_path / "out", "int4_wo_32", "compressed-tensors", kv_cache=KVCache(spec)
    )
    run(f"{tmp_path / 'out'}|float32|")
    # clients round keys as they are kept, after their rotation
    from transformers.models.llama import modeling_llama

    if "cache" in signature(modeling_llama.LlamaAttention.forward).parameters:
        # transformers 5.24 renamed past_key_values, by which compressed-tensors 0.20 finds keys and
        # values: they stay float there
        for block in model.model.layers:
            block.self_attn.k_proj.output = block.self_attn.v_proj.output = None
        assert torch.equal(
            torch.load(tmp_path / "out" / "logits.pt"), logits(model, tokens()[0])
        )
        return
    blocks = iter(model.model.layers)
    rotate = modeling_llama.apply_rotary_pos_emb

    def rotated(*args: Any, **named: Any) -> Any:
        queries, keys = rotate(*args, **named)
        return queries, fake_quantize(keys, spec, Params(scales[next(blocks)]))

    scales = {}
    for block in model.model.layers:
        scales[block] = block.self_attn.k_proj.output.scale
        block.self_attn.k_proj.output = None
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotated)
    assert torch.equal(
        torch.load(tmp_path / "out" / "logits.pt"), logits(model, tokens()[0])
    )


@pytest.mark.parametrize("name", ["fp8", "fp8 tokens"])
def test_finegrained_fp8(name: str, tmp_path: Path, run: Callable[..., None]) -> None:
    needs("accelerate")
    model = written(tmp_path / "out", name, "finegrained-fp8")
    run(f"{tmp_path / 'out'}|float32|")
    for layer in model.modules():
        if isinstance(layer, QuantizedLayer):
            layer.input = None  # without a GPU its weights alone are what was written
    assert torch.equal(
        torch.load(tmp_path / "out" / "logits.pt"), logits(model, tokens()[0])
    )


@pytest.mark.slow
def test_awq(tmp_path: Path, run: Callable[..., None]) -> None:
    needs("gptqmodel")
    expected = {}
    for name in ("uint4_wo_32", "int4_wo_64", "uint4_wo_per_channel"):
        folder = tmp_path / name
        expected[folder] = logits(written(folder, name, "awq", "float16"), tokens()[0])
    run(*(f"{folder}|float16|awq" for folder in expected))
    for folder, ours in expected.items():
        assert torch.equal(torch.load(folder / "logits.pt"), ours), folder.name


def of_blocks(stored: Any) -> Any:
    """The weight that the operator MatMulNBits computes with: (outputs, inputs)."""
    rows, blocks, _ = stored.qweight.shape
    pairs = (
        np.stack([each & 15, each >> 4], -1)
        for each in (stored.qweight.numpy(), stored.qzeros.numpy())
    )
    codes, zeros = (
        next(pairs).reshape(rows, blocks, -1),
        next(pairs).reshape(rows, -1)[:, :blocks, None],
    )
    return (
        (codes.astype(np.float32) - zeros)
        * stored.scales.float().numpy().reshape(rows, blocks, 1)
    ).reshape(rows, -1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("exclude", [("lm_head",), ()])
@pytest.mark.parametrize(
    ("layout", "name"),
    [("oga", "uint4_wo_32"), ("oga", "int4_wo_64"), ("awq", "uint4_wo_32")],
)
def test_onnxruntime_genai(
    layout: str, name: str, exclude: tuple[str, ...], tmp_path: Path
) -> None:
    loader = "quark" if layout == "oga" else "awq"
    module = pytest.importorskip(
        f"onnxruntime_genai.models.loaders.{loader}", exc_type=ImportError
    )
    head = () if exclude or layout == "awq" else (("lm_head", scheme("uint4_wo_64")),)
    model = written(
        tmp_path / "out", name, layout, "float16", exclude=exclude, layers=head
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))[
        "quantization_config"
    ]
    read = (module.QuarkModel if layout == "oga" else module.AWQModel)(
        *(
            config["quant_method"],
            str(tmp_path / "out"),
            {"config": config},
            128,
            64,
            192,
            2,
        )
    )
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, QuantizedLayer)
    }
    assert len(layers) == 15 - len(exclude)
    for key, layer in layers.items():
        found = read
        for part in key.removeprefix("model.").split("."):
            found = found[int(part)] if part.isdigit() else getattr(found, part)
        np.testing.assert_array_equal(
            of_blocks(found), layer.quantized.dequantize(torch.float32).numpy()
        )
