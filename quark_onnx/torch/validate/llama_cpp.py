"""Checks of GGUF files for llama.cpp: header, metadata, types, offsets and tensors.

Headers hold metadata, and names, types, shapes and offsets of tensors. Every step is checked
against the file. gguf.GGUFReader trusts the lengths in a file: a damaged one fills the memory. It
also makes an array of each token, which takes 9 s for a vocabulary of 128,000. The format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from quark_onnx.common.containers import grouped_by
from quark_onnx.common.errors import ModelError
from quark_onnx.torch.runtime.safetensors_header import refuse_pointer
from quark_onnx.torch.validate.finding import Finding
from quark_onnx.torch.validate.layer_checks import ceil_div
from quark_onnx.torch.validate.rules import broken

#: Version 1 has counts of 32 bits; llama.cpp does not read it any more.
VERSIONS = (2, 3)
#: Format characters of ``struct`` by the number of a metadata type; 8 is a string, 9 an array.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
#: GGML_MAX_DIMS of ggml.
_MOST_DIMENSIONS = 4


@dataclass(frozen=True)
class GGUFTensor:
    """Tensor in the header of a GGUF file.

    Attributes:
        name: name such as "blk.0.attn_q.weight".
        shape: shape, the fastest axis first.
        kind: number of the type.
        offset: offset of the values, in bytes from the start of the data section.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class GGUFHeader:
    """Header of a GGUF file.

    Attributes:
        version: version of the format.
        metadata: metadata by key; for an array only the length.
        tensors: tensors in the order of the file.
        start: end of the header in bytes, before the alignment of the data section.
        size: size of the file in bytes.
    """

    version: int
    metadata: dict[str, Any]
    tensors: tuple[GGUFTensor, ...]
    start: int
    size: int

    @property
    def alignment(self) -> int:
        """The alignment of values in bytes."""
        # 32 is the specification's default; 0 stands for a value that is no integer, and is
        # reported
        alignment = self.metadata.get("general.alignment", 32)
        return alignment if isinstance(alignment, int) else 0

    @property
    def architecture(self) -> str:
        """The family of the model."""
        return str(self.metadata.get("general.architecture", ""))


def read_gguf(file: Path) -> GGUFHeader:
    """Read a header without the values.

    Args:
        file: a GGUF file, little-endian.

    Returns:
        The header. The metadata holds the length of an array in place of the array.

    Raises:
        ModelError: the file is truncated, damaged, or not a GGUF file; the message gives the reason
            without the file name.
    """
    size = file.stat().st_size
    refuse_pointer(file)
    with file.open("rb") as stream:
        reader = _Reader(stream, size)
        if reader.bytes(4) != b"GGUF":
            raise ModelError("it does not begin with the letters GGUF")
        version = reader.number("I")
        if version not in VERSIONS:
            # the magic has the same bytes in both orders; only the version shows a big-endian file
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            raise ModelError(
                f"version {version}: "
                + ("big-endian" if swapped else f"{VERSIONS} are read")
            )
        # the order in the file: number of tensors, number of metadata pairs
        count, pairs = reader.number("Q"), reader.number("Q")
        metadata = dict[str, Any]()
        for _ in range(pairs):
            key = reader.string()
            if key in metadata:
                raise ModelError(f"the metadata has {key!r} twice")
            metadata[key] = reader.value(reader.number("I"))
        tensors = dict[str, GGUFTensor]()
        for _ in range(count):
            tensor = reader.tensor()
            if tensor.name in tensors:
                raise ModelError(f"there are two tensors {tensor.name!r}")
            tensors[tensor.name] = tensor
        return GGUFHeader(
            version,
            metadata,
            tuple(tensors.values()),
            # the values begin here, after padding to the alignment
            stream.tell(),
            size,
        )


class _Reader:
    """Reader of little-endian values, with bounds checks."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self.stream, self.size = stream, size

    def bytes(self, count: int) -> bytes:
        self._check(count)
        # complete: the check has compared the count with the size of the file
        return self.stream.read(count)

    def skip(self, count: int) -> None:
        self._check(count)
        self.stream.seek(count, 1)

    def _check(self, count: int) -> None:
        # before reading, so that a damaged length of 2**60 bytes allocates nothing
        if count > self.size - self.stream.tell():
            raise ModelError(f"it ends within its header: {self.size} bytes")

    def number(self, form: str) -> Any:
        # "<" stands for little-endian without padding between fields
        return struct.unpack(f"<{form}", self.bytes(struct.calcsize(f"<{form}")))[0]

    def string(self) -> str:
        # a damaged name must be reported, not raise a UnicodeDecodeError
        return self.bytes(self.number("Q")).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind != _ARRAY:
            raise ModelError(f"the metadata has the unknown type {kind}")
        # vocabularies have 100,000s of entries that no rule needs, so that arrays are skipped
        inner, count = self.number("I"), self.number("Q")
        if inner in _SCALARS:
            self.skip(count * struct.calcsize(f"<{_SCALARS[inner]}"))
        elif inner == _STRING:
            for _ in range(count):
                # every string has its own length in front, so that strings can be skipped only one
                # by one
                self.skip(self.number("Q"))
        else:
            # the specification allows arrays of arrays; gguf.cpp of llama.cpp refuses them, too
            raise ModelError(f"the metadata has an array of the unknown type {inner}")
        return count

    def tensor(self) -> GGUFTensor:
        name, dimensions = self.string(), self.number("I")
        if dimensions > _MOST_DIMENSIONS:
            raise ModelError(f"{name!r} has {dimensions} dimensions")
        shape = tuple(self.number("Q") for _ in range(dimensions))
        return GGUFTensor(name, shape, self.number("I"), self.number("Q"))


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
    def first(self) -> GGUFHeader:
        """Header of the first part, in which gguf-split writes the model's metadata."""
        return next(iter(self.headers.values()))

    @property
    def tensors(self) -> dict[str, GGUFTensor]:
        """Tensors of the model by name."""
        headers = self.headers.values()
        return {tensor.name: tensor for header in headers for tensor in header.tensors}


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
    return [_read(parts) for parts in parts_of.values()]


