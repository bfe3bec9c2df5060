"""The scripts in the documentation of AMD Quark, vLLM and transformers run with the name of the
package changed.
"""

from __future__ import annotations

import json
import logging
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors import safe_open
from safetensors.torch import load_file

ROOT = Path(__file__).parents[4]
#: As AMD Quark's examples have it, for Llama.
AUTOSMOOTHQUANT = {
    "name": "autosmoothquant",
    "model_decoder_layers": "model.layers",
    "scaling_layers": [
        {
            "prev_op": "input_layernorm",
            "layers": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            "inp": "self_attn.q_proj",
            "module2inspect": "self_attn",
        }
    ],
    "compute_scale_loss": "MSE",
}


def tensors(folder: str | Path) -> dict[str, tuple[str, list[int]]]:
    """Types and shapes of a checkpoint's tensors, as torch writes them."""
    with safe_open(str(Path(folder) / "model.safetensors"), framework="pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return {
        name: (str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        for name, tensor in found.items()
    }


def test_getting_started(hub: str, caplog: pytest.LogCaptureFixture) -> None:
    # 1. Set model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(hub)
    model.eval()
    tokenizer = AutoTokenizer.from_pretrained(hub)

    # 2. Set quantization configuration
    from quark_onnx.torch.quantization.config.config import (
        Config,
        QuantizationConfig,
        QuantizationSpec,
    )
    from quark_onnx.torch.quantization.config.type import (
        Dtype,
        QSchemeType,
        RoundType,
        ScaleType,
    )
    from quark_onnx.torch.quantization.observer.observer import PerTensorMinMaxObserver

    DEFAULT_INT8_PER_TENSOR_SYM_SPEC = QuantizationSpec(
        dtype=Dtype.int8,
        qscheme=QSchemeType.per_tensor,
        observer_cls=PerTensorMinMaxObserver,
        symmetric=True,
        scale_type=ScaleType.float,
        round_method=RoundType.half_even,
        is_dynamic=False,
    )

    DEFAULT_W_INT8_PER_TENSOR_CONFIG = QuantizationConfig(
        weight=DEFAULT_INT8_PER_TENSOR_SYM_SPEC
    )
    quant_config = Config(global_quant_config=DEFAULT_W_INT8_PER_TENSOR_CONFIG)

    # 3. Define calibration dataloader (still need this step for weight only and dynamic
    # quantization)
    from torch.utils.data import DataLoader

    text = "Hello, how are you?"
    tokenized_outputs = tokenizer(text, return_tensors="pt")
    calib_dataloader = DataLoader(tokenized_outputs["input_ids"])
    with torch.no_grad():
        expected = model(tokenized_outputs["input_ids"]).logits
    weight = model.model.layers[0].mlp.up_proj.weight.detach().double()

    # 4. In-place replacement with quantized modules in model
    from quark_onnx.torch import ModelQuantizer

    quantizer = ModelQuantizer(quant_config)
    with caplog.at_level(logging.INFO, "quark_onnx"):
        quant_model = quantizer.quantize_model(model, calib_dataloader)

    assert quant_model is model
    assert "quantization is done: 15 layers are quantized, 1 stays float" in caplog.text
    step = float(weight.abs().max() / 127.5)
    left = model.model.layers[0].mlp.up_proj.weight.double()
    # half a step, and what 8 bits leave of the scale and of the product
    assert (
        (left - weight).abs() <= step / 2 + weight.abs() / 128
    ).all() and not torch.equal(left, weight)
    with torch.no_grad():
        found = quant_model(tokenized_outputs["input_ids"]).logits
    assert 0 < float((found - expected).norm() / expected.norm()) < 0.1

    # 5. (Optional) Export onnx
    freezed_quantized_model = quantizer.freeze(quant_model)
    assert freezed_quantized_model is model
    from quark_onnx.torch import ModelExporter

    assert ModelExporter("export_path").export_dir == Path("export_path")


def vllm_script(hub: str, algorithm: bool) -> tuple[Any, Any, Any, Any, str]:
    """vLLM's page on AMD Quark, up to the export."""
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    MODEL_ID = hub
    MAX_SEQ_LEN = 8
    model = AutoModelForCausalLM.from_pretrained(MODEL_ID, dtype="auto")
    model.eval()
    tokenizer = AutoTokenizer.from_pretrained(MODEL_ID, model_max_length=MAX_SEQ_LEN)
    tokenizer.pad_token = tokenizer.eos_token

    text_data = [
        "hello, my name is",
        "the president of the united states is",
        "the capital of france is ?",
    ]
    tokenized_outputs = tokenizer(
        text_data,
        return_tensors="pt",
        padding=True,
        truncation=True,
        max_length=MAX_SEQ_LEN,
    )
    calib_dataloader = DataLoader(
        tokenized_outputs["input_ids"], batch_size=1, drop_last=True
    )

    from quark_onnx.torch.quantization import (
        Config,
        FP8E4M3PerTensorSpec,
        QuantizationConfig,
        load_quant_algo_config_from_file,
    )

    # Define fp8/per-tensor/static spec.
    FP8_PER_TENSOR_SPEC = FP8E4M3PerTensorSpec(
        observer_method="min_max",
        is_dynamic=False,
    ).to_quantization_spec()

    # Define global quantization config, input tensors and weight apply FP8_PER_TENSOR_SPEC.
    global_quant_config = QuantizationConfig(
        input_tensors=FP8_PER_TENSOR_SPEC,
        weight=FP8_PER_TENSOR_SPEC,
    )

    # Define quantization config for kv-cache layers, output tensors apply FP8_PER_TENSOR_SPEC.
    KV_CACHE_SPEC = FP8_PER_TENSOR_SPEC
    kv_cache_layer_names_for_llama = ["*k_proj", "*v_proj"]
    kv_cache_quant_config = {
        name: QuantizationConfig(
            input_tensors=global_quant_config.input_tensors,
            weight=global_quant_config.weight,
            output_tensors=KV_CACHE_SPEC,
        )
        for name in kv_cache_layer_names_for_llama
    }
    layer_quant_config = kv_cache_quant_config.copy()

    # Define algorithm config by config file.
    algo_config = None
    if algorithm:
        LLAMA_AUTOSMOOTHQUANT_CONFIG_FILE = "autosmoothquant_config.json"
        Path(LLAMA_AUTOSMOOTHQUANT_CONFIG_FILE).write_text(
            json.dumps(AUTOSMOOTHQUANT), encoding="utf-8"
        )
        algo_config = load_quant_algo_config_from_file(
            LLAMA_AUTOSMOOTHQUANT_CONFIG_FILE
        )

    EXCLUDE_LAYERS = ["lm_head"]
    quant_config = Config(
        global_quant_config=global_quant_config,
        layer_quant_config=layer_quant_config,
        kv_cache_quant_config=kv_cache_quant_config,
        exclude=EXCLUDE_LAYERS,
        algo_config=algo_config,
    )
    return model, tokenizer, calib_dataloader, quant_config, MODEL_ID


def vllm_export(
    model: Any, tokenizer: Any, calib_dataloader: Any, quant_config: Any, MODEL_ID: str
) -> str:
    """The export of that page; the folder it goes to."""
    from quark_onnx.torch import ModelExporter, ModelQuantizer
    from quark_onnx.torch.export import ExporterConfig, JsonExporterConfig

    # Apply quantization.
    quantizer = ModelQuantizer(quant_config)
    quantizer.quantize_model(model, calib_dataloader)

    # Freeze quantized model to export.
    freezed_model = quantizer.freeze(model)

    # Define export config.
    LLAMA_KV_CACHE_GROUP = ["*k_proj", "*v_proj"]
    export_config = ExporterConfig(json_export_config=JsonExporterConfig())
    export_config.json_export_config.kv_cache_group = LLAMA_KV_CACHE_GROUP

    EXPORT_DIR = (
        MODEL_ID.split("/")[1] + "-w-fp8-a-fp8-kvcache-fp8-pertensor-autosmoothquant"
    )
    exporter = ModelExporter(config=export_config, export_dir=EXPORT_DIR)
    with torch.no_grad():
        exporter.export_safetensors_model(
            freezed_model,
            quant_config=quant_config,
            tokenizer=tokenizer,
        )
    return EXPORT_DIR


def test_the_algorithm_of_the_script_is_read_and_done(hub: str) -> None:
    script = vllm_script(hub, algorithm=True)
    assert script[3].algo_config.scaling_layers == AUTOSMOOTHQUANT["scaling_layers"]
    folder = Path(vllm_export(*script))
    own = {
        key: tensor
        for file in folder.glob("*.safetensors")
        for key, tensor in load_file(file).items()
    }
    norms = [
        tensor.float()
        for key, tensor in own.items()
        if key.endswith("layernorm.weight")
    ]
    assert len(norms) == 4 and any(
        float(norm.std()) > 0 for norm in norms
    )  # they were all ones


def test_fp8_with_an_fp8_cache_for_vllm(hub: str) -> None:
    folder = Path(vllm_export(*vllm_script(hub, algorithm=False)))
    found = tensors(folder)
    layer = "model.layers.1."
    fp8, scale, float_ = "float8_e4m3fn", ("bfloat16", []), "bfloat16"
    expected = {
        "input_layernorm.weight": (float_, [64]),
        "post_attention_layernorm.weight": (float_, [64]),
        "self_attn.k_proj.output_scale": scale,
        "self_attn.v_proj.output_scale": scale,
    }
    for name, shape in {
        "self_attn.q_proj": [64, 64],
        "self_attn.k_proj": [32, 64],
        "self_attn.v_proj": [32, 64],
        "self_attn.o_proj": [64, 64],
        "mlp.gate_proj": [128, 64],
        "mlp.up_proj": [128, 64],
        "mlp.down_proj": [64, 128],
    }.items():
        expected |= {
            f"{name}.weight": (fp8, shape),
            f"{name}.weight_scale": scale,
            f"{name}.input_scale": scale,
        }
    assert {
        name.removeprefix(layer): each
        for name, each in found.items()
        if name.startswith(layer)
    } == expected
    assert {name for name in found if not name.startswith("model.layers.")} == {
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
    }
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))[
        "quantization_config"
    ]
    assert config["exclude"] == ["lm_head"] and config["export"]["kv_cache_group"] == [
        "*k_proj",
        "*v_proj",
    ]
    assert (
        list(config["layer_quant_config"])
        == list(config["kv_cache_quant_config"])
        == ["*k_proj", "*v_proj"]
    )
    assert (folder / "tokenizer.json").is_file() and (
        folder / "tokenizer_config.json"
    ).is_file()


