"""Queries and probabilities of attention that are rounded, against attention computed by hand."""

from __future__ import annotations

import copy
import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.gptj import modeling_gptj

from quark_onnx.cli import main
from quark_onnx.common.errors import ConfigError, ModelError, QuarkError
from quark_onnx.torch import LLMTemplate, import_model_from_safetensors
from quark_onnx.torch.algorithms.learned_rounding.autoround import TrainedLayer
from quark_onnx.torch.checkpoints import quark_json
from quark_onnx.torch.checkpoints.export import write_checkpoint
from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.checkpoints.layouts import layout_named
from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.checkpoints.safetensors_io import CheckpointReader
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec
from quark_onnx.torch.config.torch_config import Attention, KVCache, TorchConfig
from quark_onnx.torch.exports.kinds import exported
from quark_onnx.torch.exports.onnx import write_onnx
from quark_onnx.torch.models.attention import install_attention_hooks, set_attention
from quark_onnx.torch.pipelines import file_run
from quark_onnx.torch.pipelines.estimate import estimate
from quark_onnx.torch.pipelines.file_to_file import Writing, quantize_checkpoint
from quark_onnx.torch.pipelines.graph.quantize_graph import quantize_graph
from quark_onnx.torch.pipelines.in_memory import chosen_layers, quantize_model
from quark_onnx.torch.pipelines.written_size import written_bytes
from quark_onnx.torch.quantization.params import save_params
from quark_onnx.torch.validate import validate
from tests import torch_families
from tests.torch_models import llama, logits, made, saved, tokens

FP8 = TensorSpec("fp8e4m3")
ATTENTION = Attention(FP8, FP8)
#: Nothing but queries and probabilities.
ALONE = TorchConfig(LayerSpec(), exclude=("lm_head",), attention=ATTENTION)
FULL = TorchConfig(
    scheme("fp8"), exclude=("lm_head",), kv_cache=KVCache(FP8), attention=ATTENTION
)
SELF = "model.layers.0.self_attn"
Q = f"{SELF}.q_proj"


def to_fp8(x: Any, scale: Any) -> Any:
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale


def by_hand(
    model: Any, batch: Any, query_scale: Any = None, probability_scale: Any = None
) -> tuple[Any, Any, Any]:
    """Queries as they are projected, probabilities (heads, tokens, tokens) and logits of the only
    block, in float64.

    Args:
        query_scale, probability_scale: of what is rounded; nothing is if None.
    """
    model = copy.deepcopy(model).double()
    block = model.model.layers[0]
    attention, hidden = block.self_attn, model.model.embed_tokens(batch)[0]
    read = block.input_layernorm(hidden)
    count = len(read)
    angles = torch.arange(count).double()[:, None] * 10000.0 ** (
        -torch.arange(8).double() / 8
    )
    turn = torch.polar(torch.ones_like(angles), angles)

    def heads(x: Any) -> Any:
        return x.unflatten(-1, (-1, 16)).transpose(0, 1)

    def rotated(x: Any) -> Any:
        found = torch.complex(x[..., :8], x[..., 8:]) * turn
        return torch.cat((found.real, found.imag), -1)

    queries = read @ attention.q_proj.weight.T
    left = queries if query_scale is None else to_fp8(queries, query_scale.double())
    key, value = (
        heads(read @ layer.weight.T) for layer in (attention.k_proj, attention.v_proj)
    )
    scores = (
        rotated(heads(left)) @ rotated(key).repeat_interleave(2, 0).transpose(1, 2) / 4
    )
    scores = scores.masked_fill(torch.ones(count, count).triu(1) > 0, float("-inf"))
    probabilities = scores.softmax(-1)
    kept = (
        probabilities
        if probability_scale is None
        else to_fp8(probabilities, probability_scale.double())
    )
    found = (kept @ value.repeat_interleave(2, 0)).transpose(0, 1).flatten(-2)
    hidden = hidden + found @ attention.o_proj.weight.T
    hidden = hidden + block.mlp(block.post_attention_layernorm(hidden))
    return queries, probabilities, model.lm_head(model.model.norm(hidden))[None].float()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_one_block_by_hand(implementation: str) -> None:
    model = made(llama(num_hidden_layers=1, attn_implementation=implementation))
    plain = copy.deepcopy(model)
    parts = [by_hand(plain, batch) for batch in tokens()]
    scales = [
        max(float(part[side].abs().max()) for part in parts) / 448 for side in (0, 1)
    ]
    quantize_model(model, tokens(), ALONE, progress=False)
    layer = model.get_submodule(Q)
    found = [float(layer.output.scale), float(layer.probabilities.scale)]
    assert found == pytest.approx(scales, rel=1e-5) and found[1] == pytest.approx(
        1 / 448
    )
    for batch in tokens(2, 20):
        expected = by_hand(plain, batch, layer.output.scale, layer.probabilities.scale)[
            2
        ]
        rounded, exact = logits(model, batch), logits(plain, batch)
        close = float((rounded - expected).norm() / expected.norm())
        assert close < 0.05 * float((rounded - exact).norm() / exact.norm())
        # each of both matters
        for part in ((layer.output.scale, None), (None, layer.probabilities.scale)):
            other = by_hand(plain, batch, *part)[2]
            assert float((rounded - other).norm() / other.norm()) > 5 * close