def findings(model: GGUFModel) -> Iterator[Finding]:
    """Yield errors of llama.cpp in a model."""
    yield from model.damage
    if not model.headers:
        return
    # once for all headers: the import takes a while, and may fail
    gguf = gguf_package()
    for file, header in model.headers.items():
        yield from place_findings(file, header, gguf)
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
    elif model.first.architecture in gguf.MODEL_ARCH_NAMES.values():
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


def place_findings(
    file: str, header: GGUFHeader, gguf: ModuleType | None
) -> Iterator[Finding]:
    """Yield the first tensor with a wrong place or type; the places of later ones follow from it.

    Without the package gguf, the sizes of types are not known.
    """
    align = header.alignment
    # ggml masks offsets with align - 1
    if align <= 0 or align & (align - 1):
        text = f"general.alignment is {align}, no power of two"
        yield broken("gguf-place", file, text)
        return
    # the data section begins at a multiple of the alignment, and offsets count from there
    start = ceil_div(header.start, align) * align
    place = 0
    for tensor in header.tensors:
        offset = tensor.offset
        rule, text = "gguf-place", ""
        # of an unknown size, a tensor has one byte at least
        size = 1
        if offset % align:
            text = f"it begins at {offset}, which {align} does not divide"
        elif gguf is not None:
            rule = "gguf-type"
            text, size = _type_problem(tensor, gguf)
            if not text and offset != place:
                rule, text = "gguf-place", f"it begins at {offset} instead of {place}"
        if text:
            yield broken(rule, tensor.name, text)
            return
        if start + offset + size > header.size:
            text = f"it has {header.size} bytes and ends within {tensor.name}"
            yield broken("gguf-damaged", file, text)
            return
        # every tensor begins at a multiple of the alignment
        place += ceil_div(size, align) * align


def _type_problem(tensor: GGUFTensor, gguf: ModuleType) -> tuple[str, int]:
    """Return the problem of a tensor's type, empty without one, and the size in bytes."""
    if not _is_type(gguf, tensor.kind):
        return f"its type has the number {tensor.kind}", 0
    kind = gguf.GGMLQuantizationType(tensor.kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    # the first axis of a shape is the fastest, so that it is the length of a row
    if tensor.shape and tensor.shape[0] % block:
        row = tensor.shape[0]
        return f"rows of {row} are no whole blocks of {block} ({kind.name})", 0
    return "", prod(tensor.shape) // block * size


def _key_findings(model: GGUFModel, gguf: ModuleType | None) -> Iterator[Finding]:
    """Yield an unknown architecture, or missing metadata."""
    family = model.first.architecture
    # the table belongs to the installed package, which may be older than llama.cpp
    is_known = gguf is None or family in gguf.MODEL_ARCH_NAMES.values()
    if not family or not is_known:
        text = f"general.architecture is {family!r}"
        yield broken("gguf-architecture", model.name, text)
        return
    # other families have other keys, but all count their blocks
    keys = _KEYS if family in _DENSE else ("block_count",)
    wanted = [f"{family}.{key}" for key in keys]
    for key in (*wanted, "tokenizer.ggml.model"):
        if key not in model.first.metadata:
            yield broken("gguf-key", model.name, f"there is no {key}")


def _unknown_findings(model: GGUFModel, gguf: ModuleType) -> Iterator[Finding]:
    """Yield tensors unknown to the architecture."""
    # gguf has the names by number
    families = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    tensors = gguf.MODEL_TENSORS[families[model.first.architecture]]
    expected = {gguf.TENSOR_NAMES[tensor] for tensor in tensors}
    for name in model.tensors:
        # "blk.3.attn_q.weight" is "blk.{bid}.attn_q" there: only the first number is that of a
        # block
        base = name.rpartition(".")[0]
        if re.sub(r"\.\d+\.", ".{bid}.", base, count=1) not in expected:
            text = f"{model.first.architecture} has no such tensor"
            yield broken("gguf-tensor-unknown", name, text)


def _missing_findings(model: GGUFModel) -> Iterator[Finding]:
    """Yield missing tensors, for families with a table of tensors."""
    family, metadata = model.first.architecture, model.first.metadata
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
    tensors = model.tensors
    for name in names:
        if name not in tensors:
            text = f"{family} with {count} blocks needs it"
            yield broken("gguf-tensor-missing", name, text)
