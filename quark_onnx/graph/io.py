"""Models from and to files: read with clear errors, written through a temporary file that is
verified first.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from google.protobuf.message import DecodeError, EncodeError
from onnx import GraphProto, ModelProto, NodeProto, TensorProto
from onnx.external_data_helper import uses_external_data

from calibrators.limits import regular_size
from calibrators.onnx_runtime.external_tensors import load_values, locate
from calibrators.onnx_runtime.session import (
    estimate_bytes,
    initializers,
    tensor_bytes,
    tensor_size,
    write_external,
)
from calibrators.scratch import ScratchFolder
from quark_onnx.errors import ModelError
from quark_onnx.graph import store
from quark_onnx.graph.fields import check_fields, check_tensor
from quark_onnx.graph.node import subgraphs
from quark_onnx.graph.sizes import check_sizes
from quark_onnx.graph.variadic import check_variadic

#: Bytes that a protobuf message can have.
_MESSAGE = 2**31 - 1
#: A protobuf message ends at 2 GiB; above this size tensors go to a file beside the model.
EXTERNAL_DATA_LIMIT = 1_900_000_000


def read(path: Path) -> ModelProto:
    """The model in a file, external data included.

    Large tensors of a large model stay in their files, by absolute paths, until somebody needs
    their values.

    Raises:
        ModelError: the file or its external data is missing or malformed; the message names the
            file and the tensor.
    """
    model = read_stored(path)
    large = estimate_bytes(model) > store.LARGE_MODEL
    for tensor, initializer in _tensors(model):
        if uses_external_data(tensor):
            place = _find(tensor, path)
            if (
                large
                and initializer
                and tensor_bytes(tensor) >= store.LEAST
                and place[2] == tensor_bytes(tensor)
            ):
                locate(tensor, *place)
            else:
                _load_external(tensor, *place)
                check_tensor(tensor)
    check_sizes(model)
    return model


def loaded(model: ModelProto) -> ModelProto:
    """The model with everything in memory; itself if it is."""
    if not any(map(uses_external_data, initializers(model.graph))):
        return model
    result = ModelProto()
    result.CopyFrom(model)
    for tensor in initializers(result.graph):
        if uses_external_data(tensor):
            load_values(tensor)
    return result


def load(model: str | Path | ModelProto) -> ModelProto:
    """A model from a path, or the model itself, which is never changed."""
    if isinstance(model, ModelProto):
        if files := external_files(model):
            raise ModelError(
                f"the weights of the model are not loaded, they lie in {sorted(files)};"
                " pass its path",
            )
        check_variadic(model)
        check_fields(model)
        check_sizes(model)
        return model
    if isinstance(model, str | Path):
        return read(Path(model))
    raise ModelError(
        f"model is a {type(model).__name__}; it must be a path or a ModelProto",
    )


def read_stored(path: Path) -> ModelProto:
    """The model in a file as it is stored there: what lies in other files is not loaded.

    It is protobuf, whatever the suffix of the file.

    Raises:
        ModelError: the file is missing or malformed; the message names it.
    """
    try:
        if path.is_dir():
            raise ModelError(f"{path} is a folder; give the .onnx file in it")
        if (size := regular_size(path)) > _MESSAGE:
            raise ModelError(
                f"model file {path} has {size:,} bytes; a protobuf message ends at 2"
                " GB: use external data",
            )
        data = path.read_bytes()
    except (
        OSError,
        ValueError,
    ) as error:  # a ValueError is a path that no file can have
        raise ModelError(
            f"model file {path} cannot be read:"
            f" {getattr(error, 'strerror', None) or error}",
        ) from error
    model = ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        kind = (
            "a zip archive, unpack it first"
            if data[:4] == b"PK\x03\x04"
            else "truncated or not an ONNX model"
        )
        raise ModelError(f"model file {path} is {kind}") from error
    if not model.HasField("graph") or (not model.opset_import and not model.graph.node):
        raise ModelError(f"model file {path} holds no graph; is it an ONNX model?")
    try:
        check_variadic(model)
    except ModelError as error:
        raise ModelError(f"model file {path} is not valid: {error}") from error
    try:
        check_fields(model)
    except ModelError as error:
        raise ModelError(f"model file {path} is damaged: {error}") from error
    return model


def _tensors(model: ModelProto) -> Iterator[tuple[TensorProto, bool]]:
    """Every tensor of a model, in subgraphs and functions too, and whether it is an initializer,
    not an attribute.
    """
    yield from _graph_tensors(model.graph)
    for function in model.functions:
        for node in (
            function.node
        ):  # whatever is in there, it is no initializer of the model's own graphs
            yield from ((tensor, False) for tensor, _ in _node_tensors(node))


def _graph_tensors(graph: GraphProto) -> Iterator[tuple[TensorProto, bool]]:
    yield from ((tensor, True) for tensor in graph.initializer)
    for sparse in graph.sparse_initializer:
        yield from ((sparse.values, False), (sparse.indices, False))
    for node in graph.node:
        yield from _node_tensors(node)


def _node_tensors(node: NodeProto) -> Iterator[tuple[TensorProto, bool]]:
    for attribute in node.attribute:
        if attribute.HasField("t"):
            yield attribute.t, False
        yield from ((tensor, False) for tensor in attribute.tensors)
        for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
            yield from ((sparse.values, False), (sparse.indices, False))
    for graph in subgraphs(node):
        yield from _graph_tensors(graph)


def _find(tensor: TensorProto, model: Path) -> tuple[Path, int, int]:
    """The file that holds the values of a tensor of the model in a file, and the offset and the
    length there.
    """
    info = {entry.key: entry.value for entry in tensor.external_data}
    offset, length = _whole(tensor, info, "offset"), _whole(tensor, info, "length")
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
        rest = max(0, status.st_size - (offset or 0))
        if rest < (length or 0):
            raise ModelError(
                f"{where} ends after {rest} of {length} bytes from offset"
                f" {offset or 0}",
            )
    except OSError as error:
        raise ModelError(f"{where} cannot be read: {error.strerror}") from error
    check_tensor(tensor)
    size = tensor_size(tensor)
    if length not in (None, size):
        raise ModelError(
            f"tensor {tensor.name!r} of shape {list(tensor.dims)} needs {size:,} bytes,"
            f" and its external data has the length {length:,}",
        )
    return (
        path,
        min(offset or 0, status.st_size),
        min(rest, size),
    )  # a length need not be said


def _load_external(tensor: TensorProto, path: Path, offset: int, length: int) -> None:
    """Move the values of a tensor from where they lie into the tensor."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            tensor.raw_data = file.read(length)
    except OSError as error:
        where = f"tensor {tensor.name!r}: external data file {path}"
        raise ModelError(f"{where} cannot be read: {error.strerror}") from error
    del tensor.external_data[:]
    tensor.ClearField("data_location")


