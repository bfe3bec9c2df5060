"""Checkpoints of AMD Quark's layout in transformers without amd-quark: logits equal those of
``load_checkpoint``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.quantizers import auto

import quark_onnx.torch.transformers as loading
from quark_onnx.common.errors import ModelError
from quark_onnx.torch.checkpoints.layouts.quark import QuarkLayout
from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.config.schemes import SCHEMES, scheme
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.models.experts import UNFUSED
from quark_onnx.torch.models.quantized_layer import QuantizedLayer
from quark_onnx.torch.pipelines.file_to_file import Writing, quantize_checkpoint
from quark_onnx.torch.pipelines.ptq import config_for
from tests import torch_families
from tests.torch_models import data_folder, llama, logits, made, saved, tokens

ROOT = Path(__file__).parents[3]
#: What a checkpoint has codes for.
WRITTEN = [name for name, spec in SCHEMES.items() if not QuarkLayout().refusal(spec)]
#: Formats of the KV cache and of attention, by what a user asks for.
ROUNDED = {
    "kv": {"kv_cache": "fp8"},
    "kv after rotation": {"kv_cache": "fp8-rope"},
    "attention": {"kv_cache": "fp8", "attention": "fp8"},
}

#: Families whose experts are stacked in transformers.
MIXTURES = ("qwen2_moe", "mixtral", "deepseek_v2", "gpt_oss", "llama4")

loading.unregister()  # other tests ask what transformers does by itself


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    loading.register(replace=True)
    yield
    loading.unregister()


def quantized(folder: Path, config: TorchConfig, model: Any, **settings: Any) -> Path:
    """The folder of a model that has been quantized from files to files."""
    source = saved(model, folder / "float")
    writing = Writing(trust_code=True, **settings)
    quantize_checkpoint(
        source, tokens(), config, folder / "out", writing=writing, progress=False
    )
    return folder / "out"


class Written:
    """Checkpoints that several tests read, each of which is quantized once."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._folders = dict[tuple[str, str], Path]()
        self._logits = dict[Path, torch.Tensor]()

    def scheme(self, name: str, dtype: str) -> Path:
        if (name, dtype) not in self._folders:
            settings = llama(hidden_size=128, intermediate_size=256)
            model = made(settings, getattr(torch, dtype))
            folder = quantized(self._factory.mktemp("w"), config_for(name), model)
            self._folders[name, dtype] = folder
        return self._folders[name, dtype]

    def family(self, name: str) -> Path:
        if (name, "family") not in self._folders:
            config = TorchConfig(
                scheme("uint4_wo_32"), exclude=(torch_families.head_of(name),)
            )
            model = made(torch_families.config_of(name))
            folder = quantized(self._factory.mktemp("w"), config, model)
            self._folders[name, "family"] = folder
        return self._folders[name, "family"]

    def logits(self, folder: Path) -> torch.Tensor:
        """The logits of a checkpoint as this package loads it, which are computed once."""
        if folder not in self._logits:
            model = load_checkpoint(folder)
            self._logits[folder] = logits(model, tokens()[0])
        return self._logits[folder]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory)


def loaded(folder: Path, cls: str = "AutoModelForCausalLM", **settings: Any) -> Any:
    """The model as transformers loads it; it must report nothing."""
    auto_class = getattr(transformers, cls)
    model, info = auto_class.from_pretrained(
        folder, output_loading_info=True, **settings
    )
    found = {
        key: info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")
    }
    assert not any(found.values()), found
    return model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_scheme(name: str, dtype: str, written: Written) -> None:
    folder = written.scheme(name, dtype)
    found = loaded(folder)
    assert torch.equal(logits(found, tokens()[0]), written.logits(folder))
    assert sum(isinstance(module, QuantizedLayer) for module in found.modules()) == 14


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="loading onto a GPU needs a GPU"
)
@pytest.mark.parametrize("name", WRITTEN)
def test_a_scheme_on_a_gpu(name: str, written: Written) -> None:
    """Sums are taken in another order there, so that the last bits may differ."""
    folder = written.scheme(name, "float32")
    expected = logits(load_checkpoint(folder), tokens()[0])
    found = loaded(folder, device_map="cuda:0")
    assert {tensor.device.type for tensor in found.parameters()} == {"cuda"}
    actual = logits(found, tokens()[0].to("cuda:0")).cpu()
    scale = expected.abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0.01 * scale)


