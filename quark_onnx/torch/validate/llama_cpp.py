"""Checks of GGUF files for llama.cpp: header, metadata, types, offsets and tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

from quark_onnx.common.containers import (
    by_name,
    excluding,
    flattened,
    grouped_by,
    values_at,
)
from quark_onnx.common.errors import ModelError
from quark_onnx.torch.validate.finding import Finding
from quark_onnx.torch.validate.gguf_header import GGUFHeader, GGUFTensor, read_gguf
from quark_onnx.torch.validate.rules import broken
from quark_onnx.torch.validate.slots import ceil_div

#: Families with a table of tensors in this package; others are checked against the tables of gguf.
_DENSE = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "mistral3", "granite")
#: Metadata below the name of the family, which llama.cpp reads to build the model.
_KEYS = (
    "context_length",
    "embedding_length",
    "block_count",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)
_BLOCK = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm")
#: By whether the family's experts are counted: a mixture has fused tensors of all experts.
_FEED_FORWARD = {
    False: ("ffn_gate", "ffn_up", "ffn_down"),
    True: ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
}
#: Upper bound of the blocks of any model; a greater number is damage.
_MOST_BLOCKS = 10_000
#: Names that gguf-split writes, counted from 00001.
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True)
class GGUFModel:
    """Model in a GGUF file, or in several parts.

    Attributes:
        name: name of the first file.
        headers: headers of the readable files, by file name.
        damage: findings while reading.
    """

    name: str
    headers: dict[str, GGUFHeader]
    damage: tuple[Finding, ...]

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata of the first part, which is complete."""
        # gguf-split writes the model's metadata into the first part only
        return next(iter(self.headers.values())).metadata

    @property
    def architecture(self) -> str:
        """The family of the model."""
        return next(iter(self.headers.values())).architecture

    @property
    def tensors(self) -> dict[str, GGUFTensor]:
        """Tensors of the model by name."""
        return by_name(flattened(header.tensors for header in self.headers.values()))


def read_models(place: Path) -> list[GGUFModel]:
    """Return the models of a folder, or of a single file.

    Raises:
        ModelError: the file or folder is missing.
    """
    if not place.exists():
        raise ModelError(f"there is no {place}; name a *.gguf file, or a folder")
    files = sorted(place.glob("*.gguf")) if place.is_dir() else [place]
    # sorted, so that the first part comes first
    parts_of = grouped_by(files, lambda file: _PART.sub("", file.name))
    return list(map(_read, parts_of.values()))


def findings(model: GGUFModel) -> Iterator[Finding]:
    """Yield errors of llama.cpp in a model."""
    yield from model.damage
    if not model.headers:
        return
    # once for all headers: the import takes a while, and may fail
    gguf = gguf_package()
    for file, header in model.headers.items():
        yield from _place_findings(file, header, gguf)
    # tensors of a damaged or missing part would all be reported as missing
    if model.damage:
        return
    yield from _key_findings(model, gguf)
    if gguf is None:
        yield broken(
            "gguf-unchecked",
            model.name,
            "it is not installed; types and unknown tensors are not checked",
        )
    # an unknown architecture has a finding of its own, and no table of tensors
    elif model.architecture in gguf.MODEL_ARCH_NAMES.values():
        yield from _unknown_findings(model, gguf)
    yield from _missing_findings(model)


def schemes(model: GGUFModel) -> Iterator[str]:
    """Yield the type of every matrix."""
    gguf = gguf_package()
    if gguf is None:
        return
    for tensor in model.tensors.values():
        # vectors are floats in every quantized model; an unknown type has no name
        if len(tensor.shape) > 1 and _is_type(gguf, tensor.kind):
            yield gguf.GGMLQuantizationType(tensor.kind).name


def _read(files: list[Path]) -> GGUFModel:
    """Read the headers of the parts of a model; damage becomes findings."""
    headers, damage = dict[str, GGUFHeader](), list[Finding]()
    for file in files:
        try:
            headers[file.name] = read_gguf(file)
        # the other parts are read on, so that one run reports all damage
        except (ModelError, OSError) as error:
            damage.append(broken("gguf-damaged", file.name, str(error)))
    part = _PART.search(files[0].name)
    # the number of parts is in the name of each of them
    if part is not None and len(files) < int(part[2]):
        text = f"{len(files)} of {int(part[2])} parts are there"
        damage.append(broken("gguf-parts", files[0].name, text))
    return GGUFModel(files[0].name, headers, tuple(damage))


def gguf_package() -> ModuleType | None:
    """Return the package gguf, which knows types and architectures, if installed."""
    try:
        import gguf
    except ImportError:
        return None
    found: ModuleType = gguf
    return found


def _is_type(gguf: ModuleType, kind: int) -> bool:
    """Return whether a number stands for a type of ggml."""
    # numbers of types that ggml has removed are missing there, too
    return kind in {member.value for member in gguf.GGML_QUANT_SIZES}


def _place_findings(
    file: str,
    header: GGUFHeader,
    gguf: ModuleType | None,
) -> Iterator[Finding]:
    """Yield the first tensor with a wrong place or type; the places of later ones follow from it.

    Args:
        file: name of the file.
        header: header of the file.
        gguf: the package that knows the sizes of types; None if it is not installed.
    """
    align = header.alignment
    # ggml masks offsets with align - 1
    if align <= 0 or align & (align - 1):
        text = f"general.alignment is {align}, no power of two"
        yield broken("gguf-place", file, text)
        return
    # offsets count from the aligned end of the header
    place = 0
    for tensor in header.tensors:
        problem = _misaligned(tensor, align)
        # without gguf, sizes in bytes are not known
        if problem is None and gguf is not None:
            problem = _wrong_type(tensor, gguf)
        if problem is None and gguf is not None:
            size = _size_of(tensor, gguf)
            problem = _misplaced(file, header, tensor, place, size)
            # every tensor begins at a multiple of the alignment
            place += ceil_div(size, align) * align
        elif problem is None:
            # of an unknown size, it has one byte at least
            problem = _beyond_the_end(file, header, tensor, 1)
        if problem is not None:
            yield problem
            return


