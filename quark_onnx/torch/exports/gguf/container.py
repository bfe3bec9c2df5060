"""GGUF container: write tensors in sequence, verify, then rename."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from calibrators.scratch import ScratchFolder, followed
from quark_onnx.common.errors import ModelError, system_reason
from quark_onnx.torch.validate.llama_cpp import place_findings, read_gguf

if TYPE_CHECKING:
    from gguf import GGUFWriter


class TensorToWrite(NamedTuple):
    """Tensor to write, with a function that computes the data."""

    name: str
    type: str
    shape: tuple[int, ...]
    nbytes: int
    data: Callable[[], Any]


@contextmanager
def staged(path: Path) -> Iterator[Path]:
    """Yield a temporary file that is renamed to ``path`` on success.

    The temporary file is removed after an error. A link stays: the file that it leads to is
    replaced.

    Raises:
        ModelError: the file cannot be written.
    """
    try:
        path = followed(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        # In the same parent, so that the replacement stays on one file system.
        with ScratchFolder(path.parent, path.name) as folder:
            temporary = folder / path.name
            yield temporary
            temporary.replace(path)
    except OSError as error:
        raise ModelError(
            f"{path} cannot be written: {system_reason(error)}",
        ) from error


def writer(path: Path, architecture: str, name: str, kind: str) -> GGUFWriter:
    """Open a gguf.GGUFWriter, and write the general metadata.

    Args:
        path: the file.
        architecture: llama.cpp's name of the architecture.
        name: the name of the model.
        kind: the type of most tensors.
    """
    import gguf

    gguf_writer = gguf.GGUFWriter(path, architecture)
    gguf_writer.add_type("model")
    gguf_writer.add_name(name)
    # The file type of MXFP4 bears the name of mixtures of experts.
    special = {"F32": "ALL_F32", "MXFP4": "MOSTLY_MXFP4_MOE"}
    gguf_writer.add_file_type(gguf.LlamaFileType[special.get(kind, f"MOSTLY_{kind}")])
    gguf_writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    return gguf_writer


def write(writer: GGUFWriter, entries: Sequence[TensorToWrite]) -> None:
    """Write the tensors to a gguf.GGUFWriter with its metadata, and close it.

    One tensor is in memory at a time.
    """
    import gguf

    try:
        for entry in entries:
            kind = gguf.GGMLQuantizationType[entry.type]
            writer.add_tensor_info(
                entry.name,
                entry.shape,
                # With uint8, gguf would take the shape for that of packed bytes.
                np.dtype(np.float32),
                entry.nbytes,
                kind,
            )
        # The information on all tensors stands before the values of the first one.
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for entry in entries:
            writer.write_tensor_data(entry.data())
    finally:
        writer.close()


def verify(path: Path, entries: Sequence[TensorToWrite]) -> None:
    """Read a file back.

    Raises:
        ModelError: the content differs from the written one, for instance on a full disk.
    """
    import gguf

    try:
        header = read_gguf(path)
    except ModelError as error:
        raise ModelError(
            f"{path.name} reads back damaged: {error}; is the disk full?",
        ) from error
    for finding in place_findings(path.name, header, gguf):
        raise ModelError(
            f"{path.name} reads back damaged: {finding.found}; is the disk full?"
        )
    # GGUF lists the fastest axis first.
    stored = {
        tensor.name: (tensor.kind, tensor.shape[::-1]) for tensor in header.tensors
    }
    written = {
        entry.name: (gguf.GGMLQuantizationType[entry.type], entry.shape)
        for entry in entries
    }
    if stored != written:
        raise ModelError(
            f"{path.name} reads back with other tensors than were written; is the disk full?",
        )
