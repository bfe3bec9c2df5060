"""Read and write model files: clear errors, and verified atomic writes."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from google.protobuf.message import EncodeError
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto
from onnx.external_data_helper import uses_external_data

from calibrators.limits import regular_size
from calibrators.onnx_runtime.external_tensors import is_held, load_values, locate
from calibrators.onnx_runtime.tensors import (
    estimate_bytes,
    tensor_bytes,
    tensor_size,
    write_external,
)
from calibrators.scratch import ScratchFolder, followed
from quark_onnx.check.fields import check_tensor
from quark_onnx.check.model import check_model, check_stored
from quark_onnx.common.errors import ModelError, reading_error, system_reason
from quark_onnx.files.model_file import (
    MALFORMED,
    MESSAGE,
    read_model,
    write_model,
    written_by_reference,
)
from quark_onnx.graph import store
from quark_onnx.graph.node import subgraphs

logger = logging.getLogger(__name__)

#: Larger models (in bytes) store tensors in a separate file, as a protobuf message ends at 2 GiB.
EXTERNAL_DATA_LIMIT = 1_900_000_000


@dataclass(frozen=True)
class LoadedModel:
    """A model that passed ``check_model``.

    Attributes:
        model: the model.
        notes: the corrections of declared shapes, for the report.
        arrays: values of held tensors of the model, which last as long as these arrays.
    """

    model: ModelProto
    notes: list[str]
    arrays: list[NDArray[Any]]


def load(model: str | Path | ModelProto) -> ModelProto:
    """Return a checked model from a path, or the checked model itself, which is never changed.

    Declared shapes that contradict the operators are corrected; a model is copied for that. Large
    tensors of a large model stay in their files, by absolute paths, until their values are needed.

    Args:
        model: the path or the model.

    Raises:
        ModelError: the file or its external data is missing or malformed, or the model fails a
            check; the message names the file and the tensor or node.
    """
    return open_model(model).model


def open_model(model: str | Path | ModelProto, *, hold: bool = False) -> LoadedModel:
    """Return a checked model with the corrections of declared shapes, which are logged.

    Args:
        model: as for ``load``.
        hold: keep large initializers of a file as arrays beside the message.

    Raises:
        ModelError: as for ``load``.
    """
    arrays = list[NDArray[Any]]()
    if isinstance(model, ModelProto):
        checked = check_model(model, _require_no_files)
    elif isinstance(model, str | Path):
        path = Path(model)
        stored, arrays = _read_message(path, hold=hold)
        checked = check_model(stored, partial(_with_values, path), path)
    else:
        raise ModelError(
            f"model is a {type(model).__name__}; it must be a path or a ModelProto (of bytes:"
            " onnx.load_from_string)",
        )
    for note in checked.notes:
        logger.warning("%s", note)
    return LoadedModel(checked.model, checked.notes, arrays)


def _require_no_files(model: ModelProto) -> ModelProto:
    """Return a model in memory, of which no tensor may lie in a file.

    Raises:
        ModelError: a tensor lies in a file.
    """
    files = external_files(model)
    if files:
        raise ModelError(
            f"the weights of the model are not loaded, they lie in {sorted(files)};"
            " pass its path",
        )
    return model


def _with_values(path: Path, model: ModelProto) -> ModelProto:
    """Load the external tensors of a model in place, and return the model.

    Args:
        path: the model file.
        model: the model, whose fields have been checked.
    """
    large = estimate_bytes(model) > store.LARGE_MODEL
    for tensor, initializer in tensors_with_data(model):
        # Held tensors use the external fields, too, to refer to an array of this process.
        if not uses_external_data(tensor) or is_held(tensor):
            continue
        file, offset, length = _find(tensor, path)
        size = tensor_bytes(tensor)
        # A tensor of a short file is loaded, so that ``check_tensor`` reports the missing bytes.
        if large and initializer and size >= store.LEAST and length == size:
            locate(tensor, file, offset, length)
            continue
        _load_external(tensor, file, offset, length)
        check_tensor(tensor)
    return model


def read_stored(path: Path) -> ModelProto:
    """Read a model file without external data.

    Args:
        path: the model file, protobuf whatever its suffix.

    Raises:
        ModelError: the file is missing or malformed; the message names it.
    """
    model, _ = _read_message(path)
    check_stored(model, path)
    return model


def _read_message(
    path: Path, *, hold: bool = False
) -> tuple[ModelProto, list[NDArray[Any]]]:
    """Read the message of a model file, with the arrays of held tensors.

    Raises:
        ModelError: the file is missing, or holds no graph.
    """
    _check_file(path)
    split = read_model(path) if hold else None
    model, arrays = split or (_parsed(path), [])
    if not model.HasField("graph") or (not model.opset_import and not model.graph.node):
        raise ModelError(f"model file {path} holds no graph; is it an ONNX model?")
    return model, arrays


def _parsed(path: Path) -> ModelProto:
    """Read a model file by protobuf."""
    with _reading(path):
        data = path.read_bytes()
    model = ModelProto()
    try:
        model.ParseFromString(data)
    except MALFORMED as error:
        kind = "truncated or not an ONNX model"
        if data[:4] == b"PK\x03\x04":
            kind = "a zip archive, unpack it first"
        raise ModelError(f"model file {path} is {kind}") from error
    return model


def _step_for(folder: Path) -> str:
    """Return what to do where a folder stands in place of a model file."""
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        return (
            "for a language model, 'quark-onnx llm ptq FLOAT -o OUT --scheme SCHEME"
            " --evaluate TEXT' quantizes and compares with the float model"
        )
    return "give the .onnx file in it"


def _check_file(path: Path) -> None:
    """Check that a file is there, and no larger than a protobuf message can be."""
    with _reading(path):
        if path.is_dir():
            raise ModelError(f"{path} is a folder; {_step_for(path)}")
        size = regular_size(path)
        if size > MESSAGE:
            raise ModelError(
                f"model file {path} has {size:,} bytes; a protobuf message ends at 2"
                " GB: use external data",
            )


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Convert errors in reading a model file to ModelError with its path."""
    try:
        yield
    except ModelError:  # a ValueError, too
        raise
    except (OSError, ValueError) as error:
        # A ValueError is about a path that no file can have.
        raise reading_error(
            ModelError,
            f"model file {path} cannot be read: {system_reason(error)}",
            error,
        ) from error


