"""Checkpoints as people have them: tied, of mixed types, with tensors too many or too few, damaged,
linked.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from quark_onnx.common.errors import ConfigError, DataError, ModelError
from quark_onnx.torch.calibration.text import read_windows
from quark_onnx.torch.checkpoints.export import write_checkpoint
from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.checkpoints.safetensors_writer import TYPES
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.pipelines.file_to_file import Writing, quantize_checkpoint
from quark_onnx.torch.pipelines.in_memory import quantize_model
from quark_onnx.torch.pipelines.ptq import config_for
from tests import torch_families
from tests.torch_models import llama, logits, made, saved, tokens

FP8, INT4 = (
    TorchConfig(scheme(name), exclude=("lm_head",)) for name in ("fp8", "int4_wo_32")
)
BYTES = LayerSpec(TensorSpec("int8", per_channel=True))
Tensors = dict[str, Any]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return saved(made(llama()), tmp_path / "model")


def altered(folder: Path, change: Callable[[Tensors], None]) -> Path:
    """The folder, whose tensors are changed."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def written(source: Path, config: TorchConfig, **settings: Any) -> Path:
    output = source.parent / "out"
    quantize_checkpoint(
        source, tokens(), config, output, writing=Writing(**settings), progress=False
    )
    return output


@pytest.mark.parametrize("family", ["llama3.2", "gemma2"])
@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("embedding", [True, False])
def test_what_is_tied_is_apart_once_one_side_is_quantized(
    family: str, head: bool, embedding: bool, tmp_path: Path
) -> None:
    model = made(torch_families.config_of(family))
    source = saved(model, tmp_path / "model")
    content = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if family == "gemma2":  # tied unless it says otherwise
        del content["tie_word_embeddings"]
        (source / "config.json").write_text(json.dumps(content), encoding="utf-8")
    config = TorchConfig(
        BYTES,
        types=(("Embedding", BYTES),) if embedding else (),
        exclude=() if head else ("lm_head",),
    )
    files = written(source, config)
    quantize_model(model, None, config, progress=False)
    write_checkpoint(model, config, tmp_path / "memory")
    wanted = logits(model, tokens()[0])
    for folder in (files, tmp_path / "memory"):
        assert torch.equal(logits(load_checkpoint(folder), tokens()[0]), wanted)
    own = head or embedding
    assert ("lm_head.weight" in load_file(files / "model.safetensors")) == own


def test_weights_of_mixed_types_are_run_as_the_model_has_them(tmp_path: Path) -> None:
    model = made(llama(), torch.bfloat16)

    def widen(tensors: Tensors) -> None:
        tensors |= {
            name: tensor.float()
            for name, tensor in tensors.items()
            if "norm" in name or "up_proj" in name
        }

    source = altered(saved(model, tmp_path / "model"), widen)
    output = written(source, FP8)
    quantize_model(model, tokens(), FP8, progress=False)
    assert torch.equal(
        logits(load_checkpoint(output), tokens()[0]), logits(model, tokens()[0])
    )
    before, after = (
        load_file(folder / "model.safetensors") for folder in (source, output)
    )
    norms = [name for name in before if "norm" in name]
    assert norms and all(after[name].dtype == torch.float32 for name in norms)
    assert all(torch.equal(before[name], after[name]) for name in norms)


def test_tensors_that_the_model_does_not_know_are_copied(source: Path) -> None:
    more = {str(dtype): torch.ones(3).to(dtype) for dtype in TYPES}
    output = written(altered(source, lambda tensors: tensors.update(more)), FP8)
    found = load_file(output / "model.safetensors")
    for name, tensor in more.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))


def test_what_has_no_type_in_the_format_leaves_nothing_behind(source: Path) -> None:
    def wide(tensors: Tensors) -> None:
        tensors["odd"] = torch.zeros(3, dtype=torch.uint8)

    altered(source, wide)
    kept = TYPES.pop(torch.uint8)
    try:
        with pytest.raises(
            ModelError,
            match=r"'odd' is torch.uint8, which safetensors files have no place for",
        ):
            written(source, FP8)
    finally:
        TYPES[torch.uint8] = kept
    assert [path.name for path in source.parent.iterdir()] == ["model"]


UP = "model.layers.1.mlp.up_proj.weight"


