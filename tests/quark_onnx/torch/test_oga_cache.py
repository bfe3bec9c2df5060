"""Scales of a quantized KV cache: onnxruntime's GroupQueryAttention keeps the same codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from calibrators.onnx_runtime.session import open_session
from quark_onnx.common.errors import ConfigError
from quark_onnx.torch.config.spec import TensorSpec
from quark_onnx.torch.exports.oga_cache import (
    CACHES,
    check_cache,
    measure_cache,
    rounded_cache,
)
from quark_onnx.torch.formats.affine import Params, encode
from tests.torch_models import llama, logits, made, tokens


def windows() -> list[Any]:
    return [batch[0] for batch in tokens()]


def cached(model: Any, window: Any) -> list[tuple[Any, Any]]:
    """Rotated keys and values of each layer, from transformers' own cache."""
    with torch.no_grad():
        found = model(input_ids=window[None], use_cache=True).past_key_values
    return [(layer.keys[0], layer.values[0]) for layer in found.layers]


@pytest.mark.parametrize("name", CACHES)
def test_scales_cover_what_transformers_caches(name: str) -> None:
    model = made(llama())
    scales = measure_cache(model, windows(), name)
    held = [cached(model, window) for window in windows()]
    largest_code = {"int8": 127, "int4": 7}[name]
    for layer in range(2):
        for side, found in enumerate((scales.keys[layer], scales.values[layer])):
            every = torch.cat([each[layer][side] for each in held], dim=1)
            wanted = every.abs().amax(dim=1, keepdim=True) / largest_code
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    document = scales.document()["scales"]
    assert [len(each) for each in document["k_scales"]] == [32, 32]
    assert model.config._attn_implementation == "sdpa"


def group_query(bits: int, heads: int, key_heads: int, size: int) -> bytes:
    """A model of one GroupQueryAttention with a quantized cache."""
    cache = TensorProto.INT8 if bits == 8 else TensorProto.UINT8
    node = helper.make_node(
        "GroupQueryAttention",
        ["q", "k", "v", "past_k", "past_v", "lengths", "total", *[""] * 5, "ks", "vs"],
        ["out", "present_k", "present_v"],
        domain="com.microsoft",
        num_heads=heads,
        kv_num_heads=key_heads,
        k_quant_type="PER_CHANNEL",
        v_quant_type="PER_CHANNEL",
        kv_cache_bit_width=bits,
    )
    inputs = [
        ("q", TensorProto.FLOAT, [1, "s", heads * size]),
        ("k", TensorProto.FLOAT, [1, "s", key_heads * size]),
        ("v", TensorProto.FLOAT, [1, "s", key_heads * size]),
        ("past_k", cache, [1, key_heads, 0, size * bits // 8]),
        ("past_v", cache, [1, key_heads, 0, size * bits // 8]),
        ("lengths", TensorProto.INT32, [1]),
        ("total", TensorProto.INT32, [1]),
        ("ks", TensorProto.FLOAT, [key_heads * size]),
        ("vs", TensorProto.FLOAT, [key_heads * size]),
    ]
    outputs = [
        ("out", TensorProto.FLOAT),
        ("present_k", cache),
        ("present_v", cache),
    ]
    graph = helper.make_graph(
        [node],
        "attention",
        [helper.make_tensor_value_info(*each) for each in inputs],
        [helper.make_tensor_value_info(*each, None) for each in outputs],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return bytes(model.SerializeToString())


@pytest.mark.parametrize(("name", "bits"), [("int8", 8), ("int4", 4)])
def test_onnxruntime_attends_to_the_same_codes(
    name: str, bits: int, tmp_path: Path
) -> None:
    """The oracle of what is rounded, and of how it is rounded, is onnxruntime."""
    model = made(llama(num_hidden_layers=1))
    window = windows()[0]
    scales = measure_cache(model, [window], name)
    seen: dict[str, Any] = {}
    attention = model.model.layers[0].self_attn
    attention.q_proj.register_forward_hook(
        lambda _, __, output: seen.update(query=output)
    )
    attention.o_proj.register_forward_pre_hook(
        lambda _, inputs: seen.update(out=inputs[0])
    )
    key, value = cached(model, window)[0]
    exact = logits(model, window[None])
    with rounded_cache(model, scales):
        assert not torch.equal(exact, logits(model, window[None]))
    query = _rotated(model, seen["query"])
    length, heads, key_heads, size = len(window), 4, 2, 16
    path = tmp_path / "attention.onnx"
    onnx.save(onnx.load_from_string(group_query(bits, heads, key_heads, size)), path)
    empty = np.zeros(
        (1, key_heads, 0, size * bits // 8), np.int8 if bits == 8 else np.uint8
    )
    out, codes, _ = open_session(path).run(
        None,
        {
            "q": query.numpy(),
            "k": key.transpose(0, 1).reshape(1, length, -1).numpy(),
            "v": value.transpose(0, 1).reshape(1, length, -1).numpy(),
            "past_k": empty,
            "past_v": empty,
            "lengths": np.array([length - 1], np.int32),
            "total": np.array([length], np.int32),
            "ks": scales.keys[0].reshape(-1).numpy(),
            "vs": scales.values[0].reshape(-1).numpy(),
        },
    )
    if bits == 4:
        low, high = (codes & 15).astype(np.int8) - 8, (codes >> 4).astype(np.int8) - 8
        codes = np.stack([low, high], axis=-1).reshape(1, key_heads, length, size)
    wanted = encode(key, Params(scales.keys[0]), TensorSpec(name)).numpy()
    np.testing.assert_array_equal(codes[0], wanted)
    np.testing.assert_allclose(out, seen["out"].numpy(), atol=1e-5)


def _rotated(model: Any, query: Any) -> Any:
    """Queries after RoPE, (1, length, heads * size)."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    length, size = query.shape[1], 16
    heads = query.view(1, length, -1, size).transpose(1, 2)
    places = torch.arange(length)[None]
    cos, sin = model.model.rotary_emb(heads, places)
    found, _ = apply_rotary_pos_emb(heads, heads, cos, sin)
    return found.transpose(1, 2).reshape(1, length, -1).detach()


def test_channel_without_values() -> None:
    model = made(llama())
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight[:3] = 0
    scales = measure_cache(model, windows(), "int8")
    assert scales.values[0].reshape(-1)[:3].tolist() == [1, 1, 1]


def test_unknown_format() -> None:
    with pytest.raises(ConfigError, match="'fp8'; known: int4, int8"):
        check_cache("fp8")


def test_model_without_attention_functions() -> None:
    from transformers import AutoConfig

    model = made(
        AutoConfig.for_model(
            "bloom", vocab_size=96, hidden_size=64, n_layer=1, n_head=4
        )
    )
    with pytest.raises(ConfigError, match=r"cannot be measured; leave out --kv-cache"):
        measure_cache(model, windows(), "int8")