@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_attention(name: str, tmp_path: Path) -> None:
    folder = quantized(tmp_path, config_for("fp8", **ROUNDED[name]), made(llama()))
    expected = logits(load_checkpoint(folder), tokens()[0])
    assert torch.equal(logits(loaded(folder), tokens()[0]), expected)
    plain = quantized(tmp_path / "plain", config_for("fp8"), made(llama()))
    assert not torch.equal(logits(load_checkpoint(plain), tokens()[0]), expected)


@pytest.mark.parametrize("family", torch_families.FAMILIES)
def test_a_family(family: str, written: Written) -> None:
    folder = written.family(family)
    expected = logits(load_checkpoint(folder, trust_code=True), tokens()[0])
    assert torch.equal(
        logits(loaded(folder, trust_remote_code=True), tokens()[0]), expected
    )


@pytest.mark.parametrize("name", ["JambaForCausalLM", "FalconMambaForCausalLM"])
def test_a_forward_that_reads_the_mark_of_quantized_models(
    name: str, tmp_path: Path
) -> None:
    """Both loaders mark a model as quantized, with which some forwards compute otherwise."""
    folder = quantized(tmp_path, config_for("mxfp4"), torch_families.task_model(name))
    assert torch.equal(
        logits(loaded(folder), tokens()[0]),
        logits(load_checkpoint(folder), tokens()[0]),
    )


def test_experts_that_stay_float(tmp_path: Path) -> None:
    """Files of Mixtral have other names for them than the model."""
    config = TorchConfig(scheme("int8"), exclude=("lm_head", "*experts*"))
    folder = quantized(tmp_path, config, made(torch_families.config_of("mixtral")))
    assert torch.equal(
        logits(loaded(folder), tokens()[0]),
        logits(load_checkpoint(folder), tokens()[0]),
    )


@pytest.mark.parametrize("family", ["gemma3_text", "llama"])
def test_a_quantized_embedding_and_head(family: str, tmp_path: Path) -> None:
    """Gemma multiplies what it looks up by a buffer that no file has."""
    weight = LayerSpec(TensorSpec("int8", per_channel=True))
    config = TorchConfig(weight, types=(("Embedding", weight),), exclude=())
    settings = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "head_dim": 16,
    }
    made_of = transformers.AutoConfig.for_model(
        family, **settings, num_attention_heads=4, num_key_value_heads=2
    )
    folder = quantized(tmp_path, config, made(made_of))
    model = loaded(folder)
    assert isinstance(model.model.embed_tokens, QuantizedLayer) and isinstance(
        model.lm_head, QuantizedLayer
    )
    assert torch.equal(
        logits(model, tokens()[0]), logits(load_checkpoint(folder), tokens()[0])
    )


def test_a_layer_of_its_own_in_the_model_without_a_head(tmp_path: Path) -> None:
    """Its layers have shorter names than those of the file."""
    config = config_for(
        "uint4_wo_32", layers=(("model.layers.1.mlp.down_proj", "int4_wo_32"),)
    )
    folder = quantized(tmp_path, config, made(llama()))
    whole = load_checkpoint(folder)
    # transformers reports the head, which the class has not
    model = transformers.AutoModel.from_pretrained(folder)
    assert model.layers[1].mlp.down_proj.spec == scheme("int4_wo_32")
    with torch.no_grad():
        assert torch.equal(
            model(tokens()[0]).last_hidden_state,
            whole.model(tokens()[0]).last_hidden_state,
        )


@pytest.mark.parametrize("name", ["auto", "cpu", "offloaded"])
def test_devices(name: str, tmp_path: Path) -> None:
    """One block is on the disk, and is fetched for each run.

    Codes stay on the device that computes.
    """
    pytest.importorskip("accelerate")
    folder = quantized(tmp_path, config_for("uint4_wo_32"), made(llama()))
    places: Any = name
    if name == "offloaded":
        names = (
            "model.embed_tokens",
            "model.layers.0",
            "model.norm",
            "model.rotary_emb",
            "lm_head",
        )
        places = dict.fromkeys(names, "cpu") | {"model.layers.1": "disk"}
    model = loaded(folder, device_map=places, offload_folder=tmp_path / "disk")
    assert torch.equal(
        logits(model, tokens()[0]), logits(load_checkpoint(folder), tokens()[0])
    )
    if name == "offloaded":
        with pytest.raises(ModelError, match="is offloaded; load the model without"):
            model.save_pretrained(tmp_path / "again")
    else:
        model.save_pretrained(tmp_path / "again")
        assert tensors(folder).keys() == tensors(tmp_path / "again").keys()
    found = model.dequantize()
    assert logits(found, tokens()[0]).isfinite().all()


