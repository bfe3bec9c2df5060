"""Run onnxruntime sessions, in this process or as the server of another process.

``calibrators.onnx_runtime.isolation`` starts this module as a program, which imports numpy and
onnxruntime, and onnx only when it is asked for, to start quickly. The program ends at the end of
its standard input, which also comes when the other process is killed.

A message is a pickle of protocol 5. Large arrays follow it as raw bytes, without another copy:

    <number of bytes of the pickle> <number of arrays> <bytes of each array ...> <pickle> <arrays
    ...>
"""

from __future__ import annotations

import importlib
import os
import pickle
import shutil
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import IO, Any, NamedTuple, NoReturn, Protocol, cast

#: The two numbers of the header; the size of one array.
_HEADER = struct.Struct("<QQ")
_SIZE = struct.Struct("<Q")
#: Bytes that one system call moves; some systems refuse more than 2 GiB.
_CHUNK = 1 << 30
#: Bytes that a pipe holds, where configurable; the default of Linux makes large arrays half as
#: fast.
_PIPE = 1 << 20
#: The provider that every build of onnxruntime has.
_CPU = "CPUExecutionProvider"
#: Concurrent requests at most; a thread of the other process waits for each.
_THREADS = 64


class SessionSettings(NamedTuple):
    """Options of a session as plain values.

    Attributes:
        threads: threads inside an operator; 0 lets onnxruntime choose.
        optimize: apply onnxruntime's graph optimizations.
        lean: run in little memory, rather than fast.
        entries: further entries of the session's configuration.
        libraries: files with operators to register, and functions that change the
            ``onnxruntime.SessionOptions``.
        provider: execution provider of onnxruntime, by its full name; empty for the CPU's.
        engine: class that runs the model in place of onnxruntime, as "module:Class"; empty for
            none.
    """

    threads: int = 0
    optimize: bool = True
    lean: bool = False
    entries: Mapping[str, str] = {}
    libraries: tuple[str | Callable[[Any], object], ...] = ()
    provider: str = ""
    engine: str = ""

    @property
    def library(self) -> str:
        """Return the name of the library that runs the model."""
        return self.engine.rpartition(":")[2] or "onnxruntime"


class EngineLayer(NamedTuple):
    """A layer with weights or a product, as an engine runs it.

    Attributes:
        operator: the engine's name of the operator.
        integer: whether its products are of integers.
    """

    operator: str
    integer: bool


class Value(NamedTuple):
    """An input or output of a session, with the attributes of onnxruntime's ``NodeArg``."""

    name: str
    type: str
    shape: list[Any]


class Session(Protocol):
    """The methods of ``onnxruntime.InferenceSession`` that are called."""

    def get_inputs(self) -> Sequence[Any]:
        """Return the inputs, with the attributes of ``Value``."""

    def get_outputs(self) -> Sequence[Any]:
        """Return the outputs, with the attributes of ``Value``."""

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], /
    ) -> Sequence[Any]:
        """Return the outputs on some inputs."""


class BinaryFile(Protocol):
    """An unbuffered binary file."""

    def write(self, data: memoryview, /) -> int | None:
        """Write some bytes, and return their number."""

    def readinto(self, data: memoryview, /) -> int | None:
        """Fill a buffer as far as possible, and return the number of bytes."""

    def close(self) -> None:
        """Close the stream."""


