"""write_gguf: write a Hugging Face folder as a GGUF file."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quark_onnx.common.containers import grouped
from quark_onnx.common.errors import ConfigError, MissingDependency, nearest
from quark_onnx.common.extras import pip_install
from quark_onnx.torch.checkpoints.meta_model import float_config_of
from quark_onnx.torch.checkpoints.safetensors_io import CheckpointReader, read_json
from quark_onnx.torch.exports.gguf import container
from quark_onnx.torch.exports.gguf.architectures import (
    Architecture,
    TargetTensor,
    architecture_of,
    targets,
)
from quark_onnx.torch.exports.gguf.blocks import FORMS
from quark_onnx.torch.exports.gguf.hyperparameters import (
    add_hyperparameters,
    notes_on,
    rope_tensors,
)
from quark_onnx.torch.exports.gguf.parts import TYPES, Part, typed
from quark_onnx.torch.exports.gguf.vocabulary import add_vocabulary
from quark_onnx.torch.runtime.safetensors_header import StoredTensor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_log = logging.getLogger(__name__)


#: Name of the head in checkpoints of all architectures.
_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class GgufFile:
    """Written GGUF file.

    Attributes:
        path: the file.
        types: the type of each tensor, by llama.cpp's names: {"blk.0.attn_q.weight": "Q4_1", ...}.
        notes: notes for the user, such as tensors of another type than requested, or a missing
            vocabulary.
    """

    path: Path
    types: Mapping[str, str]
    notes: tuple[str, ...]


def write_gguf(  # noqa: PLR0913
    source: Path | str,
    output: Path | str,
    kind: str = "q4_1",
    weights: Mapping[str, Any] | None = None,
    embeddings: str = "",
    split: str = "",
) -> GgufFile:
    r"""Write the model of a Hugging Face folder as one GGUF file for llama.cpp.

    The weights of linear layers in decoder blocks are quantized. Norms, biases and the routers of
    experts are float32. A weight whose width is no multiple of 32 is float16, and ``notes`` says
    so. Model types: llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, phi3, gemma. Tensors are read
    and written one at a time.

    ``weights`` holds results of GPTQ, AWQ or other algorithms. The codes of a ``Quantized`` are
    stored unchanged, regardless of ``kind``: integers of up to 4 bits as Q4_1, or as Q4_0 if they
    are signed and symmetric; symmetric int8 as Q8_0; mxfp4e2m1 as MXFP4. Scales may be per-group
    with a multiple of 32, per-channel or per-tensor. They are stored as float16; in Q4_1 the zero
    point is stored as a float16 offset. With ``TensorSpec(..., scale="float16")`` codes are chosen
    for the stored scales. Floats replace a stored tensor, for instance norms that AWQ has rescaled.
    All other weights are rounded to nearest. In Q4_0, Q4_1 and Q8_0 the squared error of every
    block is at most that of llama.cpp's own quantizer.

    Args:
        source: a folder with config.json, \*.safetensors (floats, in one file or sharded) and, for
            a vocabulary, tokenizer.json (BPE) or tokenizer.model (BPE of sentencepiece).
        output: the file, \*.gguf. It replaces an existing file once it is complete.
        kind: q4_1 (4 bits with a scale and an offset), q4_0 (4 bits with a scale), q8_0, mxfp4, f16
            or f32.
        weights: a Quantized or floats, by the names of the checkpoint's tensors; ".weight" may be
            omitted.
        embeddings: the type of the embedding and of lm_head. The default is f32 if ``kind`` is f32,
            else f16.
        split: llama.cpp's name of the pre-tokenizer (``tokenizer.ggml.pre``); needed only if the
            tokenizer's way to split text is unknown.

    Returns:
        The path, the types and the notes.

    Raises:
        ConfigError: an unknown kind, or a kind that no tensor supports; or a name or shape in
            ``weights`` that the checkpoint does not have.
        ModelError: the folder is damaged, llama.cpp does not support the model, or the file cannot
            be written.
        MissingDependency: gguf or transformers is not installed.
    """
    # All errors of arguments come before the file is begun.
    source, output = Path(source), Path(output)
    kind, embeddings = _types(kind, embeddings, output)
    architecture, config, planned_targets = planned(source)
    planned_targets += _untied_head(weights or {}, source, config)
    stored = {
        tensor.name: tensor for target in planned_targets for tensor in target.sources
    }
    given = _matched(weights or {}, stored)
    parts = [
        _part(target, given, (kind, embeddings), architecture, config)
        for target in planned_targets
    ]
    _check_not_all_float(parts, kind)
    entries = _entries(parts, config)
    # The rows of the embedding are the vocabulary, padding included.
    rows = {entry.name: entry for entry in entries}["token_embd.weight"].shape[0]
    with container.staged(output) as temporary:
        name = source.resolve().name
        writer = container.writer(temporary, architecture.name, name, kind)
        add_hyperparameters(writer, config, architecture, rows)
        notes = add_vocabulary(writer, source, rows, split)
        container.write(writer, entries)
        container.verify(temporary, entries)
    notes += [*notes_on(config), *_others(parts)]
    for note in notes:
        _log.warning("%s: %s", output, note)
    return GgufFile(output, {entry.name: entry.type for entry in entries}, tuple(notes))


def check_writable(source: Path) -> None:
    """Raise the errors of ``write_gguf`` for a folder that are known from its headers."""
    kinds = _types("q4_1", "", Path("model.gguf"))
    architecture, config, planned_targets = planned(source)
    parts = [
        _part(target, {}, kinds, architecture, config) for target in planned_targets
    ]
    _check_not_all_float(parts, kinds[0])


def planned(source: Path) -> tuple[Architecture, Any, list[TargetTensor]]:
    """Return the architecture, the configuration and the GGUF tensors of a folder.

    Raises:
        ModelError: as for ``write_gguf``.
        MissingDependency: as for ``write_gguf``.
    """
    # Before the packages are needed, since this error is the more useful one.
    architecture = architecture_of(read_json(source / "config.json").get("model_type"))
    for package in ("gguf", "transformers"):
        if find_spec(package) is None:
            raise MissingDependency(
                f"a GGUF file needs the package {package}: {pip_install('llm')}",
            )
    config = float_config_of(source)
    tensors = CheckpointReader(source).tensors.values()
    return architecture, config, targets(tensors, architecture, config)


def _part(
    target: TargetTensor,
    given: Mapping[str, Any],
    kinds: tuple[str, str],
    architecture: Architecture,
    config: PreTrainedConfig,
) -> Part:
    """Return a tensor with its type, the order of its rows and the constant of norms.

    Args:
        kinds: types of the weights in blocks, and of embeddings.
    """
    kind, reason = typed(target, given, *kinds)
    # q and k have rows in another order only where features rotate in adjacent pairs.
    order = target.order(config) if architecture.interleaved else None
    return Part(
        target,
        kind,
        given,
        order,
        architecture.norm if target.is_norm else 0.0,
        reason,
    )


def _entries(
    parts: Iterable[Part], config: PreTrainedConfig
) -> list[container.TensorToWrite]:
    """Return what is written: the tensors of a checkpoint, and those of the rotary embedding."""
    entries = [
        container.TensorToWrite(
            part.target.name, part.type, part.target.shape, part.nbytes, part.data
        )
        for part in parts
    ]
    # The checkpoint has no such tensors; they follow from config.json.
    for name, factors in rope_tensors(config).items():
        data = partial(np.copy, factors)
        entries.append(
            container.TensorToWrite(name, "F32", factors.shape, factors.nbytes, data)
        )
    return entries


def _check_not_all_float(parts: Iterable[Part], kind: str) -> None:
    """Raise ConfigError if blocks were requested, and no tensor would have blocks."""
    if kind not in FORMS or any(part.type in FORMS for part in parts):
        return
    raise ConfigError(
        f"no tensor would be {kind}:"
        f" {'; '.join(_others(parts)) or 'the model has no linear layer'}",
    )


def _others(parts: Iterable[Part]) -> list[str]:
    """Return the tensors of another type than requested, one line per reason."""
    names = grouped((part.reason, part.target.name) for part in parts if part.reason)
    return [f"{reason}: {', '.join(others)}" for reason, others in names.items()]


def _types(kind: str, embeddings: str, output: Path) -> tuple[str, str]:
    """Return the names of both types in capitals.

    Raises:
        ConfigError: a type is unknown, or the file's name has another ending.
    """
    embeddings = embeddings or ("f32" if kind.lower() == "f32" else "f16")
    for option, value in (("kind", kind), ("embeddings", embeddings)):
        if value.upper() not in TYPES:
            names = [name.lower() for name in TYPES]
            raise ConfigError(
                f"{option} is {value!r}{nearest(value, names)}; it must be one of:"
                f" {', '.join(names)}",
            )
    if output.suffix != ".gguf":
        raise ConfigError(
            f"output is {str(output)!r}; the name of a GGUF file ends in .gguf",
        )
    return kind.upper(), embeddings.upper()


def _untied_head(
    weights: Mapping[str, Any], source: Path, config: PreTrainedConfig
) -> list[TargetTensor]:
    """Return the head if weights separate it from the embedding, as rotations do; else nothing."""
    if not config.tie_word_embeddings or _HEAD not in weights:
        return []
    # llama.cpp takes the embedding for the head only if the file has no head
    shape = tuple(weights[_HEAD].shape)
    return [TargetTensor("output.weight", (StoredTensor(_HEAD, shape, "F32", source),))]


def _matched(
    weights: Mapping[str, Any],
    stored: Mapping[str, StoredTensor],
) -> dict[str, Any]:
    """Return the given weights by the full names of the tensors.

    Raises:
        ConfigError: a name or a shape does not match.
    """
    matched = {}
    for name, weight in weights.items():
        # The suffix may be left out.
        full_name = name if name in stored else f"{name}.weight"
        if full_name not in stored:
            raise ConfigError(
                f"weights has {name!r}, which is no tensor to"
                f" write{nearest(full_name, list(stored))}",
            )
        if tuple(weight.shape) != stored[full_name].shape:
            raise ConfigError(
                f"weights[{name!r}] is of shape {tuple(weight.shape)}, stored is"
                f" {stored[full_name].shape}",
            )
        matched[full_name] = weight
    return matched
