"""Wrong models and texts are refused before the work, with a name and a remedy."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import WhisperConfig, WhisperForConditionalGeneration

from quark_onnx.common.errors import DataError, ModelError
from quark_onnx.torch.calibration.perplexity import perplexity
from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.config.language import config_for
from quark_onnx.torch.exports.gguf import write_gguf
from quark_onnx.torch.models.forward_trace import further_inputs
from quark_onnx.torch.models.quantized_layer import QuantizedLayer
from quark_onnx.torch.pipelines.in_memory import quantize_model
from quark_onnx.torch.pipelines.mixed_precision import mix_checkpoint
from quark_onnx.torch.pipelines.ptq import Text, ptq, tokenizer_of
from tests.torch_families import config_of, task_folder, task_model
from tests.torch_models import llama, logits, made, saved, tokens, with_tokenizer


def long_text(folder: Path, length: int = 80) -> Text:
    np.save(folder / "long.npy", torch.cat(tokens(3, length)).numpy())
    return Text(str(folder / "long.npy"), 3, length)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
@pytest.mark.parametrize("use", ["calibration", "evaluation", "mixture"])
def test_windows_beyond_the_table_of_positions(
    use: str, family: str, tmp_path: Path
) -> None:
    source = saved(made(config_of(family)), tmp_path / "source")
    text, out = long_text(tmp_path), tmp_path / "out"
    reason = "windows of 80 tokens, and the model has positions for 64; .* at most 64"
    with pytest.raises(DataError, match=reason):
        if use == "calibration":
            ptq(source, text, config_for("fp8"), out, progress=False)
        elif use == "evaluation":
            config = config_for("uint4_wo_32")
            ptq(source, None, config, out, evaluate=text, progress=False)
        else:
            mix_checkpoint(
                FloatCheckpoint(source),
                ["uint4_wo_32", "ptpc_fp8"],
                6,
                text,
                config=config_for("uint4_wo_32"),
                progress=False,
            )
    assert not out.exists()


def test_rotary_embeddings_have_any_number_of_positions(tmp_path: Path) -> None:
    source = saved(made(llama()), tmp_path / "source")
    text = long_text(tmp_path)
    found = ptq(source, text, config_for("fp8"), tmp_path / "out", progress=False)
    assert len(found.report.quantized) == 14


def test_a_mixture_refuses_tokens_of_another_vocabulary(tmp_path: Path) -> None:
    source = saved(made(llama(vocab_size=48)), tmp_path / "source")
    with pytest.raises(DataError, match=r"those of the model are 0 to 47"):
        mix_checkpoint(
            FloatCheckpoint(source),
            ["uint4_wo_32", "ptpc_fp8"],
            6,
            long_text(tmp_path),
            config=config_for("uint4_wo_32"),
            progress=False,
        )


def test_perplexity_names_the_windows_that_cannot_be_run() -> None:
    model = made(config_of("gpt2"))
    with pytest.raises(DataError, match=r"cannot be run on windows of 80 tokens"):
        perplexity(model, [each[0] for each in tokens(2, 80)], progress=False)


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("model.norm.weight", 63),
        ("model.embed_tokens.weight", 95),
        ("model.layers.1.input_layernorm.weight", 65),
        ("model.layers.1.mlp.up_proj.weight", 95),
    ],
)
@pytest.mark.parametrize("needs_data", [False, True])
def test_tensors_of_another_shape(
    name: str, cut: int, needs_data: bool, tmp_path: Path
) -> None:
    source = saved(made(llama()), tmp_path / "source")
    file = source / "model.safetensors"
    stored = load_file(file)
    stored[name] = torch.ones(cut, *stored[name].shape[1:])
    save_file(stored, file, metadata={"format": "pt"})
    np.save(tmp_path / "tokens.npy", torch.cat(tokens()).numpy())
    text = Text(str(tmp_path / "tokens.npy"), 3, 12) if needs_data else None
    config = config_for("fp8" if needs_data else "uint4_wo_32")
    with pytest.raises(ModelError, match=rf"{name} is \[{cut}.*\], and .* in the mod"):
        ptq(source, text, config, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_a_damaged_tokenizer_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = with_tokenizer(saved(made(llama()), tmp_path / "source"))
    assert tokenizer_of(source) is not None
    (source / "tokenizer.json").write_text("{", encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        assert tokenizer_of(source) is None
    assert (
        "cannot read the tokenizer" in caplog.text and "tokenizer.json" in caplog.text
    )
    caplog.clear()
    for file in source.glob("tokenizer*"):
        file.unlink()
    assert tokenizer_of(source) is None and not caplog.text


@pytest.mark.parametrize("name", ["qwen3", "gpt_neox", "t5", "llama", "gemma2", "bert"])
def test_a_tokenizer_without_a_vocabulary_is_none(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers makes one all the same for some types, which knows no word of a text."""
    (tmp_path / "config.json").write_text(f'{{"model_type": "{name}"}}', "utf-8")
    assert tokenizer_of(tmp_path) is None
    assert not caplog.records
    (tmp_path / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    assert tokenizer_of(tmp_path) is None
    assert "cannot read the tokenizer" in caplog.text


@pytest.mark.parametrize("scheme", ["uint4_wo_32", "fp8", "mxfp4", "uint4_wo_32+gptq"])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op")
def test_layers_without_weights_stay_float(scheme: str, tmp_path: Path) -> None:
    name, _, algorithm = scheme.partition("+")
    model = made(llama(intermediate_size=0))
    source = saved(model, tmp_path / "source")
    config = config_for(name, exclude=("lm_head",))
    config = config.with_(algorithms=(algorithm,) if algorithm else ())
    np.save(tmp_path / "tokens.npy", torch.cat(tokens()).numpy())
    text = Text(str(tmp_path / "tokens.npy"), 3, 12)
    found = ptq(source, text, config, tmp_path / "out", progress=False).report
    report = quantize_model(model, tokens(), config, progress=False)
    layers = [each for each in model.modules() if isinstance(each, QuantizedLayer)]
    assert len(layers) == len(report.quantized) == len(found.quantized) == 8
    empty = [name for name, reason in found.kept.items() if reason == _EMPTY]
    assert empty == [
        f"model.layers.{i}.mlp.{each}_proj" for i in (0, 1) for each in _MLP
    ]
    batch: Any = tokens()[0]
    loaded = load_checkpoint(tmp_path / "out")
    assert torch.equal(logits(loaded, batch), logits(model, batch))


_EMPTY = "it has no weights"
_MLP = ("gate", "up", "down")


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op")
def test_a_gguf_file_of_layers_without_weights(tmp_path: Path) -> None:
    source = saved(made(llama(intermediate_size=0)), tmp_path / "source")
    found = write_gguf(source, tmp_path / "model.gguf", "q4_1")
    assert any("it has no weights" in note for note in found.notes)


def test_text_of_a_model_without_numbers_is_no_data_for_distill(tmp_path: Path) -> None:
    model = made(llama())
    with torch.no_grad():
        model.model.norm.weight[3] = torch.nan
    config = config_for("uint4_wo_32").with_(
        algorithms=("distill:steps=1,sequences=2",)
    )
    with pytest.raises(ModelError, match="the float model predicts NaN"):
        quantize_model(model, tokens(), config, progress=False)


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("T5ForConditionalGeneration", ["input_ids", "decoder_input_ids"]),
        # it makes the decoder's tokens of the encoder's
        ("BartForSequenceClassification", []),
        ("MambaForCausalLM", []),
    ],
)
def test_inputs_besides_token_ids(name: str, needed: list[str]) -> None:
    """A model runs on text if its forward needs token ids alone."""
    assert further_inputs(task_model(name)) == needed


def test_inputs_of_whisper() -> None:
    with torch.device("meta"):
        model = WhisperForConditionalGeneration(
            WhisperConfig(
                d_model=64,
                encoder_layers=1,
                decoder_layers=1,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
            )
        )
    assert further_inputs(model) == ["input_features", "decoder_input_ids"]


@pytest.mark.parametrize("use", ["calibration", "evaluation"])
def test_text_for_a_model_that_needs_more(use: str, tmp_path: Path) -> None:
    """The error names the model type, its inputs, and what to give instead."""
    source = task_folder("T5ForConditionalGeneration", tmp_path / "source")
    text, out = long_text(tmp_path, 16), tmp_path / "out"
    reason = (
        "a model of type t5 needs input_ids and decoder_input_ids.*quantize_checkpoint"
    )
    with pytest.raises(DataError, match=reason):
        if use == "calibration":
            ptq(source, text, config_for("fp8"), out, progress=False)
        else:
            config = config_for("uint4_wo_32")
            ptq(source, None, config, out, evaluate=text, progress=False)
    assert not out.exists()