def tensors_with_data(model: ModelProto) -> Iterator[tuple[TensorProto, bool]]:
    """Yield the tensors of a model, also in subgraphs and functions; True for initializers."""
    yield from _graph_tensors(model.graph)
    for function in model.functions:
        # Initializers in functions are not those of the model's graphs.
        for node in function.node:
            for tensor, _ in _node_tensors(node):
                yield tensor, False


def _graph_tensors(graph: GraphProto) -> Iterator[tuple[TensorProto, bool]]:
    """Yield the tensors of a graph, also in bodies; True for initializers.

    The values and indices of a sparse tensor are two tensors.
    """
    for tensor in graph.initializer:
        yield tensor, True
    for sparse in graph.sparse_initializer:
        yield from ((sparse.values, False), (sparse.indices, False))
    for node in graph.node:
        yield from _node_tensors(node)


def _node_tensors(node: NodeProto) -> Iterator[tuple[TensorProto, bool]]:
    """Yield the tensors in a node's attributes and bodies; True for initializers of bodies."""
    for attribute in node.attribute:
        if attribute.HasField("t"):
            yield attribute.t, False
        for tensor in attribute.tensors:
            yield tensor, False
        # An unset field reads as an empty message, whose tensors have no external data.
        for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
            yield from ((sparse.values, False), (sparse.indices, False))
    for graph in subgraphs(node):
        yield from _graph_tensors(graph)


def _find(tensor: TensorProto, model: Path) -> tuple[Path, int, int]:
    """Return file, offset and length of an external tensor's values.

    The offset in bytes is at most the size of the file. The length is the number of bytes that the
    shape needs, or less if the file ends before.

    Args:
        model: the model file, whose folder the location is relative to.

    Raises:
        ModelError: an entry is malformed, the location is forbidden, the file is missing, or the
            length contradicts the shape; the message names tensor and file.
    """
    info = _external_info(tensor)
    offset = _whole(tensor, info, "offset") or 0
    # The length is optional.
    length = _whole(tensor, info, "length")
    path = _locate(tensor, info.get("location", ""), model)
    where = f"tensor {tensor.name!r}: external data file {path}"
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"{where} is a folder or a device, not a file")
        if status.st_nlink > 1:
            raise ModelError(
                f"{where} has {status.st_nlink} hard links, so that it may be another"
                " file of this machine under a harmless name (onnx refuses it, too);"
                " replace it by a copy of itself",
            )
        available = max(0, status.st_size - offset)
        if available < (length or 0):
            raise ModelError(
                f"{where} ends after {available} of {length} bytes from offset"
                f" {offset}",
            )
    except OSError as error:
        raise reading_error(
            ModelError, f"{where} cannot be read: {error.strerror}", error
        ) from error
    check_tensor(tensor)
    # The shape decides how many bytes are needed; an explicit length must agree.
    size = tensor_size(tensor)
    if length not in (None, size):
        raise ModelError(
            f"tensor {tensor.name!r} of shape {list(tensor.dims)} needs {size:,} bytes,"
            f" and its external data has the length {length:,}",
        )
    return path, min(offset, status.st_size), min(available, size)


def _load_external(tensor: TensorProto, path: Path, offset: int, length: int) -> None:
    """Load the values of an external tensor into the tensor, and remove its reference to the file.

    Fewer bytes than ``length`` are loaded if the file ends before.
    """
    try:
        locate(tensor, path, offset, length)
        load_values(tensor)
    except OSError as error:
        where = f"tensor {tensor.name!r}: external data file {path}"
        raise ModelError(f"{where} cannot be read: {error.strerror}") from error


