"""Open an onnxruntime session on a model in memory, whatever its size and whatever operators it
embeds.

What does not fit into one protobuf message travels through files.
"""

from __future__ import annotations

import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from calibrators.errors import RuntimeCrash
from calibrators.onnx_runtime import extensions
from calibrators.onnx_runtime.cpu_features import saturates
from calibrators.onnx_runtime.external_tensors import (
    copy_values,
    is_stored,
    location,
    place,
)
from calibrators.onnx_runtime.interrupt import interruptible
from calibrators.onnx_runtime.isolation import current
from calibrators.onnx_runtime.worker import (
    Settings,
    native_session,
    seconds_of_runs,
    session_options,
)
from calibrators.scratch import ScratchFolder

#: A protobuf message ends at 2 GiB; above this estimate a model travels through a file with
#: external data.
PROTOBUF_LIMIT = 1_900_000_000

#: Beside weights of this size the rest of a model does not count.
_LARGE = 100_000_000
#: Tensors below this size stay inside the model file.
_SMALL_TENSOR = 1024
#: External tensors start at multiples of this, as ONNX advises.
PAGE = 4096

#: Entries of onnxruntime's options: int8 weights become uint8 ones, whose products are added up in
#: 32 bits; and Q/DQ pairs and what stands between them are computed one by one.
PRECISE, DEFINED = "session.x64quantprecision", "session.disable_quant_qdq"

logger = logging.getLogger(__name__)


def open_session(  # noqa: PLR0913
    model: onnx.ModelProto | bytes | Path,
    *,
    threads: int = 0,
    optimize: bool = True,
    lean: bool = False,
    integers: bool | None = None,
    what: str = "a model",
) -> Any:
    """Open a session on the CPU: ``run``, ``get_inputs`` and ``get_outputs`` of an
    ``onnxruntime.InferenceSession``.

    It runs in another process within a block of ``calibrators.onnx_runtime.isolation.isolated``.
    Elsewhere a signal handler that raises ends a run of the main thread.

    Args:
        model: the model, its serialized bytes, or a file. What a ModelProto has of tensors in files
            stays there.
        threads: threads inside an operator; 0 lets onnxruntime choose.
        optimize: apply onnxruntime's graph optimizations.
        lean: leave weights where they are, in files that are mapped into memory, instead of packing
            them for speed; always so for a ModelProto with tensors in files.
        what: names the model in the error of a crash.
        integers: let onnxruntime make integer operators of those between Q/DQ pairs; it then rounds
            float weights there to 8 bits by scales of its own. True means with the kernels of this
            processor; by default sums of products do not saturate whatever the processor, so that
            all find the same. Where onnxruntime cannot do that, found out here or by the first run,
            it is as with False: the model is computed as ONNX defines it.

    Raises:
        RuntimeCrash: the other process died of the model.
    """
    stored = isinstance(model, onnx.ModelProto) and any(
        map(is_stored, initializers(model.graph)),
    )
    lean = lean or stored

    def opened(entry: str) -> Any:
        settings = Settings(threads, optimize, lean, {entry: "1"} if entry else {})
        return _opened(model, settings, what, stored=stored)

    if integers is None and saturates():
        try:
            return _Unsaturated(opened(PRECISE), lambda: opened(DEFINED))
        except (
            RuntimeCrash
        ):  # as applications would; that it loads in another way helps nobody
            raise
        except Exception as error:  # onnxruntime raises several unrelated types
            logger.debug(
                "without saturation onnxruntime does not load the model: %s",
                error,
            )
            integers = False
    return opened(DEFINED if integers is False else "")


