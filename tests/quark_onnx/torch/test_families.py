"""Every family of language models: quantized in memory and file to file, written, read again, and
run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, MllamaForConditionalGeneration

from quark_onnx.torch.checkpoints.export import write_checkpoint
from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.checkpoints.safetensors_io import CheckpointReader
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.models.checkpoint_names import DiskNames
from quark_onnx.torch.pipelines.file_to_file import Writing, quantize_checkpoint
from quark_onnx.torch.pipelines.in_memory import quantize_model
from tests import torch_families
from tests.torch_models import data_folder, logits, made, saved, tokens

TRUSTED = Writing(trust_code=True)
#: The greatest relative error of logits: random models of two blocks exaggerate every rounding.
SCHEMES = {"fp8": 0.3, "int8": 0.2, "uint4_wo_32": 0.6, "mxfp4": 1.0}


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("family", torch_families.FAMILIES)
def test_a_family(family: str, name: str, tmp_path: Path) -> None:
    model = made(torch_families.config_of(family))
    source = saved(model, tmp_path / "source")
    before = logits(model, tokens()[0])
    config = TorchConfig(scheme(name), exclude=(torch_families.head_of(family),))
    report = quantize_model(model, tokens(), config, progress=False)
    # DBRX has all experts in matrices of two axes, which are not taken apart
    stacked = [
        note for note in report.notes if "is no stack of experts that is known" in note
    ]
    assert (
        report.quantized
        and report.notes == stacked
        and bool(stacked) == (family == "dbrx")
    )
    after = logits(model, tokens()[0])
    error = float((after - before).norm() / before.norm())
    assert 1e-4 < error < SCHEMES[name]
    write_checkpoint(model, config, tmp_path / "memory")
    quantize_checkpoint(
        source, tokens(), config, tmp_path / "files", writing=TRUSTED, progress=False
    )
    for folder in ("memory", "files"):
        loaded = load_checkpoint(tmp_path / folder, trust_code=True)
        found = logits(loaded, tokens()[0])
        assert torch.equal(found, after)
    written = [CheckpointReader(tmp_path / folder) for folder in ("memory", "files")]
    assert set(written[0]) == set(written[1])
    assert all(
        torch.equal(written[0].get(key), written[1].get(key)) for key in written[0]
    )
    generated = loaded.generate(
        tokens()[0], max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0
    )
    assert generated.shape == (1, 15)
    listed = [
        json.loads((tmp_path / f / "config.json").read_text("utf-8"))
        for f in ("memory", "files")
    ]
    assert listed[0]["quantization_config"] == listed[1]["quantization_config"]


def test_images_are_left_alone_and_blocks_that_text_skips_have_weights_alone(
    tmp_path: Path,
) -> None:
    text = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "cross_attention_layers": [1],
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "max_position_embeddings": 64,
    }
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_global_layers": 1,
        "attention_heads": 2,
        "intermediate_size": 48,
        "vision_output_dim": 64,
        "image_size": 28,
        "patch_size": 14,
        "intermediate_layers_indices": [0],
        "max_num_tiles": 1,
        "supported_aspect_ratios": [[1, 1]],
    }
    settings = AutoConfig.for_model(
        "mllama", text_config=text, vision_config=vision, image_token_index=95
    )
    torch.manual_seed(0)
    model = MllamaForConditionalGeneration(settings).eval()
    source = saved(model, tmp_path / "source")
    config = TorchConfig(
        scheme("fp8"), exclude=("lm_head", "*vision_model*", "*multi_modal_projector*")
    )
    batches = [batch.clamp(3, 90) for batch in tokens()]
    report = quantize_checkpoint(
        source, batches, config, tmp_path / "out", progress=False
    )
    assert not any("vision" in name for name in report.quantized)
    skipped = [
        note
        for note in report.notes
        if "layers.1." in note and "was not run on the data" in note
    ]
    assert skipped == report.notes and skipped
    loaded = load_checkpoint(tmp_path / "out")
    before, after = logits(model, batches[0]), logits(loaded, batches[0])
    assert float((after - before).norm() / before.norm()) < 0.3


@pytest.mark.parametrize(
    "family",
    [name for name in torch_families.FAMILIES if name not in ("gpt_oss", "llama4")],
)
def test_names_in_files_are_those_that_transformers_writes(
    family: str, tmp_path: Path
) -> None:
    """All but those of gpt-oss and Llama 4, which have no experts of their own in files."""
    source = saved(made(torch_families.config_of(family)), tmp_path / "source")
    model = FloatCheckpoint(source, trust_code=True).model
    names = DiskNames(model)
    assert {names(name) for name, _ in model.named_parameters()} == set(
        CheckpointReader(source)
    )


@pytest.mark.realdata
@pytest.mark.parametrize(
    "name", ["family_qwen3_moe_fp8", "family_mixtral_uint4_wo_128"]
)
def test_mixtures_have_the_layout_of_amd_quark(name: str, tmp_path: Path) -> None:
    folder = data_folder() / "golden" / "quark_exports" / name
    expected = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    quantized: dict[str, Any] = expected.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(expected), encoding="utf-8")
    model = made(AutoConfig.from_pretrained(tmp_path), dtype=torch.bfloat16)
    scheme_name = (
        name.removeprefix("family_").removeprefix("qwen3_moe_").removeprefix("mixtral_")
    )
    config = TorchConfig(scheme(scheme_name), exclude=("lm_head",))
    quantize_model(model, tokens(40), config, progress=False)
    write_checkpoint(model, config, tmp_path / "out")
    reader = CheckpointReader(tmp_path / "out")
    found = {
        f"{key}\t{str(reader.get(key).dtype)[6:]}\t{list(reader.shape(key))}"
        for key in reader
    }
    lines = (folder / "tensors.tsv").read_text(encoding="utf-8").splitlines()
    lines = [line for line in lines if not line.startswith("#")]
    if name.startswith("family_mixtral"):
        # AMD Quark writes the names that transformers has in memory, by which vLLM finds nothing
        for old, new in {
            ".mlp.": ".block_sparse_moe.",
            "gate_proj": "w1",
            "up_proj": "w3",
            "down_proj": "w2",
        }.items():
            lines = [line.replace(old, new) for line in lines]
    assert found == set(lines)
    written = json.loads(
        (tmp_path / "out" / "config.json").read_text(encoding="utf-8")
    )["quantization_config"]
    if scheme_name == "fp8":
        assert written["exclude"] == quantized["exclude"]
    del quantized["algo_config"], quantized["exclude"]
    assert {key: written[key] for key in quantized} == quantized