def session_options(settings: SessionSettings) -> Any:
    """Return the ``onnxruntime.SessionOptions`` of settings."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    # Fatal errors alone: errors reach the caller as exceptions, and need not be printed as well.
    options.log_severity_level = 4
    options.intra_op_num_threads = settings.threads
    # The threads rest after a run. By default they spin for the next one, and where that is of
    # another session, it takes twice as long (onnxruntime 1.32, two cores).
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if not settings.optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    for name, value in settings.entries.items():
        options.add_session_config_entry(name, value)
    if settings.lean:
        # The arena never returns memory to the system.
        options.enable_cpu_mem_arena = False
        # In the default order all constants are unpacked first.
        options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
    for library in settings.libraries:
        if isinstance(library, str):
            options.register_custom_ops_library(library)
        else:
            library(options)
    return options


def native_session(source: str | bytes, options: Any, provider: str = "") -> Any:
    """Open an ``onnxruntime.InferenceSession`` of a file or of serialized bytes.

    Args:
        source: the file, or the bytes.
        options: the ``onnxruntime.SessionOptions``.
        provider: provider to prefer to that of the CPU, by its full name; empty for none.

    Raises:
        RuntimeError: the provider is installed, and cannot be loaded.
    """
    import onnxruntime as ort

    # Without the fallback, which is silent but for a line on stdout.
    settings: dict[str, Any] = {
        "providers": list(dict.fromkeys([provider or _CPU, _CPU])),
        "enable_fallback": 0,
    }
    session = ort.InferenceSession(source, options, **settings)
    # onnxruntime goes on without a provider whose libraries are missing.
    if provider and provider not in session.get_providers():
        raise RuntimeError(
            f"onnxruntime cannot load {provider}: a library or a device that it needs is missing"
        )
    if hasattr(session, "_model_bytes"):
        # onnxruntime keeps the bytes to reopen the model on other providers.
        session._model_bytes = None
    return session


def seconds_of_runs(
    session: Session, feeds: Mapping[str, Any], runs: int
) -> list[float]:
    """Return the seconds of each run, after a run that does not count."""
    session.run(None, feeds)
    seconds = []
    for _ in range(runs):
        start = perf_counter()
        session.run(None, feeds)
        seconds.append(perf_counter() - start)
    return seconds


def interface(session: Session) -> tuple[list[Value], list[Value]]:
    """Return the inputs and the outputs of a session."""
    return _values(session.get_inputs()), _values(session.get_outputs())


def _values(values: Sequence[Any]) -> list[Value]:
    """Return plain copies of onnxruntime's ``NodeArg``, which cannot be pickled."""
    return [Value(value.name, value.type, list(value.shape)) for value in values]


def send(stream: BinaryFile, message: object) -> None:
    """Write a message.

    Raises:
        OSError: the other side has closed the pipe.
    """
    # Buffers stay out of the pickle, and are written from the memory of the arrays.
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    arrays = [buffer.raw() for buffer in buffers]
    sizes = b"".join(_SIZE.pack(array.nbytes) for array in arrays)
    _write(stream, _HEADER.pack(len(body), len(arrays)) + sizes + body)
    for array in arrays:
        _write(stream, array)


def receive(stream: BinaryFile) -> Any:
    """Read a message.

    Raises:
        EOFError: the other side has ended.
    """
    import numpy as np

    length, count = _HEADER.unpack(_read(stream, bytearray(_HEADER.size)))
    sizes = _read(stream, bytearray(count * _SIZE.size))
    body = _read(stream, bytearray(length))
    arrays = []
    for (size,) in _SIZE.iter_unpack(sizes):
        # Unlike a bytearray, an empty array is not filled with zeros before it is read into.
        arrays.append(_read(stream, np.empty(size, np.uint8)))
    return pickle.loads(body, buffers=arrays)


def _write(stream: BinaryFile, data: Any) -> None:
    view = memoryview(data).cast("B")
    while len(view):
        # An unbuffered stream may write a part; None means that nothing was written yet.
        view = view[stream.write(view[:_CHUNK]) or 0 :]


def _read(stream: BinaryFile, target: Any) -> Any:
    """Fill and return a buffer."""
    view = memoryview(target).cast("B")
    while len(view):
        count = stream.readinto(view[:_CHUNK])
        if not count:
            raise EOFError
        view = view[count:]
    return target


def widen_pipe(stream: BinaryFile) -> None:
    """Let a pipe hold more bytes, where the system can do that."""
    try:
        import fcntl

        fcntl.fcntl(cast("IO[bytes]", stream), fcntl.F_SETPIPE_SZ, _PIPE)
    except (ImportError, AttributeError, OSError):
        # On Windows, on macOS, or beyond a limit of the system: the default size works, too.
        pass


