"""Tokenizers: what is written is what the files say, and llama.cpp computes the tokens that
tokenizers computes.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from quark_onnx.common.errors import ModelError
from quark_onnx.torch.exports.gguf import write_gguf
from tests.quark_onnx.torch.gguf.tiny import llama, metadata, save

#: The expressions that the tokenizers of Llama 3, Qwen 2, Mistral Nemo and GPT-4o have.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?"
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = [
    "The quick brown fox doesn't jump; it'LL walk over 12345 dogs.",
    "  two  spaces,\ttabs\n\nand   \n lines \r\n end ",
    "Straße, naïve café — ΑΒΓαβγ, привет мир, 北京 東京, नमस्ते, 🙂🙃!",
    "def f(x):\n    return x**2 // 3  # http://a.b/c?d=e&f=1_000",
    "HTTPServer iPhone XMLHttp McDonald's 3.14159 1,000,000",
    "<s> is text here",
    "a",
    "",
]
CORPUS = [text.split("<s>")[0] for text in TEXTS] * 3 + [
    "over the dogs and foxes the walk of returns"
] * 5


def split(pattern: str, behavior: str = "isolated", invert: bool = False) -> Any:
    steps = [
        pre_tokenizers.Split(Regex(pattern), behavior, invert),
        pre_tokenizers.ByteLevel(False, use_regex=False),
    ]
    return pre_tokenizers.Sequence(steps)


SPLITS = {
    "gpt-2": (pre_tokenizers.ByteLevel(add_prefix_space=False), False),
    "smollm": (
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        ),
        False,
    ),
    "llama-bpe": (split(LLAMA3), True),
    "dbrx": (split(LLAMA3), False),
    "qwen2": (split(QWEN2), False),
    "tekken": (split(TEKKEN), True),
    "gpt-4o": (split(GPT4O, "removed", True), False),
}


def byte_level(pre_tokenizer: Any, ignore_merges: bool) -> Any:
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=380, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["[tool]"])
    return tokenizer


def pieces(prefix: bool) -> Any:
    """BPE as sentencepiece trains it: every pair that makes a token is a merge."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=220, special_tokens=["<unk>", "<s>", "</s>"]
    )
    trained.train_from_iterator(
        ["the dogs and foxes walk over the quick brown returns 12345"] * 5, trainer
    )
    tokens = trained.get_vocab()
    tokens |= {f"<0x{byte:02X}>": len(tokens) + byte for byte in range(256)}
    texts = [
        text
        for text in sorted(tokens, key=tokens.__getitem__)
        if not text.startswith("<")
    ]
    cuts = [(text, at) for text in texts for at in range(1, len(text))]
    merges = [
        (text[:at], text[at:])
        for text, at in cuts
        if text[:at] in tokens and text[at:] in tokens
    ]
    tokenizer = Tokenizer(
        models.BPE(tokens, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def written(folder: Path, tokenizer: Any, more: int = 3, **config: Any) -> Path:
    """The file of a model whose embedding has a few rows more than there are tokens."""
    save(folder, vocab_size=tokenizer.get_vocab_size() + more)
    tokenizer.save(str(folder / "tokenizer.json"))
    values = {"bos_token": "<s>", "eos_token": "</s>"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(values), encoding="utf-8")
    result = write_gguf(folder, folder / "model.gguf")
    assert result.notes == ()
    return result.path


@pytest.mark.parametrize("name", SPLITS)
def test_byte_level_metadata(name: str, tmp_path: Path) -> None:
    tokenizer = byte_level(*SPLITS[name])
    found = metadata(written(tmp_path, tokenizer, chat_template="{{ messages }}"))
    count = tokenizer.get_vocab_size()
    assert (
        found["tokenizer.ggml.model"] == "gpt2" and found["tokenizer.ggml.pre"] == name
    )
    assert found["tokenizer.ggml.tokens"][:count] == [
        tokenizer.id_to_token(index) for index in range(count)
    ]
    assert found["tokenizer.ggml.tokens"][count:] == [
        f"[PAD{count + index}]" for index in range(3)
    ]
    types = gguf.TokenType
    expected = (
        [types.CONTROL] * 2
        + [types.NORMAL] * (count - 3)
        + [types.USER_DEFINED]
        + [types.UNUSED] * 3
    )
    assert found["tokenizer.ggml.token_type"] == expected
    stored = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))[
        "model"
    ]["merges"]
    assert found["tokenizer.ggml.merges"] == [" ".join(pair) for pair in stored]
    assert (
        found["tokenizer.ggml.bos_token_id"],
        found["tokenizer.ggml.eos_token_id"],
    ) == (0, 1)
    assert found["tokenizer.ggml.add_bos_token"] is False
    assert found["tokenizer.chat_template"] == "{{ messages }}"


