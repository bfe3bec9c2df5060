"""A float checkpoint in another element type: what ``to`` makes of each tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quark_onnx.common.errors import ConfigError
from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.checkpoints.recast import recast
from tests.torch_models import llama, logits, made, saved, tokens


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_checkpoint_in_another_type(dtype: str, tmp_path: Path) -> None:
    source = saved(made(llama()), tmp_path / "float32")
    (source / "tokenizer.json").write_text("{}", encoding="utf-8")
    output = recast(source, tmp_path / "out", dtype)
    before, after = (
        load_file(source / "model.safetensors"),
        load_file(output / "model.safetensors"),
    )
    assert before.keys() == after.keys()
    assert all(
        torch.equal(after[name], tensor.to(getattr(torch, dtype)))
        for name, tensor in before.items()
    )
    assert json.loads((output / "config.json").read_text("utf-8"))["dtype"] == dtype
    assert (output / "tokenizer.json").is_file()
    expected = load_checkpoint(source, dtype=getattr(torch, dtype))
    assert torch.equal(
        logits(load_checkpoint(output), tokens()[0]), logits(expected, tokens()[0])
    )


def test_a_checkpoint_of_the_type_is_left_alone(tmp_path: Path) -> None:
    source = saved(made(llama(), torch.bfloat16), tmp_path / "model")
    assert (
        recast(source, tmp_path / "out", "bfloat16") == source
        and not (tmp_path / "out").exists()
    )


def test_integers_keep_their_type_and_floats_must_have_a_value(tmp_path: Path) -> None:
    source = saved(made(llama()), tmp_path / "model")
    file = source / "model.safetensors"
    tensors = load_file(file) | {"model.positions": torch.arange(3)}
    save_file(tensors, file, {"format": "pt"})
    assert (
        load_file(recast(source, tmp_path / "out", "float16") / "model.safetensors")[
            "model.positions"
        ].dtype
        == torch.int64
    )
    tensors["model.norm.weight"][0] = 1e6
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(
        ConfigError,
        match=r"model\.norm\.weight has values of 1e\+06, which torch.float16 cannot hold",
    ):
        recast(source, tmp_path / "more", "float16")
    assert not (tmp_path / "more").exists()
    with pytest.raises(ConfigError, match="dtype is 'float61'; did you mean 'float16'"):
        recast(source, tmp_path / "more", "float61")