def test_a_quantized_checkpoint_is_loaded_and_generates(hub: str) -> None:
    # transformers' page on Quark; its own loader needs amd-quark, this one does not
    from transformers import AutoTokenizer

    from quark_onnx.torch import import_model_from_safetensors

    script = vllm_script(hub, algorithm=False)
    model_id = vllm_export(*script)
    model = import_model_from_safetensors(None, model_id)
    assert "fp8e4m3" in str(model.model.layers[0].self_attn.q_proj)
    tokenizer = AutoTokenizer.from_pretrained(model_id)
    inp = tokenizer("the capital of france", return_tensors="pt")
    with torch.no_grad():
        assert torch.equal(
            model(inp["input_ids"]).logits, script[0](inp["input_ids"]).logits
        )
    res = model.generate(
        inp["input_ids"],
        attention_mask=inp["attention_mask"],
        min_new_tokens=5,
        max_new_tokens=5,
        pad_token_id=1,
    )
    assert res.shape == (1, 9) and isinstance(tokenizer.batch_decode(res)[0], str)


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["quantize_quark.py", *words])
    runpy.run_path(
        str(
            ROOT
            / "examples"
            / "torch"
            / "language_modeling"
            / "llm_ptq"
            / "quantize_quark.py"
        ),
        run_name="__main__",
    )