def _without(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.pop(name)


def _holding(number: float) -> Callable[[Tensors], None]:
    return lambda tensors: tensors[UP][3].fill_(number)


def _as(dtype: Any) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({UP: tensors[UP].to(dtype)})


@pytest.mark.parametrize("config", [FP8, INT4])
@pytest.mark.parametrize(
    ("change", "word"),
    [
        (_without(UP), f"no tensor for {UP}"),
        (
            _holding(float("nan")),
            "the weight 'model.layers.1.mlp.up_proj' holds numbers",
        ),
        (
            _holding(float("inf")),
            "the weight 'model.layers.1.mlp.up_proj' holds numbers",
        ),
        (_as(torch.int32), "is torch.int32; start from a checkpoint of float weights"),
        (
            _as(torch.float8_e4m3fn),
            "is torch.float8_e4m3fn; start from a checkpoint of float weights",
        ),
        (
            lambda tensors: tensors.update({UP: tensors[UP][:5].clone()}),
            r"is \[5, 64\], and \[96, 64\] in the model",
        ),
    ],
)
def test_a_bad_weight_is_named(
    config: TorchConfig, change: Any, word: str, source: Path
) -> None:
    with pytest.raises(ModelError, match=word):
        written(altered(source, change), config)
    assert [path.name for path in source.parent.iterdir()] == ["model"]


def test_what_is_missing_beside_layers_is_said(source: Path) -> None:
    with pytest.raises(ModelError, match=r"no tensor for model\.embed_tokens\.weight"):
        written(altered(source, _without("model.embed_tokens.weight")), FP8)
    with pytest.raises(ModelError, match=r"no tensor for model\.embed_tokens\.weight"):
        written(source, INT4)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[1]", ": the document is an array, and must be an object"),
        ('{"weight_map": []}', " has no weight_map of tensors to files"),
        ('{"weight_map": {}}', " has no weight_map of tensors to files"),
        ('{"weight_map": {"a": 3}}', " has no weight_map of tensors to files"),
        (
            '{"weight_map": {"a": "../model.safetensors"}}',
            " lists '../model.safetensors', which is no name of a file",
        ),
        ("{", " is no JSON: line 1, column 2"),
    ],
)
def test_a_damaged_index_is_named(text: str, word: str, source: Path) -> None:
    (source / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    with pytest.raises(ModelError, match=rf"model.safetensors.index.json{word}"):
        written(source, FP8)


def test_links_are_followed_and_weights_of_other_frameworks_left_out(
    source: Path, tmp_path: Path
) -> None:
    """As the hub's cache has them: each file of a snapshot is a link to a blob."""
    linked = tmp_path / "models--org--name" / "snapshots" / "0123"
    blobs = linked.parent.parent / "blobs"
    (linked / "original").mkdir(parents=True)
    source.rename(blobs)
    for file in blobs.iterdir():
        (linked / file.name).symlink_to(file)
    for name in (
        "tf_model.h5",
        "flax_model.msgpack",
        "original/consolidated.00.pth",
        "original/params.json",
        "a.py",
    ):
        (linked / name).write_text(name, encoding="utf-8")
    (linked / "tokenizer.json").symlink_to("../../blobs/nowhere")
    with pytest.raises(
        ModelError, match=r"tokenizer.json is a link to .*nowhere, which is not there"
    ):
        written(linked, FP8)
    (blobs / "nowhere").write_bytes(b"{\r\n}")
    output = written(linked, FP8)
    found = {
        str(path.relative_to(output)).replace("\\", "/") for path in output.rglob("*")
    }
    assert found - {file.name for file in blobs.iterdir()} == {
        "tokenizer.json",
        "original",
        "original/params.json",
        "a.py",
    }
    assert not any(path.is_symlink() for path in output.iterdir())
    assert (output / "tokenizer.json").read_bytes() == b"{\r\n}"


@pytest.mark.parametrize(
    "name", ["int3_wo_32", "uint3_wo_32", "uint2_wo_32", "mxfp6_e2m3"]
)
def test_codes_that_fill_no_whole_bytes_are_refused_before_the_work(
    name: str, tmp_path: Path
) -> None:
    size = 36 if name != "mxfp6_e2m3" else 38
    settings = {
        "hidden_size": size,
        "intermediate_size": 50,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    }
    model = made(llama(**settings))
    config = TorchConfig(
        scheme(name), layers=(("*o_proj", LayerSpec()),), exclude=("lm_head",)
    )
    with pytest.raises(
        ConfigError, match=r"model.layers.0..* codes of .* do not fill whole bytes"
    ):
        quantize_checkpoint(
            saved(model, tmp_path / "model"),
            _never(),
            config,
            tmp_path / "out",
            progress=False,
        )
    quantize_model(model, None, config, progress=False)
    with pytest.raises(
        ConfigError, match=r"model.layers.0..* codes of .* do not fill whole bytes"
    ):
        write_checkpoint(model, config, tmp_path / "out")


def _never() -> Any:
    raise AssertionError("the data is read")
    yield


@pytest.mark.parametrize(
    "name",
    ["int4_wo_32", "uint4_wo_per_channel", "mxfp4", "nvfp4", "fp8", "int8_per_channel"],
)
def test_odd_sizes_come_back(name: str, tmp_path: Path) -> None:
    model = made(
        llama(
            hidden_size=36,
            intermediate_size=50,
            num_attention_heads=1,
            num_key_value_heads=1,
        )
    )
    config = TorchConfig(scheme(name), exclude=("lm_head",))
    output = written(saved(model, tmp_path / "model"), config)
    quantize_model(model, tokens(), config, progress=False)
    assert torch.equal(
        logits(load_checkpoint(output), tokens()[0]), logits(model, tokens()[0])
    )


def test_data_that_is_none(source: Path) -> None:
    for data in (5, torch.float32):
        with pytest.raises(DataError, match="the calibration data is a"):
            quantize_checkpoint(
                source, data, FP8, source.parent / "out", progress=False
            )  # type: ignore[arg-type]
        with pytest.raises(DataError, match="the calibration data is a"):
            quantize_model(
                nn.Sequential(nn.Linear(2, 2)),
                data,
                FP8.with_(exclude=()),
                progress=False,
            )  # type: ignore[arg-type]
    shutil.rmtree(source)


def test_settings_of_files_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="max_shard is 0 bytes"):
        Writing(max_shard=0)
    with pytest.raises(ConfigError, match="pack_method is 'ordered'"):
        Writing(pack_method="ordered")
    with pytest.raises(ConfigError, match="keys and values stay float"):
        config_for("int4_wo_32", least_kv_scale=1.0)


def test_lengths_of_rows_that_do_not_fit(tmp_path: Path) -> None:
    for lengths in (np.ones(2, np.int64), np.ones(3)):
        np.savez(tmp_path / "ids.npz", ids=np.ones((3, 20), np.int64), len=lengths)
        with pytest.raises(
            DataError, match=r"ids.npz has .* as len; .* each of the 3 rows"
        ):
            read_windows(tmp_path / "ids.npz", None, 8)
