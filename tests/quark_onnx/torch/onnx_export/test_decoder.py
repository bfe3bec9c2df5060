"""Language models as ONNX with keys and values: onnxruntime generates what transformers does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from transformers import AutoConfig

from quark_onnx.common.errors import ConfigError
from quark_onnx.torch.config.language import config_for
from quark_onnx.torch.exports.onnx import export_decoder
from quark_onnx.torch.pipelines.in_memory import quantize_model
from tests.torch_models import VOCABULARY, llama, made, tokens

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 16,
}
FAMILIES: dict[str, Any] = {
    "llama": {},
    "qwen2": {},
    "mistral": {"sliding_window": 5},
    "gemma2": {"sliding_window": 5, "attn_logit_softcapping": 20.0},
    "phi3": {"pad_token_id": 0},
}


def generated(path: Path, prompt: Any, count: int) -> list[list[int]]:
    """What onnxruntime generates greedily, with its own keys and values."""
    session = onnxruntime.InferenceSession(path)
    past = {
        each.name: np.zeros((len(prompt), each.shape[1], 0, each.shape[3]), np.float32)
        for each in session.get_inputs()
        if each.name.startswith("past")
    }
    names = [each.name for each in session.get_outputs()]
    ids, length = prompt.numpy(), prompt.shape[1]
    rows = []
    for _ in range(count):
        mask = np.ones((len(prompt), length), np.int64)
        inputs = {"input_ids": ids, "attention_mask": mask, **past}
        outputs = dict(zip(names, session.run(None, inputs), strict=True))
        ids = outputs.pop("logits")[:, -1:].argmax(-1)
        rows.append(ids)
        past = {
            name.replace("present", "past_key_values"): value
            for name, value in outputs.items()
        }
        length += 1
    return np.concatenate(rows, 1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = made(AutoConfig.for_model(family, **(SIZES | FAMILIES[family])))
    config = config_for("int4_wo_32")
    quantize_model(model, tokens(), config, progress=False)
    path = tmp_path / "model.onnx"
    found = export_decoder(model, path)
    assert found.difference < 1e-4
    written = onnx.load(path)
    assert written.producer_name == "quark_onnx"
    weight = {entry.key: entry.value for entry in written.metadata_props}
    assert weight["quark_onnx.weight"] == str(config.default.weight)
    nodes = [node.op_type for node in written.graph.node]
    assert nodes.count("GroupQueryAttention") == 2
    assert nodes.count("MatMulNBits") == len(found.layers) > 0
    prompt = torch.cat(tokens(2))
    wanted = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=12,
        min_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[:, prompt.shape[1] :]
    assert generated(path, prompt, 12) == wanted.tolist()
    # the model itself is as it was
    assert model.config._attn_implementation != "quark_onnx_group_query"


def test_attention_of_its_own_is_refused(tmp_path: Path) -> None:
    class Alone(torch.nn.Module):
        def forward(self, input_ids: Any, **_: Any) -> Any:
            return input_ids

    model = made(llama())
    model.model.layers[0].self_attn.is_causal = False
    with pytest.raises(ConfigError, match="is not causal"):
        export_decoder(model, tmp_path / "model.onnx")
    with pytest.raises(ConfigError, match="computes attention by itself"):
        export_decoder(Alone(), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
