"""Models quantized by AMD Quark's names: configurations, templates, checkpoints."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file
from torch import nn

from quark_onnx.common.errors import ConfigError, DataError, ModelError
from quark_onnx.torch import (
    LLMTemplate,
    ModelExporter,
    ModelQuantizer,
    export_safetensors,
    import_model_from_safetensors,
)
from quark_onnx.torch.algorithms.gptq.gptq import Qronos
from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.export import ExporterConfig, JsonExporterConfig
from quark_onnx.torch.quantization import (
    AutoSmoothQuantConfig,
    AWQConfig,
    FP8E4M3PerTensorSpec,
    GPTQConfig,
    Int4PerGroupSpec,
    Int8PerTensorSpec,
    OCP_MXFP4Spec,
    QConfig,
    QLayerConfig,
    QronosConfig,
    RotationConfig,
    load_quant_algo_config_from_file,
)

INT8 = Int8PerTensorSpec().to_quantization_spec()
FP8 = FP8E4M3PerTensorSpec().to_quantization_spec()
DYNAMIC = FP8E4M3PerTensorSpec(is_dynamic=True).to_quantization_spec()
INT4 = QLayerConfig(
    weight=Int4PerGroupSpec(ch_axis=-1, group_size=32).to_quantization_spec()
)
LLAMA = LLMTemplate.get("llama")


def logits(model: Any, batch: Any) -> Any:
    with torch.no_grad():
        return model(batch).logits


def layers(model: Any) -> dict[str, str]:
    """Formats of quantized weights, by the last part of the name in the first block and by the name
    outside.
    """
    found = {
        name: each.spec.weight
        for name, each in model.named_modules()
        if hasattr(each, "quantized")
    }
    own = {
        name.removeprefix("model.layers.0."): spec.dtype.name
        for name, spec in found.items()
        if spec
    }
    return {name: dtype for name, dtype in own.items() if not name.startswith("model.")}


def test_layers_by_name_by_type_and_excluded(model: Any) -> None:
    config = QConfig(
        global_quant_config=QLayerConfig(weight=INT8),
        layer_quant_config={"*mlp.*": INT4, "*.up_proj": QLayerConfig()},
        layer_type_quant_config={nn.Embedding: INT4},
        exclude=["*o_proj", "lm_head"],
    )
    ModelQuantizer(config).quantize_model(model)
    assert layers(model) == {
        "self_attn.q_proj": "int8",
        "self_attn.k_proj": "int8",
        "self_attn.v_proj": "int8",
        "mlp.gate_proj": "int4",
        "mlp.up_proj": "int4",  # the first glob wins
        "mlp.down_proj": "int4",
    }
    assert "int4" in str(model.model.embed_tokens.spec.weight)


def test_a_layer_that_gets_nothing_stays_float(model: Any) -> None:
    config = QConfig(
        INT4, layer_quant_config={"*self_attn*": QLayerConfig()}, exclude=["lm_head"]
    )
    ModelQuantizer(config).quantize_model(model)
    assert set(layers(model)) == {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    assert isinstance(model.model.layers[0].self_attn.q_proj, nn.Linear)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"exclude": ["lm_haed"]}, "exclude names 'lm_haed', .*did you mean 'lm_head'"),
        (
            {"layer_quant_config": {"*up_porj": INT4}},
            "layers names '\\*up_porj', .*did you mean 'up_proj'",
        ),
        (
            {"layer_type_quant_config": {"LayerNorm": INT4}},
            "types names 'LayerNorm', which cannot be quantized",
        ),
        (
            {"layer_quant_config": {"*up_proj": INT8}},
            "the layers '\\*up_proj' is .*; it must be a QLayerConfig",
        ),
        (
            {"kv_cache_group": ["*k_proj"]},
            "'\\*k_proj' is to compute keys or values, but there are no output_tensors",
        ),
        (
            {"min_kv_scale": 0.5},
            "min_kv_scale is 0.5, but there is no kv_cache_quant_config",
        ),
        (
            {"quant_mode": "fx_graph_mode"},
            "LlamaForCausalLM is no exported graph; .*torch.export.export",
        ),
        ({"quant_mode": "eager"}, "quant_mode is 'eager'; did you mean 'eager_mode'"),
        (
            {"softmax_quant_spec": DYNAMIC},
            "attention: probabilities are fp8e4m3 .*a scale that data tells",
        ),
        (
            {"kv_cache_post_rope": True},
            "kv_cache_post_rope is True, but there is no kv_cache_quant_config",
        ),
        ({"shared_scale_groups": [["a"]]}, "each layer has scales of its own"),
        (
            {"algo_config": [GPTQConfig(static_groups=False)]},
            "desc_act without static_groups needs an index",
        ),
        (
            {"algo_config": AutoSmoothQuantConfig(compute_scale_loss="RMSE")},
            "scales are chosen by MSE",
        ),
        (
            {"algo_config": QronosConfig(beta=10.0)},
            "beta is 10.0, and nothing here depends on it",
        ),
        (
            {"algo_config": RotationConfig(train_smooth=True)},
            "no scales are learned beside rotations",
        ),
        (
            {"algo_config": RotationConfig(smooth_positions=["mlp"])},
            r"smooth_positions is \['mlp'\]",
        ),
        ({"algo_config": ["awq"]}, "algo_config has 'awq'; it must be an AlgoConfig"),
        (
            {
                "kv_cache_quant_config": {"*k_proj": QLayerConfig(output_tensors=FP8)},
                "kv_cache_group": ["*k_proj", "*v_proj"],
            },
            "kv_cache_group is .*, but kv_cache_quant_config is for",
        ),
        (
            {
                "kv_cache_quant_config": {
                    "*k_proj": QLayerConfig(output_tensors=FP8),
                    "*v_proj": QLayerConfig(output_tensors=INT8),
                }
            },
            "quantized differently",
        ),
        (
            {
                "kv_cache_quant_config": {"*k_proj": QLayerConfig(output_tensors=FP8)},
                "exclude": ["*self_attn*"],
            },
            "kv_cache names '\\*k_proj', but these layers are excluded",
        ),
    ],
)
def test_what_a_configuration_cannot_say(
    model: Any, batches: list[Any], settings: dict[str, Any], message: str
) -> None:
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match=message):
        ModelQuantizer(QConfig(INT4, **settings)).quantize_model(model, batches)
    assert all(
        torch.equal(value, before[name]) for name, value in model.state_dict().items()
    )


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (QLayerConfig(weight=INT8, target_device="IPU"), "target_device is IPU"),
    ],
)
def test_what_a_layer_cannot_have(
    model: Any, layer: QLayerConfig, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"global_quant_config: {message}"):
        ModelQuantizer(QConfig(layer)).quantize_model(model)


def test_static_scales_need_data(model: Any) -> None:
    with pytest.raises(DataError, match="no calibration data"):
        ModelQuantizer(LLAMA.get_config("fp8")).quantize_model(model)


def test_templates_are_known_by_name() -> None:
    assert (
        len(LLMTemplate.list_available()) == 51
        and "qwen3" in LLMTemplate.list_available()
    )
    with pytest.raises(
        ConfigError, match="models of type 'lama'; did you mean 'llama'"
    ):
        LLMTemplate.get("lama")
    gemma = LLMTemplate.get("gemma3")
    assert gemma.kv_layers_name == [
        "*language_model.*k_proj",
        "*language_model.*v_proj",
    ]
    assert gemma.get_config("fp8").exclude == [
        "*vision_tower*",
        "*multi_modal_projector*",
        "*lm_head",
    ]
    assert gemma.get_config("fp8", exclude_layers=["lm_head"]).exclude == ["lm_head"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scheme": "fp9"}, "unknown scheme 'fp9'; did you mean"),
        (
            {"scheme": "fp8", "kv_cache_scheme": "int8"},
            "kv_cache_scheme is 'int8'; known: fp8",
        ),
        (
            {"scheme": "fp8", "attention_scheme": "int8"},
            "attention_scheme is 'int8'; known: fp8",
        ),
        (
            {"scheme": "fp8", "algorithm": "awk"},
            "unknown algorithm 'awk'; did you mean 'awq'",
        ),
        (
            {"scheme": "fp8", "layer_config": {"*k_proj": "mxfp44"}},
            "did you mean 'mxfp4'",
        ),
    ],
)
def test_what_a_template_cannot_do(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLAMA.get_config(**settings)


def test_algorithms_of_a_template_have_its_settings() -> None:
    own = GPTQConfig(damp_percent=0.1)
    config = LLAMA.get_config(
        "uint4_wo_128", algorithm=["awq", "gptq"], algo_configs={"gptq": own}
    )
    assert config.algo_config == [AWQConfig(), own]


def test_damping_of_qronos_is_of_the_greatest_eigenvalue() -> None:
    assert QronosConfig(alpha=0.002).algorithm() == Qronos(
        0.002, relative_to="eigenvalue"
    )


def test_templates_and_schemes_of_ones_own(model: Any) -> None:
    LLMTemplate.register_template(
        LLMTemplate("mine", exclude_layers_name=["lm_head", "*.gate"])
    )
    LLMTemplate.register_scheme("int4_mine", INT4)
    try:
        assert (
            "int4_mine" in LLMTemplate.get_supported_schemes()
            and "mine" in LLMTemplate.list_available()
        )
        with pytest.raises(ConfigError, match="there is a scheme 'int4_mine' already"):
            LLMTemplate.register_scheme("int4_mine", INT4)
        mine = LLMTemplate.get("mine")
        with pytest.raises(
            ConfigError, match="does not say which layers compute keys and values"
        ):
            mine.get_config("int4_mine", kv_cache_scheme="fp8")
        ModelQuantizer(mine.get_config("int4_mine")).quantize_model(
            model
        )  # "*.gate" is not there: no error
        assert set(layers(model).values()) == {"int4"} and "lm_head" not in layers(
            model
        )
    finally:
        LLMTemplate.unregister_scheme("int4_mine")
        LLMTemplate.registered.clear()
    with pytest.raises(ConfigError, match="no scheme 'int4_mine' was registered"):
        LLMTemplate.unregister_scheme("int4_mine")


def test_every_scheme_of_a_template_is_what_it_is_here() -> None:
    from quark_onnx.torch.config.schemes import SCHEMES

    for name in LLMTemplate.get_supported_schemes():
        assert LLAMA.get_config(name).global_quant_config.spec() == SCHEMES[name], name


@pytest.mark.parametrize(
    ("mode", "name", "end"),
    [("awq", "uint4_wo_32", "qzeros"), ("fp8", "fp8", "input_scale")],
)
def test_layouts_that_were_custom_modes(
    model: Any, batches: list[Any], tmp_path: Path, mode: str, name: str, end: str
) -> None:
    config = LLAMA.get_config(name, kv_cache_scheme="fp8" if mode == "fp8" else None)
    quantized = ModelQuantizer(config).quantize_model(model, batches)
    export_safetensors(quantized, tmp_path / "out", custom_mode=mode)
    found = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))[
        "quantization_config"
    ]
    assert found["quant_method"] == mode
    first = load_file(tmp_path / "out" / "model.safetensors")
    assert sum(key.endswith(f".{end}") for key in first) == 14
    assert sum(key.endswith("self_attn.k_scale") for key in first) == (
        2 if mode == "fp8" else 0
    )
    loaded = import_model_from_safetensors(None, tmp_path / "out")
    assert torch.equal(logits(loaded, batches[0]), logits(quantized, batches[0]))
    export_safetensors(loaded, tmp_path / "again", custom_mode=mode)
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert first.keys() == again.keys() and all(
        torch.equal(again[key].float(), first[key].float()) for key in first
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"scheme": "uint4_wo_32"},
        {"scheme": "w_mxfp4_a_mxfp4"},
        {
            "scheme": "fp8",
            "kv_cache_scheme": "fp8",
            "layer_config": {"*down_proj": "mxfp4", "*v_proj": "ptpc_fp8"},
        },
        {
            "scheme": "mxfp4_fp8",
            "kv_cache_scheme": "fp8",
            "layer_config": {"model.layers.0.*": "fp8"},
        },
    ],
)
def test_what_is_exported_is_what_was_in_memory(
    model: Any, batches: list[Any], tmp_path: Path, settings: dict[str, Any]
) -> None:
    quantized = ModelQuantizer(LLAMA.get_config(**settings)).quantize_model(
        model, batches
    )
    export_safetensors(quantized, tmp_path / "out", pack_method="order")
    loaded = import_model_from_safetensors(None, tmp_path / "out")
    assert torch.equal(logits(loaded, batches[0]), logits(quantized, batches[0]))
    entry = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))[
        "quantization_config"
    ]
    assert entry["export"]["pack_method"] == "order"
    for glob, each in entry["kv_cache_quant_config"].items():
        assert (
            each["output_tensors"]["dtype"] == "fp8_e4m3"
            and entry["layer_quant_config"][glob] == each
        )
    export_safetensors(loaded, tmp_path / "again", pack_method="order")
    first, again = (
        load_file(tmp_path / name / "model.safetensors") for name in ("out", "again")
    )
    assert first.keys() == again.keys()
    assert all(
        torch.equal(
            value.reshape(-1).view(torch.uint8),
            again[name].reshape(-1).view(torch.uint8),
        )
        for name, value in first.items()
    )


def test_experts_are_quantized_one_by_one(
    make: Any, batches: list[Any], tmp_path: Path
) -> None:
    model = make(
        "Qwen3Moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        head_dim=16,
    )
    config = LLMTemplate.get("qwen3_moe").get_config("int4_wo_32")
    ModelQuantizer(config).quantize_model(model)
    assert {"mlp.experts.3.down_proj", "self_attn.q_proj"} < set(
        layers(model)
    ) and "mlp.gate" not in layers(model)
    export_safetensors(model, tmp_path / "out")
    loaded = import_model_from_safetensors(None, tmp_path / "out")
    assert torch.equal(logits(loaded, batches[0]), logits(model, batches[0]))


def test_a_model_takes_over_the_parts_of_a_checkpoint(
    model: Any, batches: list[Any], tmp_path: Path
) -> None:
    other = copy.deepcopy(model)
    ModelQuantizer(LLAMA.get_config("mxfp4_weight_only")).quantize_model(model)
    export_safetensors(model, tmp_path / "out")
    assert (
        import_model_from_safetensors(
            other, tmp_path / "out", attn_implementation="eager", device="cpu"
        )
        is other
    )
    assert layers(other) == layers(model)
    torch.testing.assert_close(
        logits(other, batches[0]), logits(model, batches[0]), atol=0.02, rtol=0.02
    )
    with pytest.raises(
        ConfigError, match=r"the model is a Linear, but .* has a LlamaForCausalLM"
    ):
        import_model_from_safetensors(nn.Linear(2, 2), tmp_path / "out")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        import_model_from_safetensors(None, tmp_path / "nowhere")


def test_a_checkpoint_becomes_one_without_a_model_in_memory(
    model: Any, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path / "float")
    quantizer = ModelQuantizer(LLAMA.get_config("mxfp4"))
    quantizer.direct_quantize_checkpoint(tmp_path / "float", tmp_path / "direct")
    export_safetensors(quantizer.quantize_model(model), tmp_path / "out")
    direct, out = (
        load_file(tmp_path / name / "model.safetensors") for name in ("direct", "out")
    )
    assert direct.keys() == out.keys() and all(
        torch.equal(value, out[name]) for name, value in direct.items()
    )
    configs = [
        json.loads((tmp_path / name / "config.json").read_text(encoding="utf-8"))
        for name in ("direct", "out")
    ]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    with pytest.raises(DataError, match="no calibration data"):
        ModelQuantizer(LLAMA.get_config("fp8")).direct_quantize_checkpoint(
            tmp_path / "float", tmp_path / "static"
        )
    assert not (tmp_path / "static").exists()


def exporter(folder: Path, **settings: Any) -> ModelExporter:
    return ModelExporter(ExporterConfig(JsonExporterConfig(**settings)), folder)


def test_the_exporter_knows_the_least_scale_and_the_group(
    model: Any, batches: list[Any], tmp_path: Path
) -> None:
    config = LLAMA.get_config("fp8", kv_cache_scheme="fp8")
    ModelQuantizer(config).quantize_model(model, batches)
    scale = float(model.model.layers[0].self_attn.v_proj.output.scale)
    assert 0 < scale < 1
    exporter(
        tmp_path / "out", min_kv_scale=1.0, kv_cache_group=["*v_proj", "*k_proj"]
    ).export_safetensors_model(model, config)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {
        float(value) for name, value in found.items() if name.endswith("output_scale")
    } == {1.0}
    entry = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))[
        "quantization_config"
    ]
    assert entry["export"]["min_kv_scale"] == 1.0 and set(
        entry["export"]["kv_cache_group"]
    ) == {"*k_proj", "*v_proj"}
    assert "quantized_by" not in found


def test_the_group_may_come_with_the_export(
    model: Any, batches: list[Any], tmp_path: Path
) -> None:
    cache = QLayerConfig(FP8, FP8, FP8)
    config = QConfig(
        QLayerConfig(FP8, weight=FP8),
        ["lm_head"],
        layer_quant_config={"*k_proj": cache, "*v_proj": cache},
    )
    ModelQuantizer(config).quantize_model(model, batches)
    exporter(
        tmp_path / "out", kv_cache_group=["*k_proj", "*v_proj"]
    ).export_safetensors_model(model, config)
    entry = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))[
        "quantization_config"
    ]
    assert list(entry["kv_cache_quant_config"]) == ["*k_proj", "*v_proj"]


def test_keys_may_be_rounded_after_they_are_rotated(
    model: Any, batches: list[Any], tmp_path: Path
) -> None:
    config = LLAMA.get_config("fp8", kv_cache_scheme="fp8")
    config.kv_cache_post_rope = True
    ModelQuantizer(config).quantize_model(model, batches)
    exporter(tmp_path / "out").export_safetensors_model(model, config)
    entry = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))[
        "quantization_config"
    ]
    assert entry["kv_cache_post_rope"] is config.to_dict()["kv_cache_post_rope"] is True
    scales = load_file(tmp_path / "out" / "model.safetensors")
    assert "model.layers.0.self_attn.k_proj.output_scale" in scales
    loaded = load_checkpoint(tmp_path / "out")
    assert torch.equal(loaded(batches[0]).logits, model(batches[0]).logits)


@pytest.mark.parametrize(
    ("settings", "call", "message"),
    [
        ({"weight_format": "fake"}, {}, "weight_format is 'fake'"),
        ({"weight_format": "fake_quantized"}, {"custom_mode": "awq"}, "the layout 'awq' has a place for codes alone"),  # noqa: E501
        ({"weight_merge_groups": [["a"]]}, {}, "weight_merge_groups is set"),
        ({"kv_cache_group": ["*k_proj"]}, {}, "but the model was quantized with float keys"),
        ({"min_kv_scale": 1.0}, {}, "keys and values are float"),
        ({"pack_method": "ordered"}, {}, "pack_method is 'ordered'"),
        ({}, {"custom_mode": "oga"}, "custom_mode is 'oga'; it must be one of: quark, awq, fp8"),
        ({}, {"custom_mode": "fp8"}, "weight int4 .* has no place in a checkpoint of the layout 'fp8'"),  # noqa: E501
        ({"pack_method": "order"}, {"custom_mode": "awq"}, "the layout 'awq' has an order of its own"),  # noqa: E501
        ({}, {"quant_config": LLAMA.get_config("int8")}, "is quantized by .*; give what the model was quantized by"),  # noqa: E501
    ],
)  # fmt: skip
def test_what_cannot_be_exported(
    model: Any,
    tmp_path: Path,
    settings: dict[str, Any],
    call: dict[str, Any],
    message: str,
) -> None:
    ModelQuantizer(LLAMA.get_config("int4_wo_32")).quantize_model(model)
    with pytest.raises(ConfigError, match=message):
        exporter(tmp_path / "out", **settings).export_safetensors_model(model, **call)
    assert not (tmp_path / "out").exists()


def test_only_what_was_quantized_is_exported(model: Any, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="the model does not know what it was quantized by"
    ):
        export_safetensors(model, tmp_path / "out")
    with pytest.raises(ConfigError, match="no layer of the model is quantized"):
        ModelExporter(export_dir=tmp_path / "out").export_safetensors_model(
            model, QConfig(INT4)
        )
    with pytest.raises(ConfigError, match="export_dir is missing"):
        ModelExporter(ExporterConfig())
    with pytest.raises(
        ConfigError, match="JsonExporterConfig has no setting 'kv_cache_goup'"
    ):
        ExporterConfig().json_export_config.kv_cache_goup = []  # type: ignore[attr-defined]


def test_a_checkpoint_has_the_type_that_the_model_has_now(
    model: Any, tmp_path: Path
) -> None:
    ModelQuantizer(LLAMA.get_config("int4_wo_32")).quantize_model(model.float())
    export_safetensors(model, tmp_path / "out")
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))[
            "dtype"
        ]
        == "float32"
    )


def test_a_gguf_file_holds_the_codes(model: Any, tmp_path: Path) -> None:
    pytest.importorskip("quark_onnx.torch.exports.gguf")
    gguf = pytest.importorskip("gguf")
    model.save_pretrained(tmp_path / "float")
    ModelQuantizer(LLAMA.get_config("uint4_wo_32")).quantize_model(model)
    with pytest.raises(
        ConfigError, match="model_type is 'qwen2', but the model is a 'llama'"
    ):
        ModelExporter(tmp_path / "out").export_gguf_model(
            model, tmp_path / "float", "qwen2"
        )
    ModelExporter(tmp_path / "out").export_gguf_model(
        model, tmp_path / "float", "llama"
    )
    found = {
        tensor.name: tensor
        for tensor in gguf.GGUFReader(tmp_path / "out" / "model.gguf").tensors
    }
    tensor = found["blk.0.ffn_up.weight"]
    layer = model.model.layers[0].mlp.up_proj
    scale = layer.quantized.scale.float().max()
    left = (
        torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        - layer.weight.float()
    )
    assert (
        tensor.tensor_type.name == "Q4_1" and left.abs().max() < scale / 8
    )  # its scales and offsets are float16


@pytest.mark.slow
def test_an_onnx_model_computes_the_same(
    model: Any, batches: list[Any], tmp_path: Path
) -> None:
    pytest.importorskip("quark_onnx.torch.exports.onnx")
    import onnxruntime

    ModelQuantizer(LLAMA.get_config("uint4_wo_32")).quantize_model(model.float())
    ModelExporter(tmp_path / "out").export_onnx_model(model, batches[0])
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx")
    found = session.run(None, {session.get_inputs()[0].name: batches[0].numpy()})[0]
    torch.testing.assert_close(
        torch.tensor(found), logits(model, batches[0]), atol=1e-3, rtol=1e-3
    )


def test_algorithms_from_files(tmp_path: Path) -> None:
    def load(content: Any) -> Any:
        file = tmp_path / "algorithm.json"
        file.write_text(json.dumps(content), encoding="utf-8")
        return load_quant_algo_config_from_file(file)

    found = load(
        {
            "name": "gptq",
            "model_decoder_layers": "model.layers",
            "inside_layer_modules": ["self_attn.k_proj"],
        }
    )
    assert found == GPTQConfig(
        model_decoder_layers="model.layers", inside_layer_modules=["self_attn.k_proj"]
    )
    with pytest.raises(AttributeError):
        found.block_size = 64
    assert load({"name": "smooth", "alpha": 0.5}).alpha == 0.5
    assert load(
        {"name": "rotation", "online_config": {"shared_parallel": True}}
    ).online_config.shared_parallel
    with pytest.raises(
        ConfigError,
        match=r"algorithm\.json: unknown algorithm 'gptk'; did you mean 'gptq'",
    ):
        load({"name": "gptk"})
    with pytest.raises(
        ConfigError,
        match=(
            r"algorithm\.json: GPTQConfig has no setting 'damp'; known: .*damp_percent"
        ),
    ):
        load({"name": "gptq", "damp": 0.1})
    with pytest.raises(
        ConfigError,
        match=r"algorithm\.json: OnlineRotationConfig: shared_parallel is missing",
    ):
        load({"name": "rotation", "online_config": {}})
    with pytest.raises(ConfigError, match="must hold an object with the name"):
        load({"damp": 0.1})
    with pytest.raises(ModelError, match=r"algorithm\.json: .* must be an object"):
        load(["gptq"])
    with pytest.raises(ModelError, match=r"has no nowhere\.json"):
        load_quant_algo_config_from_file(tmp_path / "nowhere.json")


def test_the_mx_activations_of_a_layer(model: Any, batches: list[Any]) -> None:
    config = QConfig(
        QLayerConfig(
            input_tensors=OCP_MXFP4Spec(ch_axis=-1).to_quantization_spec(),
            weight=OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False).to_quantization_spec(),
        ),
        exclude=["lm_head"],
    )
    ours = ModelQuantizer(config).quantize_model(copy.deepcopy(model))
    named = ModelQuantizer(LLAMA.get_config("mxfp4")).quantize_model(model)
    assert torch.equal(logits(ours, batches[0]), logits(named, batches[0]))


def test_names_are_loaded_when_they_are_asked_for() -> None:
    import quark_onnx.torch as names

    assert all(getattr(names, name).__doc__ for name in names.__all__)
    with pytest.raises(AttributeError, match="did you mean 'ModelQuantizer'"):
        names.ModelQuantiser  # noqa: B018
    code = (
        "import sys, quark_onnx.torch; print(*{'torch', 'transformers'} &"
        " set(sys.modules))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == ""
