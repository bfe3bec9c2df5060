"""Quantized embeddings, with and without a factor for the rows that they look up.

And what cannot be.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.bart.modeling_bart import BartScaledWordEmbedding

from quark_onnx.common.errors import ConfigError
from quark_onnx.torch.checkpoints.export import write_checkpoint
from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.models.quantized_layer import QuantizedLayer
from quark_onnx.torch.pipelines.file_to_file import quantize_checkpoint
from quark_onnx.torch.pipelines.in_memory import quantize_model
from tests import torch_families
from tests.torch_models import logits, made, saved, tokens

INT8 = LayerSpec(TensorSpec("int8", scale="float32"))
NAMED = TorchConfig(layers=(("*embed_tokens", INT8),))


def rounded(weight: Any) -> Any:
    """To int8 with one scale for the tensor."""
    scale = weight.double().abs().max() / 127.5
    scale = scale.float().double()
    return ((weight.double() / scale).round().clamp(-128, 127) * scale).to(weight.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["gemma2", "gemma3", "llama2"])
def test_rows_are_rounded_and_multiplied_as_before(
    family: str, dtype: Any, tmp_path: Path
) -> None:
    settings = torch_families.config_of(family)
    settings.tie_word_embeddings = False
    model = made(settings, dtype)
    embedding = model.get_input_embeddings()
    assert (type(embedding) is nn.Embedding) == (family == "llama2")
    source, expected = saved(model, tmp_path / "source"), copy.deepcopy(model)
    weight = expected.get_input_embeddings().weight
    weight.data = rounded(weight.data)
    assert not torch.equal(weight, embedding.weight)
    report = quantize_model(model, None, NAMED, progress=False)
    assert list(report.quantized) == ["model.embed_tokens"]
    wanted = logits(expected, tokens()[0])
    assert torch.equal(logits(model, tokens()[0]), wanted)
    write_checkpoint(model, NAMED, tmp_path / "memory")
    quantize_checkpoint(source, None, NAMED, tmp_path / "files", progress=False)
    for folder in ("memory", "files"):
        assert torch.equal(
            logits(load_checkpoint(tmp_path / folder), tokens()[0]), wanted
        )


def test_a_factor_that_is_a_number() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        BartScaledWordEmbedding(20, 8, 1, embed_scale=2.5), nn.Linear(8, 4)
    )
    expected = rounded(model[0].weight.detach())[[3, 5]] * 2.5
    quantize_model(model, None, TorchConfig(types={"Embedding": INT8}), progress=False)  # type: ignore[arg-type]
    assert isinstance(model[0], QuantizedLayer)
    assert torch.equal(model[0](torch.tensor([3, 5])), expected)


def test_an_embedding_that_computes_something_else_is_refused_by_name_and_listed_otherwise() -> (
    None
):
    model = made(torch_families.config_of("opt"))
    with pytest.raises(
        ConfigError,
        match=(
            r"embed_positions cannot be quantized: it is a"
            r" OPTLearnedPositionalEmbedding,"
        ),
    ):
        quantize_model(
            model,
            None,
            TorchConfig(layers=(("*embed_positions", INT8),)),
            progress=False,
        )
    report = quantize_model(
        model, None, TorchConfig(INT8, types=(("Embedding", INT8),)), progress=False
    )
    assert "model.decoder.embed_tokens" in report.quantized
    assert (
        "computes something else than the Embedding"
        in report.kept["model.decoder.embed_positions"]
    )


@pytest.mark.slow
def test_an_onnx_model_multiplies_too(tmp_path: Path) -> None:
    from quark_onnx.torch.exports.onnx import write_onnx

    settings = torch_families.config_of("gemma2")
    settings.tie_word_embeddings = False
    model = made(settings)
    quantize_model(model, None, NAMED, progress=False)
    assert (
        write_onnx(
            model, {"input_ids": tokens()[0]}, tmp_path / "model.onnx"
        ).difference
        < 1e-4
    )
