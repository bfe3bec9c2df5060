"""A small random Llama and a tokenizer of a few words, in a folder that stands in for a model of
the Hub.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TEXT = "hello how are you ? , the of is a my name president capital future united states france ai"


def tiny(cls: str = "Llama", **settings: Any) -> Any:
    """A random model of two layers, in bfloat16."""
    config = getattr(transformers, f"{cls}Config")(
        **{
            "vocab_size": 64,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "tie_word_embeddings": False,
        }
        | settings
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16
    ).eval()


@pytest.fixture
def make() -> Callable[..., Any]:
    return tiny


@pytest.fixture
def model() -> Any:
    return tiny()


@pytest.fixture
def batches() -> list[Any]:
    torch.manual_seed(1)
    return [torch.randint(0, 64, (1, 16)) for _ in range(3)]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Any) -> str:
    """The name of a model; the working folder has it."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    monkeypatch.chdir(tmp_path)
    words = Tokenizer(
        WordLevel(
            {word: i for i, word in enumerate(["<unk>", "</s>", *TEXT.split()])},
            unk_token="<unk>",
        )
    )
    words.pre_tokenizer = Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", eos_token="</s>"
    )
    folder = Path("meta-llama/Llama-tiny")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder.as_posix()


@pytest.fixture
def golden() -> Path:
    """Exports of amd-quark."""
    folder = os.environ.get("QUARK_ONNX_DATA")
    if not folder:
        pytest.skip(
            "QUARK_ONNX_DATA is not set; it names the folder with golden/quark_exports"
        )
    return Path(folder) / "golden" / "quark_exports"