def test_another_type_and_attention(tmp_path: Path) -> None:
    folder = quantized(
        tmp_path, config_for("fp8", kv_cache="fp8-rope"), made(llama(), torch.bfloat16)
    )
    model = loaded(folder, dtype=torch.float32)
    assert model.dtype is torch.float32
    expected = load_checkpoint(folder, dtype=torch.float32)
    assert torch.equal(logits(model, tokens()[0]), logits(expected, tokens()[0]))
    eager = loaded(folder, attn_implementation="eager")
    assert logits(eager, tokens()[0]).isfinite().all()
    ids = model.generate(
        tokens()[0], max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0
    )
    assert torch.equal(
        ids,
        expected.generate(
            tokens()[0],
            max_new_tokens=3,
            min_new_tokens=3,
            do_sample=False,
            pad_token_id=0,
        ),
    )


def test_several_files(tmp_path: Path) -> None:
    folder = quantized(tmp_path, config_for("int8"), made(llama()), max_shard=40_000)
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert torch.equal(
        logits(loaded(folder), tokens()[0]),
        logits(load_checkpoint(folder), tokens()[0]),
    )


def test_the_configuration_is_kept(tmp_path: Path) -> None:
    folder = quantized(tmp_path, config_for("mxfp4"), made(llama()))
    model = loaded(folder)
    content = json.loads((folder / "config.json").read_text("utf-8"))[
        "quantization_config"
    ]
    assert model.config.quantization_config.to_dict() == content
    assert (
        json.loads(model.config.to_json_string(use_diff=False))["quantization_config"]
        == content
    )


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_was_loaded_is_saved_as_it_was(
    name: str, written: Written, tmp_path: Path
) -> None:
    folder = written.scheme(name, "bfloat16")
    loaded(folder).save_pretrained(tmp_path / "again", max_shard_size="40KB")
    before, after = tensors(folder), tensors(tmp_path / "again")
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert value.dtype == after[key].dtype
        pair = [each.reshape(-1).view(torch.uint8) for each in (value, after[key])]
        assert torch.equal(*pair), key
    found = logits(loaded(tmp_path / "again"), tokens()[0])
    assert torch.equal(found, written.logits(folder))


@pytest.mark.parametrize("family", torch_families.FAMILIES)
def test_a_family_is_saved_as_it_was(
    family: str, written: Written, tmp_path: Path
) -> None:
    """Under the names of files, whatever transformers calls the tensors."""
    folder = written.family(family)
    loaded(folder, trust_remote_code=True).save_pretrained(tmp_path / "again")
    before, after = tensors(folder), tensors(tmp_path / "again")
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[key]) for key, value in before.items())


@pytest.mark.parametrize("name", ["uint4_wo_32", "fp8", "mxfp4", "nvfp4"])
def test_a_dequantized_model_is_a_float_one(name: str, tmp_path: Path) -> None:
    """Weights are those that the codes stand for; nothing is rounded as it runs."""
    settings = ROUNDED["attention"] if name == "fp8" else {}
    folder = quantized(tmp_path, config_for(name, **settings), made(llama()))
    expected = made(llama())
    for place, layer in loaded(folder).named_modules():
        if isinstance(layer, QuantizedLayer):
            with torch.no_grad():
                expected.get_submodule(place).weight.copy_(layer.weight)
    model = loaded(folder)
    found = model.dequantize()
    assert not any(isinstance(each, QuantizedLayer) for each in found.modules())
    assert {type(each) for each in found.modules()} == {
        type(each) for each in expected.modules()
    }
    # attention whose probabilities were rounded stays eager
    wanted = logits(expected, tokens()[0])
    torch.testing.assert_close(logits(found, tokens()[0]), wanted, rtol=1e-5, atol=1e-5)
    found.save_pretrained(tmp_path / "plain")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert not hasattr(again.config, "quantization_config")
    assert torch.equal(logits(again, tokens()[0]), wanted)


def test_a_dequantized_model_in_another_type(tmp_path: Path) -> None:
    folder = quantized(tmp_path, config_for("int8"), made(llama(), torch.bfloat16))
    model = loaded(folder).dequantize(dtype=torch.float32)
    assert {each.dtype for each in model.parameters()} == {torch.float32}
    assert logits(model, tokens()[0]).isfinite().all()