@torch.no_grad()
def test_what_is_attended_to_is_what_rounding_has_left() -> None:
    model = made(llama(num_hidden_layers=1))
    plain = copy.deepcopy(model)
    quantize_model(
        model, tokens(), ALONE.with_(attention=Attention(FP8)), progress=False
    )
    layer, seen = model.get_submodule(Q), list[Any]()
    layer.probabilities.register_forward_hook(
        lambda module, args, found: seen.append((args[0], found))
    )
    assert layer.output is None
    batch = tokens(1, 20)[0]
    logits(model, batch)
    [(read, left)] = seen
    torch.testing.assert_close(
        read[0].double(), by_hand(plain, batch)[1], rtol=1e-4, atol=1e-7
    )
    assert torch.equal(
        left, to_fp8(read, layer.probabilities.scale)
    ) and not torch.equal(left, read)
    assert torch.equal(model(batch, output_attentions=True).attentions[0], left)


@pytest.mark.parametrize("where", ["projection", "rope"])
@pytest.mark.parametrize(
    ("family", "algorithms"),
    [
        *(
            (family, ())
            for family in ("llama3", "opt", "qwen3_moe", "gemma2", "cohere", "gpt_oss")
        ),
        ("llama3", ("awq", "gptq")),
        ("llama3", ("autoround:steps=3",)),
        ("llama3", ("rotation",)),
    ],
    ids=str,
)
def test_written_and_read_again(
    family: str, algorithms: tuple[str, ...], where: str, tmp_path: Path
) -> None:
    model, plain = (made(torch_families.config_of(family)) for _ in range(2))
    source = saved(plain, tmp_path / "source")
    config = FULL.with_(algorithms=algorithms, kv_cache=KVCache(FP8, where=where))
    quantize_model(model, tokens(), config, progress=False)
    after = logits(model, tokens()[0])
    assert (
        1e-4 < float((after - logits(plain, tokens()[0])).norm() / after.norm()) < 0.6
    )
    write_checkpoint(model, config, tmp_path / "memory")
    quantize_checkpoint(source, tokens(), config, tmp_path / "files", progress=False)
    for folder in (tmp_path / "memory", tmp_path / "files"):
        loaded = load_checkpoint(folder)
        assert torch.equal(logits(loaded, tokens()[0]), after)
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        assert (
            content["quantization_config"]["softmax_quant_spec"]["dtype"] == "fp8_e4m3"
        )
        assert "quark_onnx" not in str(content)
        keys = [key for key in CheckpointReader(folder) if "prob_output" in key]
        assert len(keys) == 2 and all(
            key.endswith("self_attn.prob_output_scale") for key in keys
        )
        assert (
            len(
                [
                    key
                    for key in CheckpointReader(folder)
                    if key.endswith("q_proj.output_scale")
                ]
            )
            == 2
        )
        assert content["quantization_config"]["kv_cache_post_rope"] is (where == "rope")
    if not algorithms:
        assert not [
            each
            for each in validate(tmp_path / "files", "vllm").findings
            if "attention" in each.rule
        ]


def test_fused_projections(tmp_path: Path) -> None:
    glob = ("*qkv_proj",)
    config = FULL.with_(
        kv_cache=KVCache(FP8, glob), attention=Attention(FP8, FP8, glob)
    )
    model = made(torch_families.config_of("phi3"))
    quantize_model(model, tokens(), config, progress=False)
    write_checkpoint(model, config, tmp_path / "out")
    assert f"{SELF}.prob_output_scale" in CheckpointReader(tmp_path / "out")
    assert torch.equal(
        logits(load_checkpoint(tmp_path / "out"), tokens()[0]),
        logits(model, tokens()[0]),
    )