class _Server:
    """Sessions by number, and the answers to requests.

    A request is ``(ticket, sessions to close, action, arguments)``, an answer
    ``(ticket, whether it worked, value or error)``.
    """

    def __init__(self, answers: BinaryFile) -> None:
        self._answers = answers
        self._lock = threading.Lock()
        self._sessions: dict[int, Any] = {}
        self._actions: dict[str, Callable[..., Any]] = {
            "open": self._open,
            "run": self._run,
            "time": self._time,
            "layers": lambda number: self._sessions[number].layers(),
            "release": lambda: None,
            "infer": _infer,
            "check": _check,
            "convert": _convert,
        }

    def close(self, numbers: Sequence[int]) -> None:
        """Close sessions by number."""
        for number in numbers:
            self._sessions.pop(number, None)

    def answer(self, ticket: int, action: str, arguments: tuple[Any, ...]) -> None:
        """Run an action, and send the result or the error."""
        try:
            answer = (ticket, True, self._actions[action](*arguments))
        except Exception as error:
            answer = (ticket, False, _portable(error))
        with self._lock:
            send(self._answers, answer)

    def _open(
        self, number: int, source: str, whole: bool, settings: SessionSettings
    ) -> tuple[list[Value], list[Value]]:
        """Open a file; ``whole``: from memory, as if there were no file."""
        model: str | bytes = source
        if whole:
            model = Path(source).read_bytes()
        session = _opened(model, settings)
        self._sessions[number] = session
        return interface(session)

    def _run(
        self, number: int, names: Sequence[str] | None, feeds: Mapping[str, Any]
    ) -> Any:
        return self._sessions[number].run(names, feeds)

    def _time(self, number: int, feeds: Mapping[str, Any], runs: int) -> list[float]:
        return seconds_of_runs(self._sessions[number], feeds, runs)


def _opened(source: str | bytes, settings: SessionSettings) -> Any:
    """Open a model in onnxruntime, or in the engine of the settings."""
    if settings.engine:
        module, _, name = settings.engine.partition(":")
        return getattr(importlib.import_module(module), name)(source, settings)
    return native_session(source, session_options(settings), settings.provider)


def _infer(model: bytes, propagate: bool) -> bytes:
    """Return a serialized model with inferred shapes."""
    from onnx import shape_inference

    inferred = shape_inference.infer_shapes(model, data_prop=propagate)
    return inferred.SerializeToString()


def _convert(model: bytes, opset: int) -> bytes:
    """Return a serialized model at another opset."""
    import onnx
    from onnx import version_converter

    converted = version_converter.convert_version(onnx.load_from_string(model), opset)
    return converted.SerializeToString()


def _check(model: bytes | str, full: bool) -> None:
    """Check a serialized model or a file."""
    from onnx import checker

    checker.check_model(model, full_check=full)


def _portable(error: Exception) -> Exception:
    """Return a picklable error: the original, or a RuntimeError with the text."""
    try:
        # Both ways: exceptions with other arguments than their message fail only while loading.
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _leave_no_core() -> None:
    """Disable core files: a crash is reported by the other process."""
    try:
        import resource

        resource.setrlimit(
            resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1])
        )
    except (ImportError, ValueError, OSError):  # Windows; a limit of the system
        pass


def serve(folder: str) -> NoReturn:
    """Serve requests from standard input on standard output; exit at the end of the input.

    Args:
        folder: holds the models; removed at the end, as the other process may be gone.
    """
    requests = os.fdopen(os.dup(0), "rb", buffering=0)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    # Libraries may print to standard output, which would corrupt the answers.
    os.dup2(2, 1)
    _leave_no_core()
    server = _Server(answers)
    pool = ThreadPoolExecutor(_THREADS)
    # Import onnxruntime while the other process prepares the first model.
    pool.submit(importlib.import_module, "onnxruntime")
    try:
        while True:
            ticket, closed, action, arguments = receive(requests)
            server.close(closed)
            # Requests run concurrently; ``close`` comes first, to free memory for them.
            pool.submit(server.answer, ticket, action, arguments)
            # The arrays belong to the request alone, and not to this loop until the next one.
            del arguments
    except EOFError:
        pass
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        # Exit at once: a native run may never end.
        os._exit(0)
