"""Keys that are rounded after their rotation, against attention computed by hand."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.gptj import modeling_gptj

from quark_onnx.cli import main
from quark_onnx.common.errors import ConfigError, ModelError
from quark_onnx.torch.algorithms.learned_rounding.autoround import TrainedLayer
from quark_onnx.torch.calibration.observers import ActivationObservers
from quark_onnx.torch.checkpoints.export import write_checkpoint
from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.checkpoints.safetensors_io import CheckpointReader
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec
from quark_onnx.torch.config.torch_config import Attention, KVCache, TorchConfig
from quark_onnx.torch.pipelines.file_to_file import Writing, quantize_checkpoint
from quark_onnx.torch.pipelines.in_memory import quantize_model
from quark_onnx.torch.quantization.params import save_params
from tests import torch_families
from tests.torch_models import llama, logits, made, saved, tokens

FP8 = TensorSpec("fp8e4m3")
ROPE = KVCache(FP8, where="rope")
#: Nothing but keys and values.
CACHE = TorchConfig(LayerSpec(), exclude=("lm_head",), kv_cache=ROPE)
#: Nothing but queries and probabilities.
ATTENTION = TorchConfig(
    LayerSpec(), exclude=("lm_head",), attention=Attention(FP8, FP8)
)
FULL = TorchConfig(scheme("fp8"), exclude=("lm_head",), kv_cache=ROPE)
K, V = (f"model.layers.0.self_attn.{side}_proj" for side in "kv")


def to_fp8(x: Any, scale: Any) -> Any:
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale


def parts_by_hand(model: Any, batch: Any) -> tuple[Any, Any, Any, Any]:
    """The residual stream, rotated queries, rotated keys and values of the only block: (heads,
    tokens, 16).
    """
    block = model.model.layers[0]
    hidden = model.model.embed_tokens(batch)[0]
    read = block.input_layernorm(hidden)
    places = torch.arange(len(read)).float()
    angles = places[:, None] * 10000.0 ** (-torch.arange(8) / 8)
    turn = torch.polar(torch.ones_like(angles), angles)

    def heads(layer: Any) -> Any:
        return (read @ layer.weight.T).unflatten(-1, (-1, 16)).transpose(0, 1)

    def rotated(x: Any) -> Any:
        found = torch.complex(x[..., :8], x[..., 8:]) * turn
        return torch.cat((found.real, found.imag), -1)

    attention = block.self_attn
    return (
        hidden,
        rotated(heads(attention.q_proj)),
        rotated(heads(attention.k_proj)),
        heads(attention.v_proj),
    )


def logits_by_hand(model: Any, batch: Any, key_scale: Any, value_scale: Any) -> Any:
    block = model.model.layers[0]
    hidden, query, key, value = parts_by_hand(model, batch)
    key, value = to_fp8(key, key_scale), to_fp8(value, value_scale)
    key, value = (each.repeat_interleave(2, 0) for each in (key, value))
    scores = query @ key.transpose(1, 2) / 4
    scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1) > 0, float("-inf"))
    found = (scores.softmax(-1) @ value).transpose(0, 1).flatten(-2)
    hidden = hidden + found @ block.self_attn.o_proj.weight.T
    hidden = hidden + block.mlp(block.post_attention_layernorm(hidden))
    return model.lm_head(model.model.norm(hidden))[None]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_one_block_by_hand(implementation: str) -> None:
    model = made(llama(num_hidden_layers=1, attn_implementation=implementation))
    plain = copy.deepcopy(model)
    ends = [
        [part.abs().max() for part in parts_by_hand(plain, batch)[2:]]
        for batch in tokens()
    ]
    scales = [torch.stack(each).max() / 448 for each in zip(*ends, strict=True)]
    quantize_model(model, tokens(), CACHE, progress=False)
    found = [model.get_submodule(name).output.scale for name in (K, V)]
    torch.testing.assert_close(
        torch.stack(found), torch.stack(scales), rtol=1e-5, atol=0
    )
    for batch in tokens(2, 20):
        by_hand = logits_by_hand(plain, batch, *found)
        rounded, exact = logits(model, batch), logits(plain, batch)
        close = float((rounded - by_hand).norm() / by_hand.norm())
        assert close < 0.05 * float((rounded - exact).norm() / exact.norm())
        assert close < 1e-3


def test_keys_as_projected_and_as_rotated_have_scales_of_their_own() -> None:
    scales = []
    for where in ("projection", "rope"):
        model = made(llama())
        quantize_model(
            model,
            tokens(),
            CACHE.with_(kv_cache=KVCache(FP8, where=where)),
            progress=False,
        )
        scales.append(
            [float(model.get_submodule(name).output.scale) for name in (K, V)]
        )
    assert (
        scales[0][0] != pytest.approx(scales[1][0], rel=1e-4)
        and scales[0][1] == scales[1][1]
    )


@pytest.mark.parametrize(
    ("family", "algorithms"),
    [
        *(
            (family, ())
            for family in ("llama3", "opt", "qwen3_moe", "gemma2", "cohere", "gpt_oss")
        ),
        *((family, ("awq", "gptq")) for family in ("llama3", "qwen3_moe")),
        ("llama3", ("autoround:steps=3",)),
        ("llama3", ("rotation",)),
    ],
    ids=str,
)
def test_written_and_read_again(
    family: str, algorithms: tuple[str, ...], tmp_path: Path
) -> None:
    model, plain = (made(torch_families.config_of(family)) for _ in range(2))
    source, config = (
        saved(plain, tmp_path / "source"),
        FULL.with_(algorithms=algorithms),
    )
    quantize_model(model, tokens(), config, progress=False)
    after = logits(model, tokens()[0])
    assert (
        1e-4 < float((after - logits(plain, tokens()[0])).norm() / after.norm()) < 0.5
    )
    write_checkpoint(model, config, tmp_path / "memory")
    quantize_checkpoint(source, tokens(), config, tmp_path / "files", progress=False)
    for folder in (tmp_path / "memory", tmp_path / "files"):
        loaded = load_checkpoint(folder)
        assert torch.equal(logits(loaded, tokens()[0]), after)
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        assert content["quantization_config"][
            "kv_cache_post_rope"
        ] is True and "quark_onnx" not in str(content)
        keys = [
            key
            for key in CheckpointReader(folder)
            if key.endswith("k_proj.output_scale")
        ]
        assert len(keys) == 2
    generated = loaded.generate(
        tokens()[0], max_new_tokens=3, do_sample=False, pad_token_id=0
    )
    other, grown = copy.deepcopy(loaded), tokens()[0]
    for _ in range(generated.shape[1] - 12):  # without a cache
        grown = torch.cat([grown, logits(other, grown)[:, -1:].argmax(-1)], 1)
    assert grown.shape[1] > 12 and torch.equal(generated, grown)


@pytest.mark.parametrize("config", [CACHE, ATTENTION], ids=["cache", "attention"])
def test_samples_of_different_lengths_are_masked(config: TorchConfig) -> None:
    model, plain = made(llama()), made(llama())
    quantize_model(model, tokens(), config, progress=False)
    batch = torch.cat(tokens(2))
    shown = torch.ones_like(batch)
    shown[1, :5] = 0
    with torch.no_grad():
        found = model(batch, attention_mask=shown).logits[1, 5:]
        exact = plain(batch, attention_mask=shown).logits[1, 5:]
        unmasked = plain(batch).logits[1, 5:]
    assert float((found - exact).norm()) < 0.2 * float((found - unmasked).norm())


def test_a_model_is_as_it_was_where_it_fails() -> None:
    model = made(llama())
    before, batch = logits(model, tokens()[0]), tokens()
    model.model.layers[1].mlp.down_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(Exception, match=r"down_proj"):
        quantize_model(model, batch, FULL, progress=False)
    assert model.config._attn_implementation == "sdpa"
    assert not any("round_keys" in vars(module) for module in model.modules())
    assert before.shape == logits(model, batch[0]).shape


def test_keys_of_gptj(tmp_path: Path) -> None:
    """Its attention calls a function of transformers from release 5.24 on; it is refused before."""
    model = made(torch_families.config_of("gptj"))
    cache = KVCache(FP8, ("*k_proj", "*v_proj"), where="rope")
    config = TorchConfig(scheme("fp8"), exclude=("lm_head",), kv_cache=cache)
    if not hasattr(modeling_gptj, "ALL_ATTENTION_FUNCTIONS"):
        with pytest.raises(
            ModelError,
            match="GPTJAttention, which hands its rotated keys to no attention function",
        ):
            quantize_model(model, tokens(), config, progress=False)
        return
    seen = list[Any]()
    quantize_model(model, tokens(), config, progress=False)
    for block in model.transformer.h:
        block.attn.k_proj.output.register_forward_hook(
            lambda _, given, found: seen.append((given[0], found))
        )
    write_checkpoint(model, config, tmp_path / "out")
    found = logits(model, tokens()[0])
    assert len(seen) == 2 and not any(
        torch.equal(before, after) for before, after in seen
    )
    assert torch.equal(found, logits(load_checkpoint(tmp_path / "out"), tokens()[0]))


@pytest.mark.parametrize(
    ("family", "layers", "error", "message"),
    [
        (
            "grok1",
            ("*k_proj", "*v_proj"),
            ModelError,
            "MultiHeadAttention, which hands its rotated keys to no",
        ),
        (
            "phi3",
            ("*qkv_proj",),
            ConfigError,
            "qkv_proj computes more than keys or values",
        ),
        (
            "chatglm3",
            ("*query_key_value",),
            ConfigError,
            "query_key_value computes more than keys or values",
        ),
    ],
)
def test_models_whose_keys_cannot_be_reached(
    family: str,
    layers: tuple[str, ...],
    error: type[Exception],
    message: str,
    tmp_path: Path,
) -> None:
    model = made(torch_families.config_of(family))
    source = saved(model, tmp_path / "source")
    before = logits(model, tokens()[0])
    cache = KVCache(FP8, layers, where="rope")
    config = TorchConfig(
        scheme("fp8"), exclude=(torch_families.head_of(family),), kv_cache=cache
    )
    with pytest.raises(error, match=message):
        quantize_model(model, tokens(), config, progress=False)
    assert torch.equal(logits(model, tokens()[0]), before)
    with pytest.raises(error, match=message):
        quantize_checkpoint(
            source,
            tokens(),
            config,
            tmp_path / "out",
            writing=Writing(trust_code=True),
            progress=False,
        )
    assert not (tmp_path / "out").exists()


def test_what_has_no_word_for_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="where is 'roep'; did you mean 'rope'"):
        KVCache(FP8, where="roep")
    model = made(llama())
    quantize_model(model, tokens(), FULL, progress=False)
    for layout in ("compressed-tensors", "fp8"):
        with pytest.raises(
            ConfigError,
            match=f"layout '{layout}' cannot say that keys are rounded after",
        ):
            write_checkpoint(model, FULL, tmp_path / "out", layout=layout)
    with pytest.raises(
        ConfigError, match="k_proj has keys that are rounded after they are rotated"
    ):
        save_params(model, "llama", export_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_numbers_than_keys_are_refused() -> None:
    layer = torch.nn.Linear(4, 6)
    with ActivationObservers({"k_proj": (layer, LayerSpec(output=FP8, rotated=True))}):
        assert torch.equal(
            layer.round_keys(torch.ones(1, 3, 5, 2)), torch.ones(1, 3, 5, 2)
        )
        with pytest.raises(
            ModelError,
            match="k_proj computes 6 numbers for a token, which are not the keys",
        ):
            layer.round_keys(torch.ones(1, 2, 5, 4))
    assert not hasattr(layer, "round_keys")


def test_what_is_trained_reads_rounded_keys() -> None:
    model, seen = made(llama(num_hidden_layers=1)), list[Any]()
    plain = copy.deepcopy(model)
    keys = parts_by_hand(plain, tokens()[0])[2]

    class Watched(TrainedLayer):
        @property
        def round_keys(self) -> Any:
            own = super().round_keys
            return (
                None
                if own is None
                else lambda keys: seen.append((keys, own(keys))) or seen[-1][1]
            )

    quantize_model(model, tokens(), CACHE, progress=False)
    attention = model.model.layers[0].self_attn
    scale = attention.k_proj.output.scale
    attention.k_proj = Watched(attention.k_proj, None)
    loss = model(tokens()[0]).logits.square().sum()
    [(read, rounded)] = seen
    torch.testing.assert_close(read[0], keys, rtol=1e-4, atol=1e-5)
    assert torch.equal(rounded, to_fp8(read, scale))
    [gradient] = torch.autograd.grad(loss, model.model.embed_tokens.weight)
    assert float(gradient.norm()) > 0


def test_the_command(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", torch.cat(tokens(6)).numpy())
    source, out = saved(made(llama()), tmp_path / "source"), tmp_path / "out"
    command = [
        "llm",
        "ptq",
        str(source),
        "-o",
        str(out),
        "--scheme",
        "fp8",
        "--kv-cache",
        "fp8-rope",
        "--quiet",
    ]
    assert (
        main(
            [
                *command,
                "--data",
                str(tmp_path / "tokens.npy"),
                "--samples",
                "6",
                "--length",
                "12",
            ]
        )
        == 0
    )
    keys = load_checkpoint(out).get_submodule(K)
    assert keys.spec.rotated and keys.round_keys is keys.output