def test_a_run_that_was_killed_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def killed() -> None:
        raise Killed

    source, out = saved(made(llama()), tmp_path / "source"), tmp_path / "out"
    quantize_checkpoint(source, tokens(), FULL, tmp_path / "whole", progress=False)
    writing = Writing(resume=tmp_path / "resume", spill=tmp_path / "spill")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(file_run, "return_freed_memory", killed)
        quantize_checkpoint(
            source, tokens(), FULL, out, writing=writing, progress=False
        )
    kept = CheckpointReader(tmp_path / "resume" / "block-00000.safetensors")
    assert (
        "model.layers.0.self_attn.q_proj.prob_output_scale" in kept and not out.exists()
    )
    with pytest.raises(ConfigError, match="its configuration differs"):
        other = FULL.with_(attention=Attention(FP8))
        quantize_checkpoint(
            source, tokens(), other, out, writing=writing, progress=False
        )
    quantize_checkpoint(source, tokens(), FULL, out, writing=writing, progress=False)
    for name in ("model.safetensors", "config.json"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_the_least_scale_of_the_cache_is_not_that_of_queries() -> None:
    model = made(llama())
    quantize_model(
        model, tokens(), FULL.with_(kv_cache=KVCache(FP8, least=1.0)), progress=False
    )
    attention = model.get_submodule(SELF)
    assert attention.k_proj.output.scale == attention.v_proj.output.scale == 1
    assert (
        attention.q_proj.output.scale < 1 and attention.q_proj.probabilities.scale < 1
    )


def test_generation_with_a_cache_is_that_without() -> None:
    model = made(llama())
    quantize_model(model, tokens(), FULL, progress=False)
    generated = model.generate(
        tokens()[0], max_new_tokens=4, do_sample=False, pad_token_id=0
    )
    grown = tokens()[0]
    for _ in range(generated.shape[1] - 12):
        grown = torch.cat([grown, logits(model, grown)[:, -1:].argmax(-1)], 1)
    assert grown.shape[1] > 12 and torch.equal(generated, grown)


def test_softmax_of_another_thread_is_its_own() -> None:
    model, found, x = (
        made(llama(num_hidden_layers=1)),
        list[Any](),
        torch.linspace(-3, 3, 7),
    )
    quantize_model(model, tokens(), ALONE, progress=False)

    def during(*_: Any) -> None:
        thread = threading.Thread(target=lambda: found.append(x.softmax(0)))
        thread.start()
        thread.join()

    model.get_submodule(Q).probabilities.register_forward_hook(during)
    logits(model, tokens()[0])
    assert (
        len(found) == 1
        and torch.equal(found[0], x.softmax(0))
        and torch.equal(found[0], torch.softmax(x, 0))
    )


def test_gradients_pass() -> None:
    model, read = made(llama(num_hidden_layers=1)), list[Any]()
    quantize_model(model, tokens(), ALONE, progress=False)
    attention = model.get_submodule(SELF)
    own = attention.q_proj
    own.probabilities.register_forward_hook(
        lambda module, args, left: read.append((args[0], left))
    )
    attention.q_proj = TrainedLayer(own, None)
    loss = model(tokens()[0]).logits.square().sum()
    assert len(read) == 1 and not read[0][0].requires_grad
    [gradient] = torch.autograd.grad(
        loss, own.float_weight
    )  # through the probabilities alone
    assert float(gradient.norm()) > 0


def test_a_model_is_as_it_was_where_it_fails() -> None:
    for cache in (None, KVCache(FP8, where="rope")):
        model, batch = made(llama()), tokens()
        before = logits(model, batch[0])
        broken = model.model.layers[1].mlp.down_proj.weight
        kept, broken.data[0, 0] = broken.data[0, 0].item(), float("nan")
        with pytest.raises(ModelError, match="down_proj"):
            quantize_model(model, batch, FULL.with_(kv_cache=cache), progress=False)
        broken.data[0, 0] = kept
        assert model.config._attn_implementation == "sdpa"
        assert not any(
            "round_probabilities" in vars(module) for module in model.modules()
        )
        assert torch.equal(before, logits(model, batch[0]))


def test_probabilities_of_gptj(tmp_path: Path) -> None:
    """Its attention calls a function of transformers from release 5.24 on; it is refused before."""
    model = made(torch_families.config_of("gptj"))
    config = TorchConfig(
        scheme("fp8"), exclude=("lm_head",), attention=Attention(FP8, FP8)
    )
    if not hasattr(modeling_gptj, "ALL_ATTENTION_FUNCTIONS"):
        with pytest.raises(
            ModelError,
            match="GPTJAttention, which computes its probabilities by no attention",
        ):
            quantize_model(model, tokens(), config, progress=False)
        return
    quantize_model(model, tokens(), config, progress=False)
    write_checkpoint(model, config, tmp_path / "out")
    loaded = load_checkpoint(tmp_path / "out")
    found = logits(model, tokens()[0])
    assert torch.equal(found, logits(loaded, tokens()[0]))
    for block in loaded.transformer.h:
        block.attn.q_proj.probabilities.scale = (
            block.attn.q_proj.probabilities.scale * 1.3
        )
    assert not torch.equal(found, logits(loaded, tokens()[0]))


@pytest.mark.parametrize("family", ["grok1", "chatglm3"])
def test_models_whose_probabilities_cannot_be_reached(
    family: str, tmp_path: Path
) -> None:
    model = made(torch_families.config_of(family))
    glob = "*query_key_value" if family == "chatglm3" else "*q_proj"
    config = TorchConfig(
        scheme("fp8"),
        exclude=(torch_families.head_of(family),),
        attention=Attention(FP8, FP8, (glob,)),
    )
    source, before = saved(model, tmp_path / "source"), logits(model, tokens()[0])
    message = (
        r"attention: .*(q_proj|query_key_value) belongs to a \w*Attention, which"
        r" computes its probabilities by no"
    )
    with pytest.raises(ModelError, match=message):
        quantize_model(model, tokens(), config, progress=False)
    assert torch.equal(logits(model, tokens()[0]), before)
    with pytest.raises(ModelError, match=message):
        quantize_checkpoint(
            source,
            tokens(),
            config,
            tmp_path / "out",
            writing=Writing(trust_code=True),
            progress=False,
        )
    assert not (tmp_path / "out").exists()


def test_attention_without_softmax_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(llama())
    code = __import__(type(model).__module__, fromlist=["x"])
    monkeypatch.setattr(
        code,
        "eager_attention_forward",
        lambda module, query, *_, **__: (query.transpose(1, 2), None),
    )
    with pytest.raises(
        ModelError, match="a LlamaAttention computes its probabilities without softmax"
    ):
        quantize_model(model, tokens(), ALONE, progress=False)


def test_names_that_do_not_fit() -> None:
    model = made(llama())
    for attention, message in (
        (
            replace(ATTENTION, layers=("*q_porj",)),
            r"attention names '\*q_porj', .*did you mean 'q_proj'",
        ),
        (
            ATTENTION,
            (
                r"attention names '\*q_proj', but these layers are excluded; exclude"
                r" less, or no attention"
            ),
        ),
    ):
        excluded = ("lm_head",) if "porj" in message else ("*q_proj",)
        with pytest.raises(ConfigError, match=message):
            quantize_model(
                model,
                tokens(),
                FULL.with_(attention=attention, exclude=excluded),
                progress=False,
            )
    with pytest.raises(
        ModelError, match=r"q_proj and .*k_proj belong to one LlamaAttention; name one"
    ):
        both = replace(ATTENTION, layers=("*q_proj", "*k_proj"))
        quantize_model(model, tokens(), FULL.with_(attention=both), progress=False)
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(
        ConfigError,
        match=r"attention: queries are fp8e4m3 .*they have a scale that data tells",
    ):
        Attention(FP8, FP8.with_(dynamic=True))
    with pytest.raises(
        ConfigError, match="probabilities is 'fp8'; it must be a TensorSpec"
    ):
        LayerSpec(probabilities="fp8")  # type: ignore[arg-type]


def test_what_has_no_place_for_it(tmp_path: Path) -> None:
    model, plain = made(llama()), made(llama())
    source = FloatCheckpoint(saved(plain, tmp_path / "source"))
    config = FULL.with_(default=scheme("int8"), kv_cache=None)
    quantize_model(model, tokens(), config, progress=False)
    out = tmp_path / "out"
    for layout in ("compressed-tensors", "fp8"):
        own = config if layout != "fp8" else FULL
        with pytest.raises(
            ConfigError,
            match=f"layout '{layout}' has no place for scales of queries and prob",
        ):
            write_checkpoint(model, own, out, layout=layout)
        with pytest.raises(
            ConfigError,
            match=f"layout '{layout}' has no place for scales of queries and prob",
        ):
            quantize_checkpoint(
                source.folder,
                tokens(),
                own,
                out,
                writing=Writing(layout=layout),
                progress=False,
            )
    with pytest.raises(
        ConfigError, match="q_proj has probabilities of attention that are rounded"
    ):
        save_params(model, "llama", export_dir=out)
    with pytest.raises(
        ConfigError, match="q_proj: an ONNX model has no node for probabilities"
    ):
        write_onnx(model, {"input_ids": tokens()[0]}, tmp_path / "m.onnx")
    for kind, message in (
        ("gguf", "a GGUF file has no place for attention"),
        ("onnx", "an ONNX model has no node for"),
    ):
        with (
            pytest.raises(ConfigError, match=message),
            exported((kind,), source, config, out, []),
        ):
            raise AssertionError("it is refused before the work")
    with pytest.raises(
        ConfigError,
        match="attention works on modules of transformers, not on exported graphs",
    ):
        quantize_graph(plain, tokens(), config, example_args=tokens()[0])
    assert not out.exists()


def test_the_function_of_attention_is_chosen_behind(tmp_path: Path) -> None:
    model = made(llama())
    quantize_model(model, tokens(), FULL, progress=False)
    write_checkpoint(model, FULL, tmp_path / "out")
    after = logits(model, tokens()[0])
    found = import_model_from_safetensors(
        None, tmp_path / "out", attn_implementation="eager"
    )
    assert torch.equal(logits(found, tokens()[0]), after)
    with pytest.raises(
        ConfigError,
        match=r"by 'sdpa', but probabilities behind .*q_proj are rounded, which takes",
    ):
        import_model_from_safetensors(
            None, tmp_path / "out", attn_implementation="sdpa"
        )
    model = made(llama())
    quantize_model(
        model,
        tokens(),
        FULL.with_(attention=None, kv_cache=KVCache(FP8, where="rope")),
        progress=False,
    )
    after = logits(model, tokens()[0])
    set_attention(model, "eager")
    assert model.config._attn_implementation == "quark_onnx_eager"
    torch.testing.assert_close(logits(model, tokens()[0]), after, rtol=0.02, atol=0.02)


def test_a_float_projection_beside_rounded_probabilities(tmp_path: Path) -> None:
    """AMD Quark counts them apart: what it excludes is the layer alone."""
    model, config = made(llama()), FULL.with_(exclude=("lm_head",), kv_cache=None)
    quantize_model(model, tokens(), config, progress=False)
    write_checkpoint(model, config, tmp_path / "out")
    from safetensors.torch import load_file, save_file

    tensors = load_file(tmp_path / "out" / "model.safetensors")
    plain = made(llama())
    for name in [name for name in tensors if ".0.self_attn.q_proj" in name]:
        del tensors[name]
    tensors[f"{Q}.weight"] = plain.get_submodule(Q).weight.data
    save_file(tensors, tmp_path / "out" / "model.safetensors", {"format": "pt"})
    content = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    content["quantization_config"]["exclude"].append(Q)
    (tmp_path / "out" / "config.json").write_text(json.dumps(content), encoding="utf-8")
    loaded = load_checkpoint(tmp_path / "out")
    layer = loaded.get_submodule(Q)
    assert layer.output is None and float(layer.probabilities.scale) == pytest.approx(
        1 / 448
    )
    own = model.get_submodule(Q)
    own.quantized, own.float_weight, own.input, own.output = (
        None,
        plain.get_submodule(Q).weight,
        None,
        None,
    )
    assert torch.equal(logits(loaded, tokens()[0]), logits(model, tokens()[0]))


@pytest.mark.parametrize(
    ("cache", "queries", "names"),
    [
        *(
            (cache, queries, ("*q_proj",))
            for cache in (None, KVCache(FP8))
            for queries in (None, FP8)
        ),
        *(
            (cache, FP8, ("*query_key_value",))
            for cache in (None, KVCache(FP8, ("*query_key_value",)))
        ),
    ],
    ids=[
        "probabilities",
        "attention",
        "kv and probabilities",
        "kv and attention",
        "fused",
        "fused kv",
    ],
)
@pytest.mark.parametrize(
    "layers", [(), (("*down_proj", scheme("ptpc_fp8")),)], ids=["", "more"]
)
def test_the_configuration_is_read_as_it_was_written(
    cache: Any, queries: Any, names: Any, layers: Any
) -> None:
    attention = Attention(TensorSpec("int8"), queries, names)
    config = TorchConfig(
        scheme("fp8"), layers, exclude=("lm_head",), kv_cache=cache, attention=attention
    )
    found, _ = quark_json.from_json(quark_json.to_json(config))
    assert found.attention == attention and found.kv_cache == cache
    for name in (
        "a.q_proj",
        "a.k_proj",
        "a.query_key_value",
        "a.down_proj",
        "a.up_proj",
    ):
        assert found.spec_of(name, "Linear") == config.spec_of(name, "Linear")


def test_queries_of_two_kinds_are_refused() -> None:
    entry = quark_json.to_json(FULL)
    other = copy.deepcopy(entry["layer_quant_config"]["*q_proj"])
    other["output_tensors"]["dtype"] = "fp8_e5m2"
    entry["layer_quant_config"]["*query"] = other
    with pytest.raises(
        ConfigError, match=r"the outputs of \*q_proj, \*query are quantized differently"
    ):
        quark_json.from_json(entry)


def test_the_names_of_amd_quark() -> None:
    config = LLMTemplate.get("llama").get_config(
        "fp8", kv_cache_scheme="fp8", attention_scheme="fp8"
    )
    assert set(config.layer_quant_config) == {"*k_proj", "*q_proj", "*v_proj"} and list(
        config.kv_cache_group
    )
    found = config.torch_config()
    assert found.attention == ATTENTION and found.kv_cache == KVCache(FP8)
    assert found.spec_of(Q, "Linear") == scheme("fp8").with_(
        output=FP8, probabilities=FP8
    )
    assert config.to_dict()["softmax_quant_spec"]["dtype"] == "fp8_e4m3"
    for family, queries in (
        ("phi3", ["*qkv_proj"]),
        ("gemma3", ["*language_model.*q_proj"]),
        ("lfm2", None),
    ):
        assert LLMTemplate.get(family).q_layer_name == (
            queries or ["*self_attn.q_proj"]
        )
    with pytest.raises(
        ConfigError,
        match="the template of mine does not say which layers compute queries",
    ):
        LLMTemplate("mine").get_config("fp8", attention_scheme="fp8")


def test_what_it_takes_is_said_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Probabilities of all heads are in memory at once: with samples of 128 tokens, four of them
    are run together.
    """
    monkeypatch.setattr(
        "quark_onnx.torch.pipelines.estimate.resident", lambda: 0
    )  # the first estimate warms torch up
    opened = FloatCheckpoint(saved(made(llama()), tmp_path / "source"))
    with_it, without = (
        estimate(
            opened,
            chosen_layers(opened.model, config)[0],
            4 * 128,
            disk=written_bytes(opened, config, layout_named("quark")),
            samples=4,
        )
        for config in (FULL, FULL.with_(attention=None))
    )
    least = 4 * 4 * 128**2 * 4  # one number for each
    more = with_it.memory - without.memory - (with_it.disk - without.disk)
    assert least < more <= 4 * least


def test_hand_over_without_transformers() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    layers = {"0": (module[0], LayerSpec(probabilities=FP8))}
    with pytest.raises(
        QuarkError,
        match=(
            "attention: 0 belongs to a Sequential, which computes its probabilities"
            " by no"
        ),
    ):
        install_attention_hooks(module, layers)
    assert callable(install_attention_hooks(SimpleNamespace(), {}))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
        "fp8",
        "--attention",
        "fp8",
    ]
    command += [
        "--data",
        str(tmp_path / "tokens.npy"),
        "--samples",
        "6",
        "--length",
        "12",
        "--quiet",
        "--json",
    ]
    assert main([*command, "--report", str(tmp_path / "report")]) == 0
    specs = json.loads(capsys.readouterr().out)["specs"][Q]
    assert specs["output"] == specs["probabilities"] == str(FP8)
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert "probabilities fp8e4m3" in page
    verdict = validate(out, "vllm")
    assert verdict.word == "loads" and not verdict.findings, verdict.text()
    model = load_checkpoint(out)
    assert (
        model.get_submodule(Q).round_probabilities
        is model.get_submodule(Q).probabilities
    )