def test_the_command_for_mxfp4(hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"""--model_dir {hub}
    --quant_scheme w_mxfp4_a_mxfp4
    --output_dir llama-tiny-mxfp4
    --skip_evaluation
    --model_export hf_format
    --group_size 32"""
    command(monkeypatch, *line.split())
    found = tensors("llama-tiny-mxfp4")
    assert found["model.layers.0.mlp.up_proj.weight"] == ("uint8", [128, 32])
    assert found["model.layers.0.mlp.up_proj.weight_scale"] == ("uint8", [128, 2])
    with pytest.raises(
        SystemExit,
        match="group_size is 64, but the scheme w_mxfp4_a_mxfp4 has blocks of 32",
    ):
        command(monkeypatch, *line.replace("32", "64").split())


def test_the_command_for_awq(hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (
        f"--model_dir {hub} --output_dir output --quant_scheme w_uint4_per_group_asym"
        " --group_size 32".split()
    )
    command(monkeypatch, *words, "--custom_mode", "awq", "--model_export", "hf_format")
    found = tensors("output")
    assert found["model.layers.0.mlp.up_proj.qweight"] == ("int32", [64, 16])
    assert found["model.layers.0.mlp.up_proj.qzeros"] == ("int32", [2, 16])
    assert found["model.layers.0.mlp.up_proj.scales"] == ("float16", [2, 128])
    with pytest.raises(
        SystemExit, match=r"fp8e4m3.* has no place in a checkpoint of the layout 'awq'"
    ):
        command(
            monkeypatch,
            "--model_dir",
            hub,
            "--output_dir",
            "b",
            "--quant_scheme",
            "fp8",
            "--custom_mode",
            "awq",
        )


def test_the_command_for_fp8(
    hub: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("my.txt").write_text(
        "the capital of france is a name ? " * 40, encoding="utf-8"
    )
    line = f"""--model_dir {hub}
    --output_dir output
    --quant_scheme w_fp8_a_fp8
    --kv_cache_dtype fp8
    --quant_algo autosmoothquant
    --num_calib_data 4
    --model_export hf_format"""
    data = ["--dataset", "my.txt", "--seq_len", "16"]
    command(monkeypatch, *line.split(), *data)
    told = capsys.readouterr().out
    assert "14 layers are quantized" in told
    assert told.startswith("this takes about ")
    assert tensors("output")["model.layers.0.self_attn.k_proj.output_scale"] == (
        "bfloat16",
        [],
    )


def test_the_command_for_attention(hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("my.txt").write_text(
        "the capital of france is a name ? " * 40, encoding="utf-8"
    )
    line = f"""--model_dir {hub} --output_dir output --quant_scheme fp8 --kv_cache_dtype fp8 --attention_dtype fp8
    --num_calib_data 4 --dataset my.txt --seq_len 16"""  # noqa: E501
    command(monkeypatch, *line.split())
    for name in ("q_proj.output_scale", "prob_output_scale"):
        assert tensors("output")[f"model.layers.0.self_attn.{name}"] == ("bfloat16", [])


@pytest.mark.realdata
@pytest.mark.parametrize("spelling", ["before 0.11", "0.13"])
def test_the_export_is_described_as_amd_quark_describes_it(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelling: str
) -> None:
    base = golden / "_base" / "base_float32_False_256_512_False_2"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.bfloat16
    ).eval()
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    data = [torch.randint(0, 512, (1, 32)) for _ in range(2)]
    if spelling == "0.13":
        from quark_onnx.torch import LLMTemplate, ModelQuantizer, export_safetensors

        config = LLMTemplate.get("llama").get_config(
            scheme="fp8", kv_cache_scheme="fp8"
        )
        folder = "out"
        export_safetensors(ModelQuantizer(config).quantize_model(model, data), folder)
    else:
        model.save_pretrained("a/base")
        config = vllm_config()
        folder = vllm_export(model, None, data, config, "a/base")
    lines = (
        (golden / "fp8_kvfp8" / "tensors.tsv").read_text(encoding="utf-8").splitlines()
    )
    rows = [line.split("\t") for line in lines if not line.startswith("#")]
    assert tensors(folder) == {
        name: (dtype, json.loads(shape)) for name, dtype, shape in rows
    }
    theirs = json.loads(
        (golden / "fp8_kvfp8" / "config.json").read_text(encoding="utf-8")
    )
    ours = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    assert ours["quantization_config"] == theirs["quantization_config"]
    assert ours.keys() == theirs.keys()


def vllm_config() -> Any:
    """The configuration of vLLM's page."""
    from quark_onnx.torch.quantization import (
        Config,
        FP8E4M3PerTensorSpec,
        QuantizationConfig,
    )

    spec = FP8E4M3PerTensorSpec(
        observer_method="min_max", is_dynamic=False
    ).to_quantization_spec()
    cache = {
        name: QuantizationConfig(input_tensors=spec, weight=spec, output_tensors=spec)
        for name in ("*k_proj", "*v_proj")
    }
    return Config(
        global_quant_config=QuantizationConfig(input_tensors=spec, weight=spec),
        layer_quant_config=cache.copy(),
        kv_cache_quant_config=cache,
        exclude=["lm_head"],
    )
