"""Tokenizer of a model in GGUF's metadata."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark_onnx.common.errors import ModelError
from quark_onnx.files.model_file import MALFORMED
from quark_onnx.torch.checkpoints.safetensors_io import read_json

if TYPE_CHECKING:
    from gguf import GGUFWriter

_GPT2 = "ByteLevel"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_SLASHED = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"

#: llama.cpp's names of pre-tokenizers, by the regular expressions that split text, and by
#: whether known words are tokens without merges.
_SPLITS = {
    ((_GPT2,), False): "gpt-2",
    ((r"\p{N}", _GPT2), False): "smollm",
    ((_WORDS + r"\p{N}{1,3}" + _REST,), True): "llama-bpe",
    ((_WORDS + r"\p{N}{1,3}" + _REST,), False): "dbrx",
    ((_WORDS + r"\p{N}" + _REST,), False): "qwen2",
    ((_CASED + "|" + _UPPER + r"|\p{N}" + _SLASHED,), True): "tekken",
    (
        (
            _CASED
            + _CONTRACTIONS
            + "?|"
            + _UPPER
            + _CONTRACTIONS
            + r"?|\p{N}{1,3}"
            + _SLASHED,
        ),
        False,
    ): "gpt-4o",
}
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


@dataclass(frozen=True)
class Vocabulary:
    """Tokens in the order of their ids.

    Attributes:
        model: "gpt2" for byte-level BPE, "llama" for sentencepiece.
        split: llama.cpp's name of the pre-tokenizer.
        tokens: the texts of the tokens.
        types: names of gguf.TokenType.
        scores: priority of merging two tokens into this one; empty if the tokenizer has merges.
        space: whether a space is prepended to the text.
    """

    model: str
    split: str
    tokens: list[str]
    types: list[str]
    scores: list[float]
    space: bool


def add_vocabulary(
    writer: GGUFWriter, folder: Path, rows: int, split: str
) -> list[str]:
    """Write the tokenizer of a folder.

    Args:
        writer: gguf.GGUFWriter.
        folder: the folder of a checkpoint.
        rows: number of rows of the embedding; the tokens are padded to this number.
        split: llama.cpp's name of the pre-tokenizer, for tokenizers with an unknown one.

    Returns:
        Notes for the user.

    Raises:
        ModelError: the files are damaged, or llama.cpp does not support the tokenizer.
    """
    import gguf

    vocabulary = _read(folder, split)
    merges = vocabulary is not None and vocabulary.model == "gpt2"
    special = _special(folder, rows, merges)
    if vocabulary is None:
        writer.add_tokenizer_model(gguf.NoVocab.tokenizer_model)
        special.add_to_gguf(writer, quiet=True)
        return [
            (
                "no tokenizer.json and no tokenizer.model: the file holds no"
                " vocabulary; give llama.cpp token ids"
            ),
        ]
    # Embeddings are often padded beyond the tokens.
    missing = rows - len(vocabulary.tokens)
    if missing < 0:
        raise ModelError(
            f"{folder}: the tokenizer has {len(vocabulary.tokens)} tokens, the"
            f" embedding {rows} rows",
        )
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.split)
    # llama.cpp needs a token for each row of the embedding.
    writer.add_token_list(
        vocabulary.tokens
        + [f"[PAD{rows - missing + index}]" for index in range(missing)],
    )
    types = vocabulary.types + ["UNUSED"] * missing
    writer.add_token_types([gguf.TokenType[name] for name in types])
    if vocabulary.scores:
        # Padding has the least score, so that no merge prefers it.
        writer.add_token_scores(vocabulary.scores + [min(vocabulary.scores)] * missing)
        writer.add_add_space_prefix(vocabulary.space)
    if (folder / "tokenizer.json").is_file():
        # llama.cpp would guess by the name of the split.
        special.add_special_token.setdefault("bos", False)
    special.add_to_gguf(writer, quiet=True)
    return []


def _special(folder: Path, rows: int, merges: bool) -> Any:
    """Return ids of special tokens, the chat template, and merges of byte-level BPE."""
    import gguf

    try:
        special = gguf.SpecialVocab(folder, load_merges=merges, n_vocab=rows)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ModelError(
            f"{folder}: tokenizer.json or tokenizer_config.json is not understood:"
            f" {error!r}",
        ) from error
    # setdefault: the files of the tokenizer have priority, then generation_config.json.
    for name in ("generation_config.json", "config.json"):
        values = _read_optional(folder / name)
        for kind in ("bos", "eos"):
            ids = values.get(f"{kind}_token_id")
            # GGUF has one id of the end; of several, the first is written.
            token_id = ids[0] if isinstance(ids, list) and ids else ids
            # A configuration may have -1 for no token.
            if isinstance(token_id, int) and 0 <= token_id < rows:
                special.special_token_ids.setdefault(kind, token_id)
    return special


def _read_optional(path: Path) -> dict[str, Any]:
    """Return the values of a JSON file; none if there is no such file."""
    return read_json(path) if path.is_file() else {}


def _read(folder: Path, split: str) -> Vocabulary | None:
    """Return the vocabulary of a folder; None without a tokenizer."""
    path = folder / "tokenizer.json"
    if path.is_file():
        values = read_json(path)
        try:
            return _of_tokenizer(values, split)
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ModelError(f"{path} is not understood: {error!r}") from error
    path = folder / "tokenizer.model"
    return _of_sentencepiece(path, folder) if path.is_file() else None


def _of_tokenizer(values: dict[str, Any], split: str) -> Vocabulary:
    """Return the vocabulary of a tokenizer.json.

    Raises:
        ModelError: the tokenizer is no BPE, or the way to split text is unknown.
    """
    model = values["model"]
    if model.get("type", "BPE") != "BPE":
        raise ModelError(
            f"a tokenizer of type {model['type']!r} cannot be written; BPE can."
            f" {_WITHOUT}",
        )
    # Added tokens may repeat tokens of the model, and have their own ids.
    ids = dict(model["vocab"])
    added = {token["content"]: token for token in values.get("added_tokens") or []}
    ids |= {text: token["id"] for text, token in added.items()}
    # Ids without a token are padding.
    tokens = [f"[PAD{index}]" for index in range(max(ids.values()) + 1)]
    types = ["UNUSED"] * len(tokens)
    # Byte tokens such as <0x0A> belong to tokenizers of sentencepiece.
    pieces = bool(model.get("byte_fallback"))
    for text, index in ids.items():
        tokens[index] = text
        if pieces and text == model.get("unk_token"):
            types[index] = "UNKNOWN"
        elif pieces and _BYTE.fullmatch(text):
            types[index] = "BYTE"
        else:
            types[index] = _type_of(added.get(text))
    if not pieces:
        return Vocabulary("gpt2", split or _split_of(values), tokens, types, [], False)
    merges = [_merged(merge) for merge in model["merges"]]
    # the first of several merges to a token has its rank; tokens of no merge come last
    ranks = [-float(len(merges))] * len(tokens)
    for rank, merged in reversed(list(enumerate(merges))):
        ranks[ids[merged]] = -float(rank)
    return Vocabulary("llama", "default", tokens, types, ranks, _prepends(values))


def _merged(merge: str | list[str]) -> str:
    """Return the token that a merge makes of two, which a list or a space separates."""
    return "".join(merge.split(" ") if isinstance(merge, str) else merge)


def _type_of(added: dict[str, Any] | None) -> str:
    """Return llama.cpp's type of a token, normal unless it was added to the vocabulary."""
    if added is None:
        return "NORMAL"
    return "CONTROL" if added.get("special") else "USER_DEFINED"