def test_layers_of_other_kinds_are_dequantized(tmp_path: Path) -> None:
    """GPT-2's Conv1D has inputs first, Gemma multiplies what it looks up."""
    weight = LayerSpec(TensorSpec("int8", per_channel=True))
    config = TorchConfig(weight, types=(("Embedding", weight),), exclude=())
    for family in ("gpt2", "gemma3"):
        source = made(torch_families.config_of(family))
        folder = quantized(tmp_path / family, config, source)
        model = loaded(folder)
        expected = logits(model, tokens()[0])  # weights alone are quantized
        found = logits(model.dequantize(), tokens()[0])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_are_dequantized_into_their_stacks(
    family: str, written: Written, tmp_path: Path
) -> None:
    """The oracle is the model with weights alone rounded, before and after saving."""
    source = made(torch_families.config_of(family))
    folder = written.family(family)
    model = loaded(folder, trust_remote_code=True)
    expected = logits(model, tokens()[0])
    found = model.dequantize()
    assert not any(
        isinstance(each, (QuantizedLayer, *UNFUSED)) for each in found.modules()
    )
    assert {name: each.shape for name, each in found.named_parameters()} == {
        name: each.shape for name, each in source.named_parameters()
    }
    torch.testing.assert_close(
        logits(found, tokens()[0]), expected, rtol=1e-4, atol=1e-4
    )
    found.save_pretrained(tmp_path / "plain")
    again = loaded(tmp_path / "plain", trust_remote_code=True)
    assert torch.equal(logits(again, tokens()[0]), logits(found, tokens()[0]))


def test_a_loaded_model_is_exported_by_amd_names(tmp_path: Path) -> None:
    from quark_onnx.torch import export_safetensors

    folder = quantized(tmp_path, config_for("fp8"), made(llama()))
    export_safetensors(loaded(folder), tmp_path / "again")
    assert torch.equal(
        logits(load_checkpoint(tmp_path / "again"), tokens()[0]),
        logits(load_checkpoint(folder), tokens()[0]),
    )


def test_a_missing_tensor_is_an_error(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = quantized(tmp_path, config_for("int8"), made(llama()))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.mlp.up_proj.input_scale"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(
        ModelError,
        match=r"the scale of the input of model.layers.0.mlp.up_proj .* cannot be read",
    ):
        loaded(folder)


def test_registration() -> None:
    """Where amd-quark is installed nothing is replaced, unless a script asks for it."""
    assert loading.is_registered() and loading.register()
    loading.unregister()
    assert auto.AUTO_QUANTIZER_MAPPING["quark"].__name__ == "QuarkHfQuantizer"
    assert auto.AUTO_QUANTIZATION_CONFIG_MAPPING["quark"].__name__ == "QuarkConfig"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "is_quark_available", lambda: True)
        assert not loading.register() and not loading.is_registered()
        assert loading.register(replace=True) and loading.is_registered()


def test_an_import_is_all_that_a_script_needs(tmp_path: Path) -> None:
    folder = quantized(tmp_path, config_for("nvfp4"), made(llama(), torch.bfloat16))
    torch.save(tokens()[0], tmp_path / "tokens.pt")
    script = """
import sys, torch
from transformers import AutoModelForCausalLM
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
import quark_onnx.torch
assert AUTO_QUANTIZER_MAPPING["quark"].__module__.startswith("transformers.")
import quark_onnx.torch.transformers
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
with torch.no_grad():
    torch.save(model(torch.load(sys.argv[2] + "/tokens.pt")).logits.float(), sys.argv[2] + "/logits.pt")
"""  # noqa: E501
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-c", script, str(folder), str(tmp_path)],
        check=True,
        env=environment,
    )
    assert torch.equal(
        torch.load(tmp_path / "logits.pt"), logits(load_checkpoint(folder), tokens()[0])
    )


@pytest.mark.realdata
@pytest.mark.parametrize("name", ["fp8", "int8", "uint4_wo_128"])
def test_exports_of_amd_quark(name: str) -> None:
    folder = data_folder() / "golden" / "quark_exports" / name
    batch = torch.arange(16)[None]
    found = logits(loaded(folder), batch)
    assert found.isfinite().all() and torch.equal(
        found, logits(load_checkpoint(folder), batch)
    )
