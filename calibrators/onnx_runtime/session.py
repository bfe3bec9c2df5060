"""Open onnxruntime sessions, also on models above 2 GiB.

Models that do not fit into one protobuf message travel through files.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from calibrators.errors import CalibrationError, UnknownOperator
from calibrators.names import names_of
from calibrators.onnx_runtime import extensions
from calibrators.onnx_runtime.cpu_features import saturates
from calibrators.onnx_runtime.custom_operators import (
    REMEDY,
    current_libraries,
    unknown_operator,
)
from calibrators.onnx_runtime.external_tensors import (
    file_of,
    held_key,
    held_values,
    is_held,
    is_on_disk,
    is_stored,
    load_values,
    locate,
    location,
    place,
)
from calibrators.onnx_runtime.freed_memory import return_freed_memory
from calibrators.onnx_runtime.interrupt import interruptible, lane_threads
from calibrators.onnx_runtime.isolation import current
from calibrators.onnx_runtime.providers import current_provider
from calibrators.onnx_runtime.tensors import (
    estimate_bytes,
    initializers,
    tensor_bytes,
    write_external,
)
from calibrators.onnx_runtime.worker import (
    Session,
    SessionSettings,
    native_session,
    seconds_of_runs,
    session_options,
)
from calibrators.scratch import ScratchFolder

#: A protobuf message ends at 2 GiB; larger models travel through a file with external data.
PROTOBUF_LIMIT = 1_900_000_000

#: Session options of onnxruntime. With the first one (microsoft/onnxruntime#12088) int8 weights
#: become uint8, whose products are summed in 32 bits: sums of two products saturate at 16 bits on
#: processors without VNNI (microsoft/onnxruntime#6004). With the second one, Q/DQ pairs are not
#: fused into integer operators.
PRECISE = "session.x64quantprecision"
DEFINED = "session.disable_quant_qdq"

#: Types of arrays that numpy and onnxruntime share.
_PLAIN = ("float32", "float64", "int32", "int64", "uint8", "int8", "bool")
_PLAIN_TYPES = (
    "tensor(float)",
    "tensor(double)",
    "tensor(int32)",
    "tensor(int64)",
    "tensor(uint8)",
    "tensor(int8)",
    "tensor(bool)",
)

logger = logging.getLogger(__name__)


def open_session(  # noqa: PLR0913  the options of a session are independent
    model: onnx.ModelProto | bytes | Path,
    *,
    threads: int | None = None,
    optimize: bool = True,
    lean: bool = False,
    integers: bool | None = None,
    what: str = "a model",
) -> Any:
    """Open a session: ``run``, ``get_inputs``, ``get_outputs`` as in ``InferenceSession``.

    It runs on the CPU, or on the provider of a block of ``providers.provider``.

    Inside a block of ``calibrators.onnx_runtime.isolation.isolated`` the session runs in another
    process. Elsewhere a signal handler that raises ends a run of the main thread.

    Args:
        model: the model, its serialized bytes, or a file. External tensors of a ModelProto are not
            loaded; the session reads held tensors from their arrays.
        threads: threads inside an operator; None for those of a lane, see ``lane_threads``, and 0
            lets onnxruntime choose, as an application does.
        optimize: apply onnxruntime's graph optimizations.
        lean: leave weights in files that are mapped into memory, instead of packing them for speed;
            always so for a ModelProto with tensors in files. A model with MatMulNBits is packed:
            its weights take less memory than a single one of them in float32.
        what: names the model in the error of a crash.
        integers: let onnxruntime fuse Q/DQ pairs into integer operators; float weights there are
            then rounded to 8 bits by onnxruntime's own scales. True uses the kernels of this
            processor. The default avoids saturating sums, so that all processors find the same.
            Where onnxruntime cannot avoid saturation, at loading or in the first run, the default
            acts as False: the model is computed as ONNX defines it.

    Raises:
        RuntimeCrash: the other process died while loading the model.
        UnknownOperator: onnxruntime lacks a custom operator of the model.
    """
    stored = isinstance(model, onnx.ModelProto) and any(
        is_on_disk(tensor) for tensor in initializers(model.graph)
    )
    lean = lean or stored
    # Without packing, MatMulNBits dequantizes its weight in each run.
    unpacked = lean and not _mentions(model, "MatMulNBits")

    def opened(entry: str) -> Any:
        entries = {entry: "1"} if entry else {}
        if unpacked:
            entries["session.disable_prepacking"] = "1"
        settings = SessionSettings(
            lane_threads() if threads is None else threads,
            optimize,
            lean,
            entries,
            current_libraries(),
            current_provider(),
        )
        return _opened(model, settings, what, stored=stored)

    if integers is None and saturates():
        try:
            return _Unsaturated(opened(PRECISE), lambda: opened(DEFINED))
        except CalibrationError:
            # An application would fail, too: another way of loading would only hide that.
            raise
        except Exception as error:  # onnxruntime raises several unrelated types
            logger.debug(
                "without saturation onnxruntime does not load the model: %s", error
            )
            integers = False
    return opened(DEFINED if integers is False else "")


def open_in_engine(
    model: onnx.ModelProto | bytes | Path,
    engine: str,
    *,
    threads: int = 0,
    what: str = "a model",
) -> Any:
    """Open a model in an engine, which runs in another process: its crash is an error here.

    Only inside a block of ``calibrators.onnx_runtime.isolation.isolated``.

    Args:
        model: the model, its serialized bytes, or a file.
        engine: the class of the engine, as "module:Class".
        threads: threads inside an operator; 0 lets the engine choose.
        what: names the model in the error of a crash.

    Returns:
        A session with a further method ``layers``.

    Raises:
        RuntimeCrash: the other process died while loading the model.
    """
    if current() is None:
        raise CalibrationError(
            "an engine runs models in another process; open them inside isolated()"
        )
    settings = SessionSettings(
        threads,
        libraries=current_libraries(),
        provider=current_provider(),
        engine=engine,
    )
    if not isinstance(model, onnx.ModelProto):
        source = model if isinstance(model, bytes) else str(model)
        return open_source(source, settings, what)
    separate = any(
        is_on_disk(tensor) or is_held(tensor) for tensor in initializers(model.graph)
    )
    if separate or estimate_bytes(model) > PROTOBUF_LIMIT:
        return _open_large(model, settings, what)
    return open_source(model.SerializeToString(), settings, what)


class _Session:
    """An in-process ``onnxruntime.InferenceSession`` with interruptible runs."""

    def __init__(
        self,
        source: str | bytes,
        settings: SessionSettings,
        arrays: Mapping[str, NDArray[Any]],
    ) -> None:
        options = session_options(settings)
        # onnxruntime computes with the memory of the arrays, which has to stay.
        self._arrays = arrays
        if arrays:
            _give_arrays(options, arrays)
        size = sum(array.nbytes for array in arrays.values())
        size += len(source) if isinstance(source, bytes) else _file_size(source)
        return_freed_memory(size)
        # onnxruntime 1.20 has no way to stop loading.
        stop = getattr(options, "set_load_cancellation_flag", lambda _: None)
        self._session = interruptible(
            lambda: native_session(source, options, settings.provider),
            lambda: stop(True),
        )
        # Loading leaves copies of the weights behind.
        return_freed_memory(size)
        self.settings = settings
        # onnxruntime (1.20 to 1.32) stores the running mean and variance of a
        # BatchNormalization in the memory of its inputs: in the arrays of the caller.
        self._writes_inputs = _contains(source, b"training_mode")

    def _safe(self, feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return inputs that a run may change."""
        if not self._writes_inputs:
            return feeds
        safe = dict(feeds)
        for name, value in feeds.items():
            if isinstance(value, np.ndarray):
                safe[name] = value.copy()
        return safe

    def run(self, names: Sequence[str] | None, feeds: Mapping[str, Any]) -> Any:
        """Compute outputs; a signal handler that raises ends the run."""
        import onnxruntime as ort

        options = ort.RunOptions()
        given = self._safe(feeds)
        return interruptible(
            lambda: self._session.run(names, given, options),
            lambda: setattr(options, "terminate", True),
        )

    def run_uncopied(self, names: Sequence[str], feeds: Mapping[str, Any]) -> Any:
        """Compute outputs as ``run`` does, without a copy of each where possible.

        onnxruntime copies the outputs into new arrays, whose memory the system has to clear: for
        a model with all of its tensors exposed that takes half as long as the run itself.
        """
        if not self._is_plain(names, feeds):
            return self.run(names, feeds)
        import onnxruntime as ort

        options = ort.RunOptions()
        given = dict[str, Any]()
        for name, value in self._safe(feeds).items():
            array = np.asarray(value, order="C")
            given[name] = ort.OrtValue.ortvalue_from_numpy(array)
        values = interruptible(
            lambda: self._session.run_with_ort_values(names, given, options),
            lambda: setattr(options, "terminate", True),
        )
        return [value.numpy() for value in values]

    def _is_plain(self, names: Sequence[str], feeds: Mapping[str, Any]) -> bool:
        """Return whether all inputs are given, and these and the outputs are common arrays."""
        if not all(_is_plain_array(value) for value in feeds.values()):
            return False
        # An input with a default value may be omitted, which ``run`` takes care of.
        if set(names_of(self._session.get_inputs())) != feeds.keys():
            return False
        types = {value.name: value.type for value in self._session.get_outputs()}
        return {types.get(name) for name in names}.issubset(_PLAIN_TYPES)

    def seconds(self, feeds: Mapping[str, Any], runs: int) -> list[float]:
        """Return the runtime of each run in seconds."""
        given = self._safe(feeds)
        return interruptible(
            lambda: seconds_of_runs(self._session, given, runs), lambda: None
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


def feeds_of(session: Session, sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a sample for the inputs of a session, which refuses other names."""
    names = names_of(session.get_inputs())
    return {name: sample[name] for name in names if name in sample}


def outputs_of(
    session: Session, sample: Mapping[str, Any], names: Sequence[str] | None = None
) -> dict[str, Any]:
    """Return outputs of a session on a sample, by name.

    Args:
        session: the session.
        sample: arrays by name; more than the inputs of the session are ignored.
        names: the outputs to compute; None for all.
    """
    wanted = names_of(session.get_outputs()) if names is None else names
    values = session.run(wanted, feeds_of(session, sample))
    return dict(zip(wanted, values, strict=True))


def _file_size(path: str) -> int:
    """Return the size of a file in bytes; 0 for a missing one, which onnxruntime reports."""
    try:
        return Path(path).stat().st_size
    except OSError:
        return 0


def _is_plain_array(value: Any) -> bool:
    """Return whether a value is an array of a type that numpy and onnxruntime share."""
    return isinstance(value, np.ndarray) and value.dtype.name in _PLAIN


def _give_arrays(options: Any, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Let sessions read initializers with external data from arrays, by name."""
    import onnxruntime as ort

    given = [ort.OrtValue.ortvalue_from_numpy(array) for array in arrays.values()]
    options.add_external_initializers(list(arrays), given)


def _contains(source: str | bytes, text: bytes) -> bool:
    """Return whether a serialized model contains a text; onnxruntime reports unreadable files."""
    if isinstance(source, bytes):
        return text in source
    try:
        with (
            Path(source).open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        ):
            return mapped.find(text) >= 0
    except (OSError, ValueError):  # absent or empty
        return False


def _mentions(model: onnx.ModelProto | bytes | Path, operator: str) -> bool:
    """Return whether a model has an operator; of a model in memory, outside of bodies."""
    if isinstance(model, onnx.ModelProto):
        return any(node.op_type == operator for node in model.graph.node)
    source = model if isinstance(model, bytes) else str(model)
    return _contains(source, operator.encode())


class _Unsaturated:
    """A session with uint8 weights; if its first run fails, the session of ``reopen``.

    onnxruntime 1.32 loads models with per-channel weights that it then cannot run: weights without
    a zero point, which get one of the wrong shape, and weights that are a MatMul's first input.
    """

    def __init__(self, session: Any, reopen: Callable[[], Any]) -> None:
        self._session = session
        self._reopen: Callable[[], Any] | None = reopen
        self._lock = Lock()

    def run(self, *arguments: Any, **options: Any) -> Any:
        """Compute outputs, by the second session if the first one fails."""
        return self._attempt(lambda session: session.run(*arguments, **options))

    def run_uncopied(self, names: Sequence[str], feeds: Mapping[str, Any]) -> Any:
        """Compute outputs without copies, by the second session if the first one fails."""
        return self._attempt(lambda session: run_uncopied(session, names, feeds))

    def _attempt(self, run: Callable[[Any], Any]) -> Any:
        # Runs in several lanes wait for the first one, which tells which session they take.
        with self._lock:
            if self._reopen is not None:
                return self._first(run, self._reopen)
        return run(self._session)

    def _first(self, run: Callable[[Any], Any], reopen: Callable[[], Any]) -> Any:
        # ``reopen`` keeps the model in memory: dropped after the first run.
        self._reopen = None
        try:
            return run(self._session)
        # A crash is the model's, and an ended process is the caller's: the other session would
        # hide both.
        except CalibrationError:
            raise
        except Exception as error:
            logger.debug(
                "without saturation onnxruntime does not run the model: %s", error
            )
        self._session = reopen()
        return run(self._session)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


def run_uncopied(session: Any, names: Sequence[str], feeds: Mapping[str, Any]) -> Any:
    """Compute the outputs of a session, without a copy of each where possible."""
    if isinstance(session, _Session | _Unsaturated):
        return session.run_uncopied(names, feeds)
    return session.run(names, feeds)


def is_defined(session: Any) -> bool:
    """Return whether a session computes Q/DQ pairs unfused, as ONNX defines."""
    return bool(session.settings.entries.get(DEFINED) == "1")


def _opened(
    model: onnx.ModelProto | bytes | Path,
    settings: SessionSettings,
    what: str,
    *,
    stored: bool,
) -> Any:
    if isinstance(model, onnx.ModelProto):
        if stored:
            return _open_stored(model, settings, what)
        held = [tensor for tensor in model.graph.initializer if is_held(tensor)]
        held_bytes = sum(tensor_bytes(tensor) for tensor in held)
        embedded = estimate_bytes(model) - held_bytes
        if embedded > PROTOBUF_LIMIT:
            return _open_large(model, settings, what)
        if held:
            return _open_held(model, held, settings, what)
        model = model.SerializeToString()
    return open_source(str(model) if isinstance(model, Path) else model, settings, what)


def open_source(
    source: str | bytes,
    settings: SessionSettings,
    what: str,
    *,
    temporary: Path | None = None,
    arrays: Mapping[str, NDArray[Any]] | None = None,
) -> Any:
    """Open a session, with the libraries of operators that the model needs.

    Args:
        source: a file, or a serialized model.
        settings: options of the session.
        what: names the model in errors.
        temporary: a folder that an isolated session needs while it lives.
        arrays: values of initializers that are external data of no file; not for an isolated
            session.

    Raises:
        UnknownOperator: onnxruntime lacks an operator of the model.
    """
    isolation = current()

    def opened(settings: SessionSettings) -> Any:
        try:
            if isolation is not None:
                return isolation.open(source, settings, what, temporary=temporary)
            return _Session(source, settings, arrays or {})
        except Exception as error:
            if operator := unknown_operator(error):
                raise UnknownOperator(
                    f"it lacks the operator {operator}; {REMEDY}"
                ) from error
            raise

    try:
        return opened(settings)
    except UnknownOperator as error:
        # The library is loaded only if onnxruntime names one of its domains: that takes time.
        if not any(domain in str(error) for domain in extensions.DOMAINS):
            raise
        try:
            library = extensions.library()
        except ImportError as missing:
            raise UnknownOperator(str(missing)) from error
        if library in settings.libraries:
            raise
    return opened(settings._replace(libraries=(*settings.libraries, library)))


def _open_held(
    model: onnx.ModelProto,
    held: Sequence[onnx.TensorProto],
    settings: SessionSettings,
    what: str,
) -> Any:
    """Open a session that reads held tensors from their arrays, or from a file of these.

    A lean session maps the file that arrays are mapped from: it would copy the arrays.

    Args:
        model: the model, which fits into a protobuf message without the held tensors.
        what: names the model in errors.
    """
    isolation = current()
    arrays = {held_key(tensor): held_values(tensor) for tensor in held}
    files = {key: file_of(array) for key, array in arrays.items()}
    locations: Mapping[str, tuple[Path, int, int]] = {
        key: file for key, file in files.items() if file is not None
    }
    if not settings.lean or len(locations) < len(arrays):
        if isolation is None:
            named = {tensor.name: held_values(tensor) for tensor in held}
            return open_source(model.SerializeToString(), settings, what, arrays=named)
        locations = isolation.stored(arrays)
    light = onnx.ModelProto()
    light.CopyFrom(model)
    for tensor in light.graph.initializer:
        if is_held(tensor):
            locate(tensor, *locations[held_key(tensor)])
    return _open_stored(light, settings, what)


def _open_stored(model: onnx.ModelProto, settings: SessionSettings, what: str) -> Any:
    """Open a session that maps the files of external tensors.

    onnxruntime takes their paths relative to one folder.

    Args:
        what: names the model in errors.
    """
    light = onnx.ModelProto()
    light.CopyFrom(model)
    tensors = list(initializers(light.graph))
    stored = [tensor for tensor in tensors if is_on_disk(tensor)]
    for tensor in tensors:
        if is_held(tensor):
            load_values(tensor)
    embedded = sum(tensor_bytes(tensor) for tensor in tensors if not is_stored(tensor))
    try:
        # The folder above all data files: onnxruntime accepts a single folder.
        root = os.path.commonpath([location(tensor)[0].parent for tensor in stored])
    except ValueError:  # on different drives of Windows
        root = ""
    if not root or embedded > PROTOBUF_LIMIT:
        return _open_large(model, settings, what)
    for tensor in stored:
        path, offset, length = location(tensor)
        place(tensor, path.relative_to(root).as_posix(), offset, length)
    entries = {
        **settings.entries,
        "session.model_external_initializers_file_folder_path": root,
    }
    return open_source(
        light.SerializeToString(), settings._replace(entries=entries), what
    )


def _open_large(model: onnx.ModelProto, settings: SessionSettings, what: str) -> Any:
    isolation = current()
    if isolation is not None:
        folder = isolation.new_folder()
        path = folder / "model.onnx"
        write_external(model, path, path.with_name("model.onnx.data"))
        return open_source(str(path), settings, what, temporary=folder)
    with ScratchFolder(Path(tempfile.gettempdir()), "quark_onnx") as folder:
        path = folder / "model.onnx"
        write_external(model, path, path.with_name("model.onnx.data"))
        return open_source(str(path), settings, what)