def test_a_template_says_that_a_text_begins_with_bos(tmp_path: Path) -> None:
    tokenizer = byte_level(*SPLITS["llama-bpe"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    assert (
        metadata(written(tmp_path, tokenizer))["tokenizer.ggml.add_bos_token"] is True
    )


def test_an_id_below_zero_is_no_token(tmp_path: Path) -> None:
    save(tmp_path, bos_token_id=None)
    values = json.dumps({"bos_token_id": -1})
    (tmp_path / "generation_config.json").write_text(values, encoding="utf-8")
    found = metadata(write_gguf(tmp_path, tmp_path / "model.gguf").path)
    assert "tokenizer.ggml.bos_token_id" not in found
    assert found["tokenizer.ggml.eos_token_id"] == 2


def test_an_unknown_split_is_named_or_given(tmp_path: Path) -> None:
    tokenizer = byte_level(split(r"\p{L}+|\p{N}+|.", "isolated"), False)
    with pytest.raises(
        ModelError,
        match=(
            r"tokenizer.json: this way to split text has no name known here: \\p\{L\}\+"
        ),
    ):
        written(tmp_path, tokenizer)
    result = write_gguf(tmp_path, tmp_path / "model.gguf", split="gpt-2")
    assert metadata(result.path)["tokenizer.ggml.pre"] == "gpt-2"


def test_other_tokenizers_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="type 'WordLevel' cannot be written; BPE can"):
        written(tmp_path, Tokenizer(models.WordLevel({"a": 0}, "a")))
    tokenizer = byte_level(*SPLITS["gpt-2"])
    tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(ModelError, match="no name known here: Lowercase, ByteLevel"):
        written(tmp_path, tokenizer)
    with pytest.raises(
        ModelError, match=r"the tokenizer has 381 tokens, the embedding 380 rows"
    ):
        written(tmp_path, byte_level(*SPLITS["gpt-2"]), more=-1)


@pytest.mark.parametrize("name", SPLITS)
def test_llama_cpp_computes_the_same_byte_level_tokens(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = byte_level(*SPLITS[name])
    model = llama(written(tmp_path, tokenizer), monkeypatch, vocab_only=True)
    for text in [*TEXTS, "call [tool] now"]:
        plain = text.replace(
            "<s>", ""
        )  # the text of a special token is one for tokenizers, letters for llama.cpp
        if name in ("tekken", "gpt-4o"):
            plain = plain.replace(
                "नमस्ते", ""
            )  # llama.cpp's form of these two expressions leaves out combining marks
        wanted = tokenizer.encode(plain, add_special_tokens=False).ids
        assert model.tokenize(plain.encode(), add_bos=False) == wanted, plain


@pytest.mark.parametrize("prefix", [True, False])
def test_llama_cpp_computes_the_same_pieces(
    prefix: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = pieces(prefix)
    path = written(tmp_path, tokenizer)
    found = metadata(path)
    assert (
        found["tokenizer.ggml.model"] == "llama"
        and found["tokenizer.ggml.add_space_prefix"] is prefix
    )
    types = found["tokenizer.ggml.token_type"]
    assert types[:3] == [
        gguf.TokenType.UNKNOWN,
        gguf.TokenType.CONTROL,
        gguf.TokenType.CONTROL,
    ]
    assert types.count(gguf.TokenType.BYTE) == 256
    merges = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))[
        "model"
    ]["merges"]
    made = list(dict.fromkeys(tokenizer.token_to_id("".join(pair)) for pair in merges))
    scores = found["tokenizer.ggml.scores"]
    assert made == sorted(made, key=lambda index: -scores[index]), (
        "what is merged first has the greatest score"
    )
    assert (
        max(scores[index] for index in range(len(scores)) if index not in made)
        < scores[made[-1]]
    )
    model = llama(path, monkeypatch, vocab_only=True)
    for text in TEXTS[:-1]:
        plain = text.replace("<s>", "")
        wanted = tokenizer.encode(plain, add_special_tokens=False).ids
        assert model.tokenize(plain.encode(), add_bos=False) == wanted, plain


def field(number: int, value: bytes | int | float) -> bytes:
    """A field of a protobuf message, by the specification of its encoding (lengths below 128)."""
    if isinstance(value, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", value)
    if isinstance(value, int):
        return bytes([number << 3, value])
    return bytes([number << 3 | 2, len(value)]) + value


def sentencepiece(kind: int = 2, prefix: int = 0) -> bytes:
    rows = [
        ("<unk>", 0.0, 2),
        ("<s>", 0.0, 3),
        ("</s>", 0.0, 3),
        ("<0x41>", 0.0, 6),
        ("▁a", -1.0, 1),
        ("b", -2.5, 1),
    ]
    parts = [
        field(1, field(1, text.encode()) + field(2, score) + field(3, type))
        for text, score, type in rows
    ]
    return b"".join(parts) + field(2, field(3, kind)) + field(3, field(3, prefix))


def test_tokenizer_model(tmp_path: Path) -> None:
    save(tmp_path, vocab_size=8)
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece())
    (tmp_path / "added_tokens.json").write_text(
        '{"<tool>": 6, "<s>": 1}', encoding="utf-8"
    )
    found = metadata(write_gguf(tmp_path, tmp_path / "model.gguf").path)
    assert found["tokenizer.ggml.model"] == "llama"
    assert found["tokenizer.ggml.tokens"] == [
        "<unk>",
        "<s>",
        "</s>",
        "<0x41>",
        "▁a",
        "b",
        "<tool>",
        "[PAD7]",
    ]
    assert found["tokenizer.ggml.scores"] == [
        0.0,
        0.0,
        0.0,
        0.0,
        -1.0,
        -2.5,
        -2.5,
        -2.5,
    ]
    assert found["tokenizer.ggml.token_type"] == [2, 3, 3, 6, 1, 1, 4, 5]
    assert found["tokenizer.ggml.add_space_prefix"] is False
    assert (
        found["tokenizer.ggml.bos_token_id"],
        found["tokenizer.ggml.eos_token_id"],
    ) == (1, 2)

    (tmp_path / "added_tokens.json").write_text('{"<tool>": 7}', encoding="utf-8")
    with pytest.raises(
        ModelError, match=r"added_tokens.json: the ids of its tokens do not follow"
    ):
        write_gguf(tmp_path, tmp_path / "model.gguf")
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece(kind=1))
    with pytest.raises(ModelError, match="is a unigram model of sentencepiece"):
        write_gguf(tmp_path, tmp_path / "model.gguf")
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ModelError, match="it has no pieces"):
        write_gguf(tmp_path, tmp_path / "model.gguf")


def test_tokenizer_model_of_sentencepiece_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = pytest.importorskip(
        "sentencepiece", reason="sentencepiece is not installed"
    )
    library.SentencePieceTrainer.Train(
        sentence_iterator=iter(
            ["the dogs and foxes walk over the quick brown returns 12345"] * 20
        ),
        model_prefix=str(tmp_path / "tokenizer"),
        model_type="bpe",
        vocab_size=330,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    own = library.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    save(tmp_path, vocab_size=own.vocab_size())
    path = write_gguf(tmp_path, tmp_path / "model.gguf").path
    found = metadata(path)
    assert found["tokenizer.ggml.tokens"] == [
        own.id_to_piece(index) for index in range(own.vocab_size())
    ]
    assert found["tokenizer.ggml.scores"] == pytest.approx(
        [own.get_score(index) for index in range(own.vocab_size())]
    )
    model = llama(path, monkeypatch, vocab_only=True)
    for text in TEXTS[:-1]:
        assert model.tokenize(text.encode(), add_bos=False) == own.encode(text), text
