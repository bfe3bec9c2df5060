"""AMD Quark's script: its documented recipes run, and each of its arguments is obeyed, named in a
note, or refused.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from quark_onnx.common.errors import ConfigError
from quark_onnx.torch.calibration.perplexity import perplexity
from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.models.quantized_layer import QuantizedLayer
from quark_onnx.torch.quantize_quark import settings
from quark_onnx.torch.quantize_quark.arguments import ROWS, parse
from quark_onnx.torch.quantize_quark.run import main

WORDS = (
    "the capital of france is a name ? hello how are you the president of the united"
    " states is future ai "
)
#: AMD Quark's settings of SmoothQuant, as the files of its examples have them.
SMOOTH = {
    "name": "smooth",
    "alpha": 0.7,
    "scaling_layers": [],
    "model_decoder_layers": "model.layers",
}


@pytest.fixture
def script(
    hub: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Any:
    """A function that runs the script on the model, and returns what it prints.

    Data sets are local files.
    """
    sets = tmp_path / "sets"
    sets.mkdir()
    for name in ("pileval", "wikitext", "wikitext_test"):
        (sets / f"{name}.txt").write_text(WORDS * 20, encoding="utf-8")
    monkeypatch.setenv("QUARK_ONNX_DATASETS", str(sets))

    def run(line: str, model: str = hub) -> str:
        main(
            [
                *f"--model_dir {model} --seq_len 16 --num_calib_data 4".split(),
                *line.split(),
            ]
        )
        return capsys.readouterr().out

    return run


def values(printed: str) -> list[float]:
    """The numbers of the line of perplexity."""
    [line] = [line for line in printed.splitlines() if line.startswith("perplexity: ")]
    return [float(number) for number in re.findall(r"\d+\.\d+", line)]


def exact(folder: str | Path) -> float:
    """The perplexity of a checkpoint on the text in windows of 16 tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor(tokenizer(WORDS * 20, add_special_tokens=False)["input_ids"])
    return perplexity(
        load_checkpoint(folder), list(ids[: len(ids) // 16 * 16].reshape(-1, 16))
    )


def test_recipe_of_the_float_model(script: Callable[..., str], hub: str) -> None:
    [found] = values(script("--skip_quantization"))
    assert found == pytest.approx(exact(hub), abs=1e-4)


@pytest.mark.parametrize(
    "line",
    [
        "--quant_scheme fp8 --kv_cache_dtype fp8 --model_export hf_format",
        (
            "--quant_scheme fp8 --kv_cache_quant_scheme fp8 --attention_dtype fp8"
            " --model_export hf_format"
        ),
        (
            "--quant_scheme int4_wo_32 --quant_algo awq --dataset"
            " pileval_for_awq_benchmark --model_export hf_format"
        ),
        "--quant_scheme int8 --device cpu --model_export hf_format",
        "--quant_scheme mxfp4",
        "--quant_scheme mxfp6_e3m2",
        "--quant_scheme mxfp6_e2m3",
        "--quant_scheme mxfp4_fp8",
        "--quant_scheme ptpc_fp8 --model_export hf_format",
        (
            "--quant_scheme mxfp4 --exclude_layers *self_attn* *lm_head --quant_flow"
            " file2file"
        ),
        (
            "--quant_scheme mxfp4 --exclude_layers *self_attn* *lm_head"
            " --file2file_quantization"
        ),
        (
            "--quant_scheme nvfp4 --model_export hf_format --quant_flow per_block"
            " --gpu_resident_blocks 2"
        ),
        (
            "--quant_scheme fp8 --kv_cache_dtype fp8 --quant_algo autosmoothquant"
            " --model_export hf_format"
        ),
    ],
)
def test_recipes_that_write_a_checkpoint(
    line: str, script: Callable[..., str], hub: str
) -> None:
    printed = script(f"{line} --output_dir out")
    assert values(printed) == pytest.approx([exact(hub), exact("out")], abs=1e-4)
    assert set(re.findall(r"note: --(\w+) has no effect", printed)) <= {
        "gpu_resident_blocks"
    }
    assert printed.endswith("[QUARK-INFO]: Model quantization has been completed.\n")


@pytest.mark.parametrize("name", ["bfp16", "mx6", "mx9"])
def test_recipes_of_formats_that_are_evaluated_alone(
    name: str, script: Callable[..., str], hub: str
) -> None:
    printed = script(f"--quant_scheme {name} --output_dir out")
    before, after = values(printed)
    assert before == pytest.approx(exact(hub), abs=1e-4) and after != before
    assert (
        f"no checkpoint layout supports {name}: the model is evaluated, and not written"
        in printed
    )
    assert not Path("out").exists()


def test_recipe_of_gguf(script: Callable[..., str], hub: str) -> None:
    gguf = pytest.importorskip("gguf")
    for file in Path(hub).glob(
        "tokenizer*"
    ):  # it has words, which a GGUF file has no place for
        file.unlink()
    np.save("ids.npy", np.arange(64, dtype=np.int64).reshape(4, 16) % 22)
    line = (
        "--quant_scheme uint4_wo_32 --quant_algo awq --dataset ids.npy --model_export"
        " gguf --evaluation_dataset ids.npy"
    )
    before, after = values(script(f"{line} --output_dir out"))
    assert before != after and [path.name for path in Path("out").iterdir()] == [
        "model.gguf"
    ]
    found = {
        tensor.name: tensor.tensor_type.name
        for tensor in gguf.GGUFReader("out/model.gguf").tensors
    }
    assert found["blk.0.ffn_up.weight"] == "Q4_1"


def test_recipe_of_a_model_that_is_read_again(script: Callable[..., str]) -> None:
    written = script("--quant_scheme uint4_wo_32 --output_dir out")
    [found] = values(script("--import_model_dir out --model_reload"))
    assert found == pytest.approx(values(written)[1], abs=1e-4)
    with pytest.raises(ConfigError, match="--import_model_dir is missing"):
        script("--model_reload")
    with pytest.raises(
        ConfigError, match="a model that is read again is evaluated alone"
    ):
        script("--import_model_dir out --model_reload --model_export onnx")


def test_recipes_of_ryzen_ai(script: Callable[..., str]) -> None:
    line = (
        "--quant_scheme w_uint4_per_group_asym --model_export hf_format --data_type"
        " float16 --skip_evaluation"
    )
    script(
        f"{line} --group_size 32 --custom_mode awq --exclude_layers [] --output_dir out"
    )
    tensors = load_file("out/model.safetensors")
    assert tensors["lm_head.qweight"].shape == (64, 8) and tensors[
        "lm_head.scales"
    ].shape == (2, 64)
    assert {
        tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()
    } == {torch.float16}
    assert json.loads(Path("out/config.json").read_text("utf-8"))["dtype"] == "float16"
    line = f"{line} --exclude_layers --group_size 64 --group_size_per_layer lm_head 32"
    script(f"{line} --output_dir sizes")
    tensors = load_file("sizes/model.safetensors")
    assert tensors["lm_head.weight_scale"].shape == (2, 64)
    assert tensors["model.layers.0.mlp.up_proj.weight_scale"].shape == (1, 128)
    with pytest.raises(ConfigError, match="the layout 'awq' has one for all layers"):
        script(f"{line} --custom_mode awq --output_dir more")


def test_params_are_saved_and_loaded(script: Callable[..., str]) -> None:
    saved = script("--quant_scheme int4_wo_32 --params_save --save_dir params")
    assert not Path("exported_model").exists()
    files = "--json_path params/llama.json --safetensors_path params/llama.safetensors"
    [found] = values(script(f"--params_load {files}"))
    assert found == pytest.approx(values(saved)[1], abs=1e-4)


@pytest.mark.parametrize(
    "name", ["fp8", "int8", "uint4_wo_32", "mxfp4", "nvfp4", "amdfp4", "int4_fp8"]
)
def test_rounded_floats_compute_what_their_codes_do(
    name: str, script: Callable[..., str]
) -> None:
    batch = torch.arange(16)[None]
    script(f"--quant_scheme {name} --skip_evaluation --output_dir codes")
    script(
        f"--quant_scheme {name} --skip_evaluation --output_dir floats"
        " --export_weight_format fake_quantized"
    )
    models = [load_checkpoint(folder) for folder in ("codes", "floats")]
    assert torch.equal(models[0](batch).logits, models[1](batch).logits)
    layers = [model.model.layers[0].mlp.up_proj for model in models]
    assert torch.equal(layers[0].weight, layers[1].weight) and all(
        isinstance(each, QuantizedLayer) for each in layers
    )
    entry = json.loads(Path("floats/config.json").read_text("utf-8"))[
        "quantization_config"
    ]
    assert entry["export"]["weight_format"] == "fake_quantized"
    stored = load_file("floats/model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert stored.dtype == torch.bfloat16 and torch.equal(stored, layers[0].weight)


def test_settings_of_algorithms_come_from_files(
    script: Callable[..., str], hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("smooth.json").write_text(json.dumps(SMOOTH), encoding="utf-8")
    Path("gptq.json").write_text(
        json.dumps({"name": "gptq", "damp_percent": 0.05}), encoding="utf-8"
    )
    source = settings.FloatCheckpoint(hub)
    for line in (
        (
            "--quant_algo smoothquant,gptq --quant_algo_config_file smoothquant"
            " smooth.json --quant_algo_config_file gptq gptq.json"
        ),
        "--quant_algo smoothquant,gptq --quant_algo_config_file smooth.json gptq.json",
        (
            "--pre_quantization_optimization smoothquant"
            " --pre_optimization_config_file_path smooth.json --quant_algo gptq"
            " --quant_algo_config_file_path gptq.json"
        ),
    ):
        args = parse(f"--model_dir {hub} --quant_scheme int8 {line}".split())
        first, second = settings.torch_config(args, source).algorithms
        assert (type(first).__name__, first.alpha) == ("SmoothQuant", 0.7)
        assert (type(second).__name__, second.damping) == ("GPTQ", 0.05)
    with pytest.raises(
        ConfigError,
        match=r"smooth\.json is for 'smooth', which --quant_algo does not name",
    ):
        script(
            "--quant_scheme int8 --quant_algo gptq --quant_algo_config_file smoothquant"
            " smooth.json"
        )


def test_the_rule_for_shared_exponents(script: Callable[..., str], hub: str) -> None:
    args = parse(
        f"--model_dir {hub} --quant_scheme w_mxfp4_a_mxfp4 --scale_calculation_mode"
        " floor".split()
    )
    config = settings.torch_config(args, settings.FloatCheckpoint(hub))
    own = scheme("mxfp4").weight
    assert (
        own is not None
        and config.default.weight == config.default.input == own.with_(exponent="floor")
    )


def test_bare_exclude_layers_leaves_none_float(script: Callable[..., str]) -> None:
    script("--quant_scheme int8 --exclude_layers --skip_evaluation --output_dir out")
    assert isinstance(load_checkpoint("out").lm_head, QuantizedLayer)


def test_metrics_go_to_a_file(script: Callable[..., str]) -> None:
    printed = script(
        "--quant_scheme int8 --save_metrics_to_csv --metrics_output_dir metrics"
        " --output_dir out"
    )
    with Path("metrics/metrics.csv").open(encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["metric", "before", "after"] and rows[1][0] == "perplexity"
    assert [float(each) for each in rows[1][1:]] == pytest.approx(
        values(printed), abs=1e-4
    )


def test_a_text_that_is_not_there(
    script: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The usual text may be missing; one that is named may not."""
    monkeypatch.setenv("QUARK_ONNX_DATASETS", "nowhere")
    monkeypatch.setitem(sys.modules, "datasets", None)
    printed = script("--quant_scheme int4_wo_32 --output_dir out")
    assert (
        "no perplexity is computed: 'wikitext_test' is no file" in printed
        and "perplexity: " not in printed
    )
    with pytest.raises(
        Exception,
        match=(
            r"'mine' is no file.*put mine\.txt into the folder that QUARK_ONNX_DATASETS"
        ),
    ):
        script("--quant_scheme int4_wo_32 --output_dir other --evaluation_dataset mine")


def test_data_sets_are_files_of_a_folder(
    script: Callable[..., str], tmp_path: Path
) -> None:
    rows = np.arange(40, dtype=np.int64).reshape(2, 20) % 22
    np.save(tmp_path / "sets" / "ultrachat_200k.npy", rows)
    script(
        "--quant_scheme int8 --skip_evaluation --output_dir out --dataset"
        " HuggingFaceH4/ultrachat_200k"
    )
    model = load_checkpoint("out")
    assert isinstance(model.model.layers[0].mlp.up_proj.input.scale, torch.Tensor)
    Path("data.pkl").write_bytes(b"x")
    with pytest.raises(Exception, match=r"data\.pkl is a pickle, which may run code"):
        script("--quant_scheme int8 --output_dir more --dataset data.pkl")


def test_a_model_of_the_hub(
    script: Callable[..., str], hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked = list[Any]()

    def download(name: str, revision: str | None) -> str:
        asked.append((name, revision))
        return hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    script("--skip_quantization --skip_evaluation --revision v2", model="owner/model")
    assert asked == [("owner/model", "v2")]

    def offline(*_: object, **__: object) -> str:
        raise OSError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(
        ConfigError,
        match=r"owner/model is no folder, and not found on the Hub: offline",
    ):
        script("--skip_quantization", model="owner/model")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--kv_cache_dtype int8_per_token",
            "--kv_cache_dtype is 'int8_per_token'; checkpoints support 'fp8'",
        ),
        ("--attention_dtype mxfp4", "--attention_dtype is 'mxfp4'"),
        ("--use_tp", "--use_tp is not supported: serve the checkpoint with vLLM"),
        (
            "--use_mlperf_rouge",
            "--use_mlperf_rouge is not supported: score summaries with a task",
        ),
        ("--use_ppl_eval_for_kv_cache", "has its keys and values rounded"),
        (
            "--moe_experts_second_step_config w_int4_per_channel_sym",
            "'\\*experts\\*' int4_fp8",
        ),
        (
            "--evaluation_dataset wikitext_gpt_oss_20b",
            "puts the prompt of gpt-oss around wikitext",
        ),
        (
            "--group_size_per_layer lm_head 64",
            "the scheme fp8 has no groups whose size is open",
        ),
        ("--model_export pdf", "unknown export 'pdf'"),
    ],
)
def test_what_is_refused_says_what_to_do(
    line: str, message: str, script: Callable[..., str]
) -> None:
    with pytest.raises(ConfigError, match=message):
        script(f"--quant_scheme fp8 --output_dir out {line}")
    assert not Path("out").exists()


def test_a_scheme_must_be_named(script: Callable[..., str]) -> None:
    with pytest.raises(
        ConfigError, match="--quant_scheme is missing; it must be one of: fp8, "
    ):
        script("--output_dir out")
    with pytest.raises(ConfigError, match="--model_dir is missing"):
        main(["--quant_scheme", "fp8"])


def test_what_has_no_effect_is_named(script: Callable[..., str]) -> None:
    line = (
        "--device cuda --multi_gpu --multi_device --batch_size 8 --torch_compile"
        " --enable_native_inference --native_linear_mode fp8_per_tensor"
        " --model_attn_implementation flash_attention_2 --scale_format float32"
        " --no_keep_prequantized_layers --no_trust_remote_code --model_export"
        " quark_format"
    )
    printed = script(
        f"--quant_scheme int4_wo_32 --skip_evaluation --output_dir out {line}"
    )
    named = re.findall(r"note: --(\w+) has no effect", printed)
    if not torch.cuda.is_available():
        assert "--device cuda: torch finds no GPU; the CPU is used" in printed
    assert set(named) == {
        "multi_gpu",
        "multi_device",
        "batch_size",
        "torch_compile",
        "enable_native_inference",
        "native_linear_mode",
        "model_attn_implementation",
        "scale_format",
        "no_keep_prequantized_layers",
    }
    assert "a checkpoint is written as hf_format" in printed


#: The arguments of AMD's script, 0.8 to 0.13.
DOCUMENTED = """
model_dir revision device multi_gpu multi_device model_attn_implementation dataset data_type seq_len batch_size
num_calib_data skip_quantization quant_flow gpu_resident_blocks file2file_quantization quant_scheme layer_quant_scheme
kv_cache_dtype kv_cache_quant_scheme min_kv_scale kv_cache_post_rope attention_dtype quant_algo quant_algo_config_file
exclude_layers enable_native_inference native_linear_mode model_reload import_model_dir params_load json_path
safetensors_path model_export custom_mode torch_compile pack_method output_dir export_weight_format
no_keep_prequantized_layers params_save save_dir skip_evaluation evaluation_dataset tasks num_fewshot
apply_chat_template eval_batch_size max_eval_batch_size num_eval_data use_ppl_eval_model use_ppl_eval_for_kv_cache
ppl_eval_for_kv_cache_context_size ppl_eval_for_kv_cache_sample_size ppl_eval_for_kv_cache_patch_size
save_metrics_to_csv metrics_output_dir use_mlperf_rouge eval_data_dir use_tp trust_remote_code no_trust_remote_code
group_size group_size_per_layer pre_quantization_optimization pre_optimization_config_file_path
quant_algo_config_file_path fp8_attention_quant scale_format scale_calculation_mode moe_experts_second_step_config
import_file_format weight_matrix_merge
"""  # noqa: E501


def test_every_documented_argument_is_in_the_table() -> None:
    known = {name.removeprefix("--") for row in ROWS for name in row.names.split()}
    assert known == set(DOCUMENTED.split())