def _whole(tensor: TensorProto, info: dict[str, str], key: str) -> int | None:
    """Return a number among the entries on a tensor's external data; None without the entry.

    Args:
        key: "offset" or "length".

    Raises:
        ModelError: the entry is no whole number of 64 bits.
    """
    text = info.get(key)
    if text is None:
        return None
    # At most 19 digits fit 64 bits.
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise ModelError(
            f"tensor {tensor.name!r}: the {key} of its external data is {text[:80]!r};"
            " it must be a number of bytes",
        )
    return int(text)


def _locate(tensor: TensorProto, location: str, model: Path) -> Path:
    """Return the file of an external tensor, which must lie in the folder of the model.

    If the model is a symbolic link, the file may also lie in the folder of the link's target, as in
    download caches. Other locations may be an attack (CVE-2025-51480).

    Args:
        location: file as the model names it, relative to the model's folder.

    Returns:
        The absolute path, with links resolved.

    Raises:
        ModelError: the location is outside of the folders, or cannot be a file.
    """
    where = f"tensor {tensor.name!r}: external data {location!r}"
    if "\0" in location:
        raise ModelError(f"{where} is not the name of a file")
    # Textual, without links: a ".." that is left over climbs out of the folder.
    normalized = Path(os.path.normpath(location))
    try:
        path = (model.parent / location).resolve()
        folders = [model.parent.resolve(), model.resolve().parent]
    except (OSError, RuntimeError) as error:  # circular links
        raise ModelError(f"{where} cannot be found: {error}") from error
    climbs = normalized.is_absolute() or ".." in normalized.parts
    if climbs or not any(path.is_relative_to(folder) for folder in folders):
        raise ModelError(f"{where} lies outside the model's folder {model.parent}")
    return path


def external_files(model: ModelProto) -> set[str]:
    """Return the files of external tensors, as the model names them."""
    files = set[str]()
    for tensor, _ in tensors_with_data(model):
        info = _external_info(tensor)
        if uses_external_data(tensor) and "location" in info:
            files.add(info["location"])
    return files


def _external_info(tensor: TensorProto) -> dict[str, str]:
    """Return the entries on the external data of a tensor: location, offset and length."""
    return {entry.key: entry.value for entry in tensor.external_data}


def has_external_data(path: Path) -> bool:
    """Return whether a model file has external tensors."""
    return bool(external_files(read_stored(path)))


def data_file(path: Path) -> Path:
    """Return the file for the large tensors of a model that is written to ``path``."""
    return path.with_name(path.name + ".data")


@contextmanager
def staged(
    model: ModelProto,
    path: Path,
    *,
    external: bool,
    source: Path | None = None,
    lean: bool = False,
) -> Iterator[Path]:
    """Write ``model`` to ``path`` atomically, after the ``with`` body has verified the file.

    The files are written into a temporary folder next to ``path``, and renamed at the end. After an
    error, in the writing or in the body, neither a partial file nor the temporary folder is left.
    The body must close the file. A link stays: the file that it leads to is replaced.

    Args:
        model: the model, which is not changed.
        path: the model file; external data goes to ``<name>.data`` next to it.
        external: write external data even below the protobuf limit.
        source: a file of the same model, whose bytes are copied if no external data is needed.
        lean: yield a file that is opened in little memory.

    Yields:
        The temporary model file, or a file that refers to the values in it.
    """
    # A file that could not be read again is never written.
    check_stored(model)
    with _writing(path):
        path = followed(path)
    data = data_file(path).name
    separate = external or estimate_bytes(model) > EXTERNAL_DATA_LIMIT
    if separate and data_file(path).exists() and not _is_own(path, data):
        raise ModelError(
            f"{path} needs {data_file(path)} for its weights, which exists and is not"
            " an earlier output's",
        )
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # In the same folder, as a rename across file systems is not atomic.
        scratch = ScratchFolder(path.parent, path.name)
    with scratch as folder:
        temporary = folder / path.name
        with _writing(path):
            if separate:
                write_external(model, temporary, temporary.with_name(data))
            elif source is not None:
                shutil.copyfile(source, temporary)
            else:
                write_model(model, temporary)
            opened = written_by_reference(temporary) if lean else temporary
        yield opened
        with _writing(path):
            # The data file goes first: a model without its data cannot be loaded.
            if (folder / data).exists():
                (folder / data).replace(path.parent / data)
            else:
                # Before the rename below, since ``_is_own`` reads the earlier model at ``path``.
                with contextlib.suppress(FileNotFoundError):
                    _remove_stale(path, path.parent / data)
            temporary.replace(path)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Convert errors in writing a model file to ModelError with its path."""
    try:
        yield
    except (OSError, EncodeError) as error:
        # An EncodeError is about a message of more than 2 GiB.
        raise ModelError(f"{path} cannot be written: {system_reason(error)}") from error


def _remove_stale(path: Path, data: Path) -> None:
    """Remove the data file of an earlier version of the model in a file."""
    if data.exists() and _is_own(path, data.name):
        data.unlink()


def _is_own(path: Path, data: str) -> bool:
    """Return whether the model in a file has external tensors in a data file.

    False if the file does not exist, or holds no model.
    """
    with contextlib.suppress(ModelError):
        return path.exists() and data in external_files(read_stored(path))
    return False
