"""Models from and to files: read with clear errors, written through a temporary file that is verified first."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, external_data_helper
from onnx.external_data_helper import uses_external_data

from calibrators.session import estimate_bytes
from quark_onnx.errors import ModelError
from quark_onnx.graph.node import subgraphs

#: A protobuf message ends at 2 GiB; above this size tensors go to a file beside the model.
EXTERNAL_DATA_LIMIT = 1_900_000_000
#: Tensors below this size stay inside the model file.
_SMALL_TENSOR = 1024


def read(path: Path) -> ModelProto:
    """The model in a file, external data included.

    Raises:
        ModelError: the file or its external data is missing or malformed; the message names the file and the tensor.
    """
    if path.is_dir():
        raise ModelError(f"{path} is a folder; give the .onnx file in it")
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:  # a ValueError is a path that no file can have
        raise ModelError(f"model file {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    model = ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        kind = "a zip archive, unpack it first" if data[:4] == b"PK\x03\x04" else "truncated or not an ONNX model"
        raise ModelError(f"model file {path} is {kind}") from error
    if not model.HasField("graph") or (not model.opset_import and not model.graph.node):
        raise ModelError(f"model file {path} holds no graph; is it an ONNX model?")
    for tensor in _tensors(model):
        if uses_external_data(tensor):
            _load_external(tensor, path.parent)
    return model


def _tensors(model: ModelProto) -> Iterator[TensorProto]:
    """Every tensor of a model: initializers and attributes, in subgraphs and functions too."""
    yield from _graph_tensors(model.graph)
    for function in model.functions:
        for node in function.node:
            yield from _node_tensors(node)


def _graph_tensors(graph: GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        yield from _node_tensors(node)


def _node_tensors(node: NodeProto) -> Iterator[TensorProto]:
    for attribute in node.attribute:
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
        for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
            yield from (sparse.values, sparse.indices)
    for graph in subgraphs(node):
        yield from _graph_tensors(graph)


def _load_external(tensor: TensorProto, folder: Path) -> None:
    info = {entry.key: entry.value for entry in tensor.external_data}
    location = info.get("location", "")
    path = (folder / location).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ModelError(f"tensor {tensor.name!r}: external data {location!r} lies outside the model's folder {folder}")
    offset = int(info.get("offset", 0))
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(int(info["length"])) if "length" in info else file.read()
    except OSError as error:
        raise ModelError(
            f"tensor {tensor.name!r}: external data file {path} cannot be read: {error.strerror}"
        ) from error
    if "length" in info and len(data) < int(info["length"]):
        raise ModelError(
            f"tensor {tensor.name!r}: external data file {path} ends after {len(data)} of {info['length']} bytes "
            f"from offset {offset}"
        )
    tensor.raw_data = data
    del tensor.external_data[:]
    tensor.ClearField("data_location")


def external_files(model: ModelProto) -> set[str]:
    """The files, as the model names them, that hold tensors which are not loaded."""
    entries = [entry for tensor in _tensors(model) if uses_external_data(tensor) for entry in tensor.external_data]
    return {entry.value for entry in entries if entry.key == "location"}


def has_external_data(path: Path) -> bool:
    """Whether any tensor of the model in a file lies in another file."""
    return bool(external_files(onnx.load(str(path), load_external_data=False)))


def data_file(path: Path) -> Path:
    """Where the large tensors of a model that is written to ``path`` go."""
    return path.with_name(path.name + ".data")


@contextmanager
def staged(model: ModelProto, path: Path, *, external: bool) -> Iterator[Path]:
    """Write ``model`` to ``path`` atomically: the body of the ``with`` gets the file to verify before it is renamed.

    The files are written into a temporary folder beside ``path``. Whatever goes wrong, in the writing or in the body,
    neither a half-written file nor the temporary folder is left behind. The body must have closed the file at its end.

    Args:
        model: what to write; it is not changed.
        path: the model file; external data goes to ``<name>.data`` beside it.
        external: write external data even below the protobuf limit.
    """
    data = data_file(path).name
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.")
    with folder as name:
        temporary = Path(name) / path.name
        with _writing(path):
            if external or estimate_bytes(model) > EXTERNAL_DATA_LIMIT:
                stored = ModelProto()
                stored.CopyFrom(model)  # saving moves the tensors out of the object
                external_data_helper.convert_model_to_external_data(
                    stored, location=data, size_threshold=_SMALL_TENSOR, convert_attribute=False
                )
                onnx.save_model(stored, str(temporary))
            else:
                onnx.save_model(model, str(temporary))
        yield temporary
        with _writing(path):
            if (Path(name) / data).exists():
                (Path(name) / data).replace(path.parent / data)
            else:
                with contextlib.suppress(FileNotFoundError):
                    _remove_stale(path, path.parent / data)
            temporary.replace(path)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelError(f"{path} cannot be written: {error.strerror or error}") from error


def _remove_stale(path: Path, data: Path) -> None:
    """Data of an earlier version of the same output would only mislead."""
    with contextlib.suppress(DecodeError):  # what is no model has no data
        if path.exists() and data.exists() and has_external_data(path):
            data.unlink()
