"""Layers of a block that a run does not reach, or not where its gradients say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from quark_onnx.common.errors import QuarkError
from quark_onnx.torch.algorithms.scheduling.replay import Replay
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.models.heads import heads_of
from quark_onnx.torch.models.quantized_layer import QuantizedLayer
from quark_onnx.torch.pipelines.in_memory import quantize_model
from tests.torch_models import VOCABULARY, tokens

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
#: Sparse attention, whose indexer is run without gradients and behind layers that read what it
#: reads.
_SPARSE = {
    **_SIZES,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 4,
}
_BART = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_heads": 4,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
_RWKV = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
}
_MAMBA = {
    **_RWKV,
    "state_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
#: By name: the class, the model type and its settings.
FAMILIES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "deepseek_v32": (AutoModelForCausalLM, "deepseek_v32", _SPARSE),
    "glm_moe_dsa": (AutoModelForCausalLM, "glm_moe_dsa", _SPARSE),
    "t5": (AutoModelForSeq2SeqLM, "t5", _T5),
    "bart": (AutoModelForSeq2SeqLM, "bart", _BART),
    "bart_decoder": (AutoModelForCausalLM, "bart", _BART),
    "rwkv": (
        AutoModelForCausalLM,
        "rwkv",
        {**_RWKV, "attention_hidden_size": 64, "context_length": 64},
    ),
    "mamba": (AutoModelForCausalLM, "mamba", _MAMBA),
}
#: The sweeping ones, for which blocks are replayed.
SWEEPING = ("gptq", "gptaq", "qronos")
OTHERS = (
    "awq",
    "clip",
    "smoothquant",
    "autosmoothquant",
    "hqq",
    "autoround:steps=2",
    "rotation",
)


def model_of(family: str) -> Any:
    cls, kind, settings = FAMILIES[family]
    torch.manual_seed(0)
    model = cls.from_config(
        AutoConfig.for_model(kind, **settings), dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.15)
    return model


def batches(family: str) -> list[dict[str, Any]]:
    own = [each.clamp(min=3) for each in tokens(2)]
    both = FAMILIES[family][0] is AutoModelForSeq2SeqLM
    return [
        {"input_ids": each} | ({"decoder_input_ids": each.flip(1)} if both else {})
        for each in own
    ]


def quantized(family: str, name: str) -> tuple[Any, Any]:
    """The quantized model, and its report."""
    model = model_of(family)
    layer = scheme("int8_per_channel" if "smooth" in name else "uint4_wo_32")
    config = TorchConfig(layer, exclude=heads_of(model), algorithms=(name,))
    return model, quantize_model(model, batches(family), config, progress=False)


@pytest.mark.parametrize("name", SWEEPING[::2])
@pytest.mark.parametrize("family", FAMILIES)
def test_replays_are_whole_runs(
    family: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that earlier runs have stopped before is computed where it is reached: each code and
    each error is that of runs of the whole block, in which nothing is replayed.
    """
    model, report = quantized(family, name)
    monkeypatch.setattr(
        Replay, "run", lambda self, index, call, run: self._run_fully(call, run)
    )
    other, expected = quantized(family, name)
    assert report.outcomes == expected.outcomes and report.notes == expected.notes
    for name in report.quantized:
        one, two = model.get_submodule(name), other.get_submodule(name)
        assert torch.equal(one.codes, two.codes) and torch.equal(one.scale, two.scale)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(
    "family", ["deepseek_v32", "t5", "bart_decoder", "rwkv", "mamba"]
)
def test_no_algorithm_fails_for_a_layer_that_is_not_reached(
    family: str, name: str
) -> None:
    """An algorithm quantizes all layers, or refuses a model with an error that names a layer;
    layers that no run reaches are rounded to nearest.
    """
    try:
        model, report = quantized(family, name)
    except QuarkError as error:
        assert name == "rotation" and "rotated" in str(error)
        return
    assert all(
        isinstance(model.get_submodule(each), QuantizedLayer)
        for each in report.quantized
    )
    with torch.no_grad():
        assert model(**batches(family)[0]).logits.isfinite().all()


@pytest.mark.parametrize("name", SWEEPING)
def test_layers_that_no_data_reaches_are_noted(name: str) -> None:
    """Cross attention without an encoder has the codes of rounding to nearest, and the report says
    so.
    """
    model, report = quantized("bart_decoder", name)
    plain = model_of("bart_decoder")
    quantize_model(
        plain,
        None,
        TorchConfig(scheme("uint4_wo_32"), exclude=heads_of(plain)),
        progress=False,
    )
    unreached = [each for each in report.quantized if "encoder_attn" in each]
    assert len(unreached) == 8
    for each in unreached:
        assert torch.equal(
            model.get_submodule(each).codes, plain.get_submodule(each).codes
        )
    noted = {
        outcome.layer
        for outcome in report.outcomes
        if "the data has not reached it" in outcome.note
    }
    assert noted == set(unreached)
    (note,) = report.notes
    assert note.startswith(
        "model.decoder.layers.0.encoder_attn.k_proj and 7 more layers are not reached by the data"
    )
