"""Layers that stay float: heads, routers, layers without a call, and layers that models lack.

Each is found by what models and files are, in memory and from file to file alike, and each is
listed as excluded.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig

from quark_onnx.common.errors import ConfigError
from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.checkpoints.layouts import LAYOUTS, layout_named
from quark_onnx.torch.checkpoints.safetensors_io import read_json
from quark_onnx.torch.config.language import config_for
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.models.experts import unfuse_experts
from quark_onnx.torch.models.forward_trace import forward_trace
from quark_onnx.torch.models.heads import heads_of, usually_float
from quark_onnx.torch.models.quantized_layer import QuantizedLayer
from quark_onnx.torch.pipelines.client_check import planned_checkpoint, refusals
from quark_onnx.torch.pipelines.file_to_file import Writing, quantize_checkpoint
from quark_onnx.torch.pipelines.in_memory import quantize_model
from quark_onnx.torch.validate import validate
from quark_onnx.torch.validate.checkpoint import read
from tests.torch_families import MTP, TASKS, task_folder, task_model
from tests.torch_models import VOCABULARY, llama, made, saved, tokens

_LISTS = ("exclude", "ignore", "ignored_layers", "modules_to_not_convert")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints that earlier tests have written, by class."""
    return {}


@pytest.fixture
def source(
    request: pytest.FixtureRequest,
    folders: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The checkpoint of a class."""
    name = request.param
    if name not in folders:
        folders[name] = task_folder(name, tmp_path_factory.mktemp("models") / name)
    return folders[name]


def of_class(*names: str) -> Any:
    return pytest.mark.parametrize("source", names, indirect=True)


def config_of(layout: str, **settings: Any) -> TorchConfig:
    """A configuration without data that a layout supports."""
    config = config_for("int4_wo_32", **settings)
    if layout.endswith("fp8"):
        # one scale for a weight, and one for each token
        default = scheme("fp8").with_(input=scheme("ptpc_fp8").input)
        return config.with_(default=default)
    return config


def quantized(
    source: Path, output: Path, layout: str = "quark", **settings: Any
) -> Any:
    """Quantize without data; return the report."""
    config = config_of(layout, **settings)
    return quantize_checkpoint(
        source, None, config, output, writing=Writing(layout=layout), progress=False
    )


def excluded(folder: Path) -> list[str]:
    """The layers that a checkpoint lists as float, under the name of its layout."""
    config = read_json(folder / "config.json")["quantization_config"]
    lists = [config[key] for key in _LISTS if key in config]
    assert len(lists) == 1
    return lists[0] or []


def float_weights(folder: Path) -> Iterator[str]:
    """The layers of a checkpoint whose weight is a matrix of floats."""
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118
                part = tensors.get_slice(key)
                floats = part.get_dtype() in ("F16", "BF16", "F32")
                if floats and len(part.get_shape()) == 2 and key.endswith(".weight"):
                    yield key.removesuffix(".weight")


def sample(model: Any) -> dict[str, Any]:
    """Arguments of a forward."""
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(1, 3, 32, 32)}
    ids = torch.arange(3, 15)[None] % VOCABULARY
    inputs = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        # classifiers with a decoder read the hidden state at the end of the text
        ids[0, -1] = model.config.eos_token_id
        if "Classification" not in type(model).__name__:
            inputs["decoder_input_ids"] = ids
    return inputs


def called_layers(model: Any) -> set[str]:
    """The layers that a real forward calls."""
    called = set[str]()
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: called.add(name))
    with torch.no_grad():
        model(**sample(model))
    return called


@pytest.mark.parametrize("name", TASKS)
def test_heads_stay_float(name: str) -> None:
    """A head is a layer after the last block, whatever its class calls it."""
    model = task_model(name)
    heads = TASKS[name][2]
    assert list(heads_of(model)) == heads
    quantize_model(model, None, config_for("int4_wo_32"))
    for head in heads:
        assert isinstance(model.get_submodule(head), nn.Linear)


@of_class("LlamaForSequenceClassification", "BertForSequenceClassification")
def test_heads_stay_float_from_file_to_file(source: Path, tmp_path: Path) -> None:
    quantized(source, tmp_path / "out")
    assert excluded(tmp_path / "out") == TASKS[source.name][2]


@pytest.mark.parametrize(
    ("name", "head"),
    [("LlamaForCausalLM", "lm_head"), ("LlamaForSequenceClassification", "score")],
)
def test_a_head_is_quantized_on_request(name: str, head: str, tmp_path: Path) -> None:
    """A name of a layer wins over the default that heads stay float, in both flows."""
    config = config_for("int4_wo_32", layers=((head, "int4_wo_per_channel"),))
    model = task_model(name)
    assert usually_float(model, [head]) == ()
    quantize_model(model, None, config)
    assert isinstance(model.get_submodule(head), QuantizedLayer)
    source = task_folder(name, tmp_path / "source")
    report = quantize_checkpoint(source, None, config, tmp_path / "out", progress=False)
    assert head in report.quantized and head not in excluded(tmp_path / "out")


@of_class(*TASKS)
def test_every_float_matrix_is_listed(source: Path, tmp_path: Path) -> None:
    """Every matrix of floats in the files is listed as excluded, in every layout.

    Embeddings are the exception: no client takes them for quantized, and vLLM fails on an embedding
    in AMD Quark's list. The plan of a checkpoint is what is written. Every quantized layer is one
    that the forward calls; experts run on the tokens that are sent to them.
    """
    model = task_model(source.name)
    tables = {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
    }
    calls = called_layers(model)
    layouts = list[str]()
    for layout in LAYOUTS:
        output = tmp_path / layout
        try:
            report = quantized(source, output, layout)
        # the layout has no place for a model
        except ConfigError:
            continue
        layouts.append(layout)
        listed = excluded(output)
        floats = set(float_weights(output))
        assert floats - set(listed) <= tables
        assert floats.issuperset(MTP.get(source.name, ()))
        for name in report.quantized:
            assert name in calls or ".experts." in name, name
        planned = planned_checkpoint(
            FloatCheckpoint(source), config_of(layout), layout_named(layout)
        )
        written = read(output)
        assert planned.config == written.config
        assert planned.tensors.keys() == written.tensors.keys()
    assert "quark" in layouts


@of_class("T5ForConditionalGeneration")
def test_tables_with_other_names_are_listed(source: Path, tmp_path: Path) -> None:
    quantized(source, tmp_path / "out")
    bias = "SelfAttention.relative_attention_bias"
    names = [f"{side}.block.0.layer.0.{bias}" for side in ("encoder", "decoder")]
    assert {"shared", *names} <= set(excluded(tmp_path / "out"))


@of_class(*MTP)
def test_layers_that_the_model_lacks(source: Path, tmp_path: Path) -> None:
    """A pattern may name what the files have and the model does not; no client refuses it."""
    opened, layout = FloatCheckpoint(source), layout_named("quark")
    assert refusals(opened, config_of("quark"), layout) == []
    layer = MTP[source.name][0]
    quantized(source, tmp_path / "out", exclude=("lm_head", layer, f"{layer}.weight"))
    assert layer in excluded(tmp_path / "out")
    assert validate(tmp_path / "out", "vllm").right
    with pytest.raises(ConfigError, match=f"{layer} is no layer that can be quantized"):
        quantized(source, tmp_path / "other", layers=((layer, "fp8"),))


@of_class("MambaForCausalLM", "FalconMambaForCausalLM", "JambaForCausalLM")
def test_a_layer_that_is_never_called_stays_float(source: Path, tmp_path: Path) -> None:
    """Mamba multiplies the weight of dt_proj itself, so that a quantized layer would not run."""
    report = quantized(source, tmp_path / "out")
    names = [name for name in report.kept if name.endswith("dt_proj")]
    assert names and not any("dt_proj" in name for name in report.quantized)
    assert any(names[0] in note and "never calls" in note for note in report.notes)
    assert validate(tmp_path / "out", "vllm").right
    with pytest.raises(
        ConfigError, match="dt_proj cannot be quantized: the model reads"
    ):
        quantized(source, tmp_path / "other", layers=(("*dt_proj", "fp8"),))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("DeepseekV3ForCausalLM", "the latent of kv_a_proj_with_mqa .*not supported"),
        ("MambaForCausalLM", "no layer computes keys or values"),
        ("FalconMambaForCausalLM", "no layer computes keys or values"),
    ],
    indirect=["source"],
)
def test_a_cache_without_layers_of_keys_and_values(
    source: Path, reason: str, tmp_path: Path
) -> None:
    """The error says what the cache holds, and suggests no layer by its spelling."""
    config = config_for("fp8", kv_cache="fp8")
    with pytest.raises(ConfigError, match=reason) as error:
        quantize_checkpoint(source, tokens(), config, tmp_path / "out", progress=False)
    assert not any(name in str(error.value) for name in ("o_proj'", "x_proj"))


@pytest.mark.parametrize(
    ("names", "computing"),
    [
        (["h.0.attn.c_attn", "h.0.attn.c_proj"], "c_attn"),
        (["layers.0.attention.query_key_value"], "query_key_value"),
        (["layer.0.self.key", "layer.0.self.value", "layer.0.out"], "key, value"),
    ],
)
def test_a_cache_whose_layers_have_other_names(
    names: list[str], computing: str
) -> None:
    with pytest.raises(ConfigError, match=f"computed by {computing}; name these"):
        config_for("fp8", kv_cache="fp8", exclude=()).check(names)


@of_class("Gemma3nForCausalLM")
def test_layers_that_no_group_fits_stay_float(source: Path, tmp_path: Path) -> None:
    """A layer with fewer inputs than a group stays float unless it is named."""
    report = quantized(source, tmp_path / "out")
    names = [name for name in report.kept if name.endswith("_coefs")]
    assert len(names) == 4 and {report.kept[name] for name in names} == {
        "it has fewer inputs than a group"
    }
    assert any("fewer inputs than a group" in note for note in report.notes)
    named = quantized(source, tmp_path / "named", layers=(("*_coefs", "int4_wo_32"),))
    assert set(names) <= set(named.quantized)


ROUTERS = {
    "Qwen3MoeForCausalLM": "model.layers.0.mlp.gate",
    "DeepseekV3ForCausalLM": "model.layers.1.mlp.gate",
    "Qwen3NextForCausalLM": "model.layers.0.mlp.gate",
    "MixtralForCausalLM": "model.layers.0.block_sparse_moe.gate",
}


@of_class(*ROUTERS)
@pytest.mark.parametrize("end", ["", ".weight"])
def test_patterns_match_routers(source: Path, end: str, tmp_path: Path) -> None:
    """A pattern may name a router, by its module or its parameter, as files call it."""
    router = ROUTERS[source.name]
    pattern = f"*{router.split('.0.')[-1].split('.1.')[-1]}{end}"
    quantized(source, tmp_path / "out", exclude=("lm_head", pattern))
    assert router in excluded(tmp_path / "out")


@of_class("MixtralForCausalLM")
@pytest.mark.parametrize(
    ("pattern", "layer"),
    [
        ("*experts.3.w1", "model.layers.0.block_sparse_moe.experts.3.w1"),
        ("*experts.3.w1.weight", "model.layers.0.block_sparse_moe.experts.3.w1"),
        ("model.layers.1.self_attn", "model.layers.1.self_attn.q_proj"),
        ("*o_proj.weight", "model.layers.1.self_attn.o_proj"),
    ],
)
def test_patterns_match_every_name_of_a_layer(
    source: Path, pattern: str, layer: str, tmp_path: Path
) -> None:
    """A layer has names in the model and in files, its weight has one, and so has its module."""
    quantized(source, tmp_path / "out", exclude=("lm_head", pattern))
    assert layer in excluded(tmp_path / "out")
    assert layer in set(float_weights(tmp_path / "out"))
    report = quantized(source, tmp_path / "own", layers=((pattern, "uint4_wo_32"),))
    assert "uint4" in {spec.weight.dtype.name for spec in report.quantized.values()}


@of_class("Qwen3MoeForCausalLM")
@pytest.mark.parametrize("setting", ["exclude", "layers"])
def test_a_pattern_without_a_match_is_an_error(
    source: Path, setting: str, tmp_path: Path
) -> None:
    value: Any = {"exclude": ("*mlp.gte",), "layers": (("*mlp.gte", "fp8"),)}[setting]
    with pytest.raises(
        ConfigError, match=rf"{setting} names '\*mlp.gte', .*did you mean 'gate'"
    ):
        quantized(source, tmp_path / "out", **{setting: value})


@pytest.mark.parametrize("own", ["int4_wo_32", "fp8"])
def test_the_plan_of_a_tied_model_with_a_head_of_its_own(
    own: str, tmp_path: Path
) -> None:
    """The twin of a quantized head keeps its name in plan and file."""
    source = saved(made(llama(tie_word_embeddings=True)), tmp_path / "source")
    config = config_for("int4_wo_32", layers=(("lm_head", own),))
    planned = planned_checkpoint(FloatCheckpoint(source), config, layout_named("quark"))
    assert "model.embed_tokens.weight" in planned.tensors
    data = [torch.arange(12)[None]]
    quantize_checkpoint(source, data, config, tmp_path / "out", progress=False)
    written = read(tmp_path / "out")
    assert planned.config == written.config
    assert planned.tensors.keys() == written.tensors.keys()


@of_class("LlamaForSequenceClassification", "LlamaForCausalLM")
def test_a_classifier_needs_no_lm_head(source: Path, tmp_path: Path) -> None:
    """The class of a checkpoint tells which head belongs to it."""
    quantized(source, tmp_path / "out")
    assert validate(tmp_path / "out", "vllm").right
    if source.name == "LlamaForCausalLM":
        file = tmp_path / "out" / "model.safetensors"
        with safe_open(file, "pt") as tensors:
            kept = {
                key: tensors.get_tensor(key)
                for key in tensors.keys()  # noqa: SIM118
                if key != "lm_head.weight"
            }
        save_file(kept, file, {"format": "pt"})
        findings = validate(tmp_path / "out", "vllm").findings
        assert [finding.rule for finding in findings] == ["head-missing"]


@pytest.mark.parametrize("is_quantized", [False, True])
def test_a_head_is_found_where_the_trace_ends_early(is_quantized: bool) -> None:
    """The router of JetMoE reads values, which the meta device does not have."""
    config = AutoConfig.for_model(
        "jetmoe",
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_key_value_heads=2,
        kv_channels=16,
        num_local_experts=4,
    )
    model = made(config)
    unfuse_experts(model)
    if is_quantized:
        quantize_model(model, None, config_for("int4_wo_32"), progress=False)
    assert not forward_trace(model).is_whole
    assert heads_of(model) == ("lm_head",)


def test_models_alike_are_traced_once() -> None:
    """A replaced layer or an untied weight may change what is called."""

    class Unused(nn.Linear):
        pass

    model = made(llama(tie_word_embeddings=True))
    trace = forward_trace(model)
    assert forward_trace(made(llama(tie_word_embeddings=True), seed=1)) is trace
    assert forward_trace(made(llama())) is not trace
    other = made(llama(tie_word_embeddings=True))
    other.model.layers[0].unused = Unused(64, 64)
    assert forward_trace(other) is not trace
    head = model.lm_head
    head.weight = nn.Parameter(head.weight.detach().clone())
    assert forward_trace(model) is not trace