_WITHOUT = (
    "Without tokenizer.json and tokenizer.model a file without vocabulary is written"
)


def _split_of(values: dict[str, Any]) -> str:
    """Return llama.cpp's name of a byte-level tokenizer's pre-tokenizer."""
    pre_tokenizers = _flat(values.get("pre_tokenizer"), "pretokenizers")
    steps = [expression for step in pre_tokenizers for expression in _expressions(step)]
    normalizers = _flat(values.get("normalizer"), "normalizers")
    # Another normalization changes the text before it is split.
    normal = [step["type"] for step in normalizers if step["type"] != "NFC"]
    name = _SPLITS.get((tuple(steps), bool(values["model"].get("ignore_merges"))))
    if name is None or normal:
        raise ModelError(
            "this way to split text has no name known here:"
            f" {', '.join([*normal, *steps])}; give split= the name that llama.cpp has"
            f" for it. {_WITHOUT}",
        )
    return name


def _expressions(step: dict[str, Any]) -> list[str]:
    """Return the regular expressions of a pre-tokenizer; the type of an unknown one."""
    kind = step["type"]
    if kind == "ByteLevel":
        expressions = []
        # A text that is no key of the table, so that the tokenizer is refused.
        if step.get("add_prefix_space"):
            expressions.append("a space first")
        if step.get("use_regex", True):
            expressions.append(_GPT2)
        return expressions
    if kind == "Split" and "Regex" in step["pattern"] and _keeps_all(step):
        return [step["pattern"]["Regex"]]
    if kind == "Digits" and step.get("individual_digits"):
        return [r"\p{N}"]
    # The name of an unknown step makes the tokenizer unknown, and stands in the error.
    return [kind]