def _misaligned(tensor: GGUFTensor, align: int) -> Finding | None:
    """Return the finding of a tensor with a misaligned offset."""
    if tensor.offset % align == 0:
        return None
    text = f"it begins at {tensor.offset}, which {align} does not divide"
    return broken("gguf-place", tensor.name, text)


def _wrong_type(tensor: GGUFTensor, gguf: ModuleType) -> Finding | None:
    """Return the finding of a tensor of unknown type, or with partial blocks in a row."""
    if not _is_type(gguf, tensor.kind):
        text = f"its type has the number {tensor.kind}"
        return broken("gguf-type", tensor.name, text)
    kind = gguf.GGMLQuantizationType(tensor.kind)
    # the first axis of a shape is the fastest, so that it is the length of a row
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    if tensor.shape and tensor.shape[0] % block:
        text = f"rows of {tensor.shape[0]} are no whole blocks of {block} ({kind.name})"
        return broken("gguf-type", tensor.name, text)
    return None


def _size_of(tensor: GGUFTensor, gguf: ModuleType) -> int:
    """Return the size of a tensor's values in bytes."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.kind)]
    # rows are whole blocks by now, so that the division leaves no rest
    count: int = prod(tensor.shape) // block * size
    return count


def _misplaced(
    file: str,
    header: GGUFHeader,
    tensor: GGUFTensor,
    place: int,
    size: int,
) -> Finding | None:
    """Return the finding of a tensor at a wrong offset, or beyond the end of the file.

    Args:
        file: name of the file.
        header: header of the file.
        tensor: the tensor.
        place: offset behind the tensors before it, in bytes.
        size: size of its values in bytes.
    """
    if tensor.offset != place:
        text = f"it begins at {tensor.offset} instead of {place}"
        return broken("gguf-place", tensor.name, text)
    return _beyond_the_end(file, header, tensor, size)


def _beyond_the_end(
    file: str,
    header: GGUFHeader,
    tensor: GGUFTensor,
    size: int,
) -> Finding | None:
    """Return the finding of a tensor that reaches beyond the end of the file.

    Args:
        file: name of the file.
        header: header of the file.
        tensor: the tensor.
        size: size of its values in bytes.
    """
    # the data section begins at a multiple of the alignment
    start = ceil_div(header.start, header.alignment) * header.alignment
    if start + tensor.offset + size > header.size:
        text = f"it has {header.size} bytes and ends within {tensor.name}"
        return broken("gguf-damaged", file, text)
    return None


def _key_findings(model: GGUFModel, gguf: ModuleType | None) -> Iterator[Finding]:
    """Yield an unknown architecture, or missing metadata."""
    family = model.architecture
    if not family or not _is_family(family, gguf):
        text = f"general.architecture is {family!r}"
        yield broken("gguf-architecture", model.name, text)
        return
    # other families have other keys, but all count their blocks
    keys = _KEYS if family in _DENSE else ("block_count",)
    wanted = [f"{family}.{key}" for key in keys]
    for key in excluding([*wanted, "tokenizer.ggml.model"], model.metadata):
        yield broken("gguf-key", model.name, f"there is no {key}")


def _is_family(name: str, gguf: ModuleType | None) -> bool:
    """Return whether llama.cpp has a family; without gguf, that is not known."""
    # the table belongs to the installed package, which may be older than llama.cpp
    return gguf is None or name in gguf.MODEL_ARCH_NAMES.values()


def _unknown_findings(model: GGUFModel, gguf: ModuleType) -> Iterator[Finding]:
    """Yield tensors unknown to the architecture."""
    # gguf has the names by number
    families = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    tensors = gguf.MODEL_TENSORS[families[model.architecture]]
    known = set(values_at(gguf.TENSOR_NAMES, tensors))
    for name in model.tensors:
        if _name_in_table(name) not in known:
            text = f"{model.architecture} has no such tensor"
            yield broken("gguf-tensor-unknown", name, text)


def _name_in_table(name: str) -> str:
    """Return the name of a tensor in the tables of gguf.

    >>> _name_in_table("blk.3.attn_q.weight")
    'blk.{bid}.attn_q'
    """
    # ".weight" or ".bias" is cut off; only the first number is that of a block
    return re.sub(r"\.\d+\.", ".{bid}.", name.rpartition(".")[0], count=1)


def _missing_findings(model: GGUFModel) -> Iterator[Finding]:
    """Yield missing tensors, for families with a table of tensors."""
    family, metadata = model.architecture, model.metadata
    if family not in _DENSE:
        return
    count = metadata.get(f"{family}.block_count")
    has_experts = bool(metadata.get(f"{family}.expert_count", 0))
    # output.weight may be missing: llama.cpp takes the embedding then
    names = ["token_embd.weight", "output_norm.weight"]
    # a missing count has its finding by ``_key_findings``
    if type(count) is int:
        for number in range(min(count, _MOST_BLOCKS)):
            parts = (*_BLOCK, *_FEED_FORWARD[has_experts])
            names += [f"blk.{number}.{part}.weight" for part in parts]
    for name in excluding(names, model.tensors):
        text = f"{family} with {count} blocks needs it"
        yield broken("gguf-tensor-missing", name, text)
