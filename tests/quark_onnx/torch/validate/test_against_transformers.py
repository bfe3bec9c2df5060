"""What is said of transformers is what it does itself with the same folder, for layouts that need
no other package.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quark_onnx.torch.validate import validate
from tests.quark_onnx.torch.validate import drafts
from tests.quark_onnx.torch.validate.drafts import Draft


def loaded(folder: Path) -> str:
    """The word for what ``from_pretrained`` makes of a checkpoint."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
        try:
            _, info = transformers.AutoModelForCausalLM.from_pretrained(
                folder, output_loading_info=True
            )
        except Exception:  # of any kind, from config to safetensors
            return "refused"
    lost: list[Any] = [*info["missing_keys"], *info["mismatched_keys"]]
    return "loads but wrong" if lost else "loads"


def changed(**changes: object) -> Callable[[Draft, Path], object]:
    return lambda draft, _: draft.config.update(changes)


def truncated(draft: Draft, folder: Path) -> None:
    file = draft.write(folder) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


CASES: dict[str, Callable[[Draft, Path], object]] = {
    "whole": lambda *_: None,
    "tied": lambda draft, _: (
        draft.config.update(tie_word_embeddings=True),
        draft.drop("lm_head.weight"),
    ),
    "head is missing": lambda draft, _: draft.drop("lm_head.weight"),
    "more layers": changed(num_hidden_layers=3),
    "wider": changed(intermediate_size=128),
    "more words": changed(vocab_size=48),
    "no family": lambda draft, _: draft.config.pop("model_type"),
    "unknown layout": changed(quantization_config={"quant_method": "unheard"}),
    "no layout": changed(quantization_config={"bits": 4}),
    "truncated": truncated,
}


@pytest.mark.parametrize("name", CASES)
def test_float(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    draft = drafts.plain()
    CASES[name](draft, tmp_path)
    folder = tmp_path if name == "truncated" else draft.write(tmp_path)
    verdict = validate(folder, "transformers")
    assert verdict.word == loaded(folder), verdict.text()