class _Session:
    """An ``onnxruntime.InferenceSession`` in this process, whose runs a signal can end."""

    def __init__(self, source: str | bytes, settings: Settings) -> None:
        options = session_options(settings)
        # onnxruntime 1.20 cannot be told to stop loading
        stop = getattr(options, "set_load_cancellation_flag", lambda _: None)
        self._session = interruptible(
            lambda: native_session(source, options),
            lambda: stop(True),
        )
        self.settings = settings

    def run(self, names: Sequence[str] | None, feeds: Mapping[str, Any]) -> Any:
        import onnxruntime as ort

        options = ort.RunOptions()
        return interruptible(
            lambda: self._session.run(names, feeds, options),
            lambda: setattr(options, "terminate", True),
        )

    def seconds(self, feeds: Mapping[str, Any], runs: int) -> list[float]:
        """Return the seconds that each run takes."""
        return interruptible(
            lambda: seconds_of_runs(self._session, feeds, runs),
            lambda: None,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


class _Unsaturated:
    """A session with uint8 weights, or, where its first run fails, the session that ``reopen``
    makes.

    onnxruntime 1.32 loads weights per channel that it then cannot run: those without a zero point,
    which gets one of the wrong shape, and those that are a MatMul's first input.
    """

    def __init__(self, session: Any, reopen: Callable[[], Any]) -> None:
        self._session = session
        self._reopen: Callable[[], Any] | None = reopen

    def run(self, *arguments: Any, **options: Any) -> Any:
        reopen, self._reopen = (
            self._reopen,
            None,
        )  # which keeps the model in memory no longer than until now
        try:
            return self._session.run(*arguments, **options)
        except RuntimeCrash:
            raise
        except Exception as error:
            if reopen is None:
                raise
            logger.debug(
                "without saturation onnxruntime does not run the model: %s",
                error,
            )
        self._session = reopen()
        return self._session.run(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


def is_defined(session: Any) -> bool:
    """Whether a session keeps Q/DQ pairs and what stands between them apart."""
    return bool(session.settings.entries.get(DEFINED) == "1")


def _opened(
    model: onnx.ModelProto | bytes | Path,
    settings: Settings,
    what: str,
    *,
    stored: bool,
) -> Any:
    if isinstance(model, onnx.ModelProto):
        if stored:
            return _open_stored(model, settings, what)
        if estimate_bytes(model) > PROTOBUF_LIMIT:
            return _open_large(model, settings, what)
        model = model.SerializeToString()
    return _open(str(model) if isinstance(model, Path) else model, settings, what)


def _open(
    source: str | bytes,
    settings: Settings,
    what: str,
    *,
    temporary: Path | None = None,
) -> Any:
    """``temporary``: a folder that the other process, if there is one, needs as long as the
    session.
    """
    isolation = current()

    def opened(settings: Settings) -> Any:
        if isolation is not None:
            return isolation.open(source, settings, what, temporary=temporary)
        return _Session(source, settings)

    try:
        return opened(settings)
    except Exception as error:
        if not any(domain in str(error) for domain in extensions.DOMAINS):
            raise
    return opened(settings._replace(library=extensions.library()))


def _open_stored(model: onnx.ModelProto, settings: Settings, what: str) -> Any:
    """A session that maps the files of stored tensors, which onnxruntime wants by paths relative to
    one folder.
    """
    light = onnx.ModelProto()
    light.CopyFrom(model)
    stored = [tensor for tensor in initializers(light.graph) if is_stored(tensor)]
    rest = sum(
        tensor_bytes(tensor)
        for tensor in initializers(light.graph)
        if not is_stored(tensor)
    )
    try:
        root = os.path.commonpath([location(tensor)[0].parent for tensor in stored])
    except ValueError:  # drives of their own
        root = ""
    if not root or rest > PROTOBUF_LIMIT:
        return _open_large(model, settings, what)
    for tensor in stored:
        path, offset, length = location(tensor)
        place(tensor, path.relative_to(root).as_posix(), offset, length)
    entries = {
        **settings.entries,
        "session.model_external_initializers_file_folder_path": root,
    }
    return _open(light.SerializeToString(), settings._replace(entries=entries), what)


def _open_large(model: onnx.ModelProto, settings: Settings, what: str) -> Any:
    isolation = current()
    if isolation is not None:
        folder = isolation.new_folder()
        path = folder / "model.onnx"
        write_external(model, path, path.with_name("model.onnx.data"))
        return _open(str(path), settings, what, temporary=folder)
    with ScratchFolder(Path(tempfile.gettempdir()), "quark_onnx") as folder:
        path = folder / "model.onnx"
        write_external(model, path, path.with_name("model.onnx.data"))
        return _open(str(path), settings, what)


def write_external(model: onnx.ModelProto, path: Path, data: Path) -> None:
    """Write a model, which is not changed, to ``path``, and its large initializers, if any, to
    ``data`` beside it.

    onnx's own conversion refuses a name that a file in the current folder has, wherever the model
    goes.
    """
    stored = onnx.ModelProto()
    stored.CopyFrom(model)
    with data.open("wb") as file:
        for tensor in initializers(stored.graph):
            if is_stored(tensor):
                file.seek(-file.tell() % PAGE, os.SEEK_CUR)
                place(tensor, data.name, file.tell(), copy_values(tensor, file))
            if is_stored(tensor) or tensor_bytes(tensor) < _SMALL_TENSOR:
                continue
            if (
                not tensor.raw_data and tensor.data_type != onnx.TensorProto.STRING
            ):  # as float_data, say
                tensor.CopyFrom(
                    numpy_helper.from_array(numpy_helper.to_array(tensor), tensor.name),
                )
            if len(values := tensor.raw_data) >= _SMALL_TENSOR:
                file.seek(
                    -file.tell() % PAGE,
                    os.SEEK_CUR,
                )  # where a runtime can map it into memory
                place(tensor, data.name, file.tell(), file.write(values))
    if not data.stat().st_size:
        data.unlink()
    path.write_bytes(stored.SerializeToString())


def initializers(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """The initializers of a graph and its subgraphs."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from initializers(inner)


def estimate_bytes(model: onnx.ModelProto) -> int:
    """Size of a model's weights.

    Unlike ``ByteSize`` it does not serialize the model to learn it.
    """
    return sum(map(tensor_bytes, initializers(model.graph)))


def model_bytes(model: onnx.ModelProto) -> int:
    """Size of a model.

    Of a large one, which is slow or impossible to serialize, that of its weights.
    """
    estimate = estimate_bytes(model)
    stored = any(map(is_stored, initializers(model.graph)))
    return estimate if stored or estimate > _LARGE else model.ByteSize()


def tensor_bytes(tensor: onnx.TensorProto) -> int:
    """Size of a tensor by its shape and type, an upper bound for types of less than a byte."""
    try:
        width = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    except KeyError:
        width = 1
    return math.prod(tensor.dims) * int(width)


def tensor_size(tensor: onnx.TensorProto) -> int:
    """Size of a tensor's values as they are stored, those of less than a byte packed."""
    try:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        packed = len(numpy_helper.from_array(np.zeros(8, dtype)).raw_data)
    except (KeyError, TypeError, ValueError):
        return tensor_bytes(tensor)
    return -(-math.prod(tensor.dims) * packed // 8)
