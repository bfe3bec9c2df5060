"""Rotations untie a head: the float model stays what it was, and every file has both matrices."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from quark_onnx.cli.dispatch import main
from quark_onnx.torch.calibration.perplexity import perplexity
from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.config.language import config_for
from quark_onnx.torch.pipelines.ptq import Text, ptq
from tests.torch_families import FAMILIES, config_of
from tests.torch_models import llama, made, saved, tokens, with_tokenizer

_TIED = ["llama3.2", "gpt2", "opt", "cohere"]


def text_of(folder: Path) -> Text:
    np.save(folder / "tokens.npy", torch.cat(tokens(6)).numpy())
    return Text(str(folder / "tokens.npy"), 4, 12)


@pytest.mark.parametrize("family", _TIED)
def test_the_float_model_is_evaluated_as_it_was(family: str, tmp_path: Path) -> None:
    assert family in FAMILIES
    source = saved(made(config_of(family)), tmp_path / "source")
    text, config = text_of(tmp_path), config_for("uint4_wo_32")
    checkpoint = FloatCheckpoint(source)
    found = ptq(
        checkpoint,
        text,
        config.with_(algorithms=("rotation", "gptq")),
        tmp_path / "out",
        evaluate=text,
        progress=False,
        verdict=True,
    )
    assert found.verdict is not None and not found.verdict.skipped
    windows = [each[0] for each in tokens(6)[:4]]
    before = perplexity(load_checkpoint(source), windows, progress=False)
    assert found.before == pytest.approx(before, rel=1e-6)
    assert found.verdict.perplexity_before == pytest.approx(before, rel=1e-5)
    after = perplexity(load_checkpoint(tmp_path / "out"), windows, progress=False)
    assert found.after == pytest.approx(after, rel=1e-6)
    # the checkpoint serves as a source again
    assert checkpoint.load().config.tie_word_embeddings


def test_a_gguf_file_has_both_matrices(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    float_model = made(llama(tie_word_embeddings=True))
    with torch.no_grad():
        float_model.model.norm.weight.uniform_(0.5, 2)  # which becomes part of the head
    source = with_tokenizer(saved(float_model, tmp_path / "source"))
    text_of(tmp_path)
    out = tmp_path / "out"
    command = ["llm", "ptq", str(source), "-o", str(out), "--scheme", "uint4_wo_32"]
    options = ["--algorithm", "rotation", "--export", "gguf", "hf_format"]
    assert main([*command, *options]) == 0
    model = load_checkpoint(out)
    stored = {
        tensor.name: torch.tensor(tensor.data)
        for tensor in gguf.GGUFReader(out / "model.gguf").tensors
    }
    head, embedding = model.lm_head.weight, model.model.embed_tokens.weight
    assert not torch.equal(head, embedding)
    assert torch.equal(stored["output.weight"], head.half())
    assert torch.equal(stored["token_embd.weight"], embedding.half())
