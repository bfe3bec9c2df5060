"""Headers of GGUF files: metadata, and names, types, shapes and offsets of tensors.

Every step is checked against the file. The format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from quark_onnx.common.errors import ModelError
from quark_onnx.torch.validate.header import refuse_pointer

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
        found = self.metadata.get("general.alignment", 32)
        return found if isinstance(found, int) else 0

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
                + ("big-endian" if swapped else f"{VERSIONS} are read"),
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