def _whole(tensor: TensorProto, info: dict[str, str], key: str) -> int | None:
    text = info.get(key)
    if text is None:
        return None
    if not (
        text.isascii() and text.isdecimal() and len(text) < 20
    ):  # of what 64 bits hold
        raise ModelError(
            f"tensor {tensor.name!r}: the {key} of its external data is {text[:80]!r};"
            " it must be a number of bytes",
        )
    return int(text)


def _locate(tensor: TensorProto, location: str, model: Path) -> Path:
    """The file that holds a tensor: in the folder of the model, or, where the model is a symbolic
    link, in the folder of the file that it leads to, which is how caches lay models out. Anything
    else may be an attack (CVE-2025-51480).
    """
    written = f"tensor {tensor.name!r}: external data {location!r}"
    if "\0" in location:
        raise ModelError(f"{written} is not the name of a file")
    named = os.path.normpath(location)
    try:
        path = (model.parent / location).resolve()
        homes = [model.parent.resolve(), model.resolve().parent]
    except (OSError, RuntimeError) as error:  # links that lead in a circle
        raise ModelError(f"{written} cannot be found: {error}") from error
    climbs = Path(named).is_absolute() or ".." in Path(named).parts
    if climbs or not any(map(path.is_relative_to, homes)):
        raise ModelError(f"{written} lies outside the model's folder {model.parent}")
    return path


def external_files(model: ModelProto) -> set[str]:
    """The files, as the model names them, that hold tensors which are not loaded."""
    entries = [
        entry
        for tensor, _ in _tensors(model)
        if uses_external_data(tensor)
        for entry in tensor.external_data
    ]
    return {entry.value for entry in entries if entry.key == "location"}


def has_external_data(path: Path) -> bool:
    """Whether any tensor of the model in a file lies in another file."""
    return bool(external_files(read_stored(path)))


def data_file(path: Path) -> Path:
    """Where the large tensors of a model that is written to ``path`` go."""
    return path.with_name(path.name + ".data")


@contextmanager
def staged(
    model: ModelProto,
    path: Path,
    *,
    external: bool,
    source: Path | None = None,
) -> Iterator[Path]:
    """Write ``model`` to ``path`` atomically: the body of the ``with`` gets the file to verify
    before it is renamed.

    The files are written into a temporary folder beside ``path``. Whatever goes wrong, in the
    writing or in the body, neither a half-written file nor the temporary folder is left behind. The
    body must have closed the file at its end.

    Args:
        model: what to write; it is not changed.
        path: the model file; external data goes to ``<name>.data`` beside it.
        external: write external data even below the protobuf limit.
        source: a file that holds just this model, whose bytes are copied where it needs no external
            data.
    """
    check_fields(model)  # nothing is written that could not be read again
    data = data_file(path).name
    beside = external or estimate_bytes(model) > EXTERNAL_DATA_LIMIT
    if beside and data_file(path).exists() and not _is_own(path, data):
        raise ModelError(
            f"{path} needs {data_file(path)} for its weights, which exists and is not"
            " an earlier output's",
        )
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = ScratchFolder(path.parent, path.name)
    with scratch as folder:
        temporary = folder / path.name
        with _writing(path):
            if beside:
                write_external(model, temporary, temporary.with_name(data))
            elif source is not None:
                shutil.copyfile(source, temporary)
            else:
                temporary.write_bytes(loaded(model).SerializeToString())
        yield temporary
        with _writing(path):
            if (folder / data).exists():
                (folder / data).replace(path.parent / data)
            else:
                with contextlib.suppress(FileNotFoundError):
                    _remove_stale(path, path.parent / data)
            temporary.replace(path)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except (
        OSError,
        EncodeError,
    ) as error:  # the latter is a message of more than 2 GiB
        raise ModelError(
            f"{path} cannot be written: {getattr(error, 'strerror', None) or error}",
        ) from error


def _remove_stale(path: Path, data: Path) -> None:
    """Data of an earlier version of the same output would only mislead."""
    if data.exists() and _is_own(path, data.name):
        data.unlink()


def _is_own(path: Path, data: str) -> bool:
    """Whether the model in a file keeps tensors in another file of that name.

    Not if there is none.
    """
    with contextlib.suppress(ModelError):
        return path.exists() and data in external_files(read_stored(path))
    return False