def _keeps_all(split: dict[str, Any]) -> bool:
    """Return whether a split keeps the matches of its pattern as pieces.

    The known patterns match the full text, so that "Removed" with "invert" is equivalent.
    """
    return split["behavior"] == "Isolated" or (
        split["behavior"] == "Removed" and bool(split.get("invert"))
    )


def _prepends(values: dict[str, Any]) -> bool:
    """Return whether a sentencepiece-like tokenizer prepends a space to the text."""
    steps = _flat(values.get("normalizer"), "normalizers")
    steps += _flat(values.get("pre_tokenizer"), "pretokenizers")
    return any(
        step["type"] == "Prepend"
        or (
            step["type"] == "Metaspace"
            and step.get("prepend_scheme", "always") in ("always", "first")
        )
        for step in steps
    )


def _flat(step: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """Return the steps of a sequence under a key, or a single step; none for None."""
    if step is None:
        return []
    return list(step[key]) if step["type"] == "Sequence" else [step]


def _of_sentencepiece(path: Path, folder: Path) -> Vocabulary:
    """Return the vocabulary of a tokenizer.model, with the tokens of added_tokens.json.

    Raises:
        ModelError: a file is damaged, the model is not BPE, or the ids of added tokens have gaps.
    """
    model = _sentencepiece_model(path)
    tokens = [piece.piece for piece in model.pieces]
    scores = [piece.score for piece in model.pieces]
    # gguf has the names of sentencepiece's enumeration.
    types = [piece.Type.Name(piece.type) for piece in model.pieces]
    added_file = folder / "added_tokens.json"
    added = sorted(
        (index, text)
        # The file repeats tokens of the model.
        for text, index in _read_optional(added_file).items()
        if index >= len(tokens)
    )
    for index, text in added:
        if index != len(tokens):
            raise ModelError(
                f"{added_file}: the ids of its tokens do not follow those of {path.name}",
            )
        tokens.append(text)
    scores += [min(scores)] * len(added)
    types += ["USER_DEFINED"] * len(added)
    space = model.normalizer_spec.add_dummy_prefix
    return Vocabulary("llama", "default", tokens, types, scores, space)


def _sentencepiece_model(path: Path) -> Any:
    """Read a tokenizer.model as a message of sentencepiece_model.proto.

    transformers has the class of the message, so that the package sentencepiece is not needed.

    Raises:
        ModelError: the file is damaged, or the model is not BPE.
    """
    from transformers.convert_slow_tokenizer import import_protobuf

    model = import_protobuf().ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except MALFORMED as error:
        raise ModelError(
            f"{path} is damaged or no model of sentencepiece: {error}",
        ) from error
    if not model.pieces:
        raise ModelError(
            f"{path} is damaged or no model of sentencepiece: it has no pieces",
        )
    if model.trainer_spec.model_type != model.trainer_spec.BPE:
        raise ModelError(
            f"{path} is a unigram model of sentencepiece; those of type BPE can be written",
        )
    return model
