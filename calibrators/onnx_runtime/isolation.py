"""Run onnxruntime and onnx in a separate process, to survive native crashes.

    with isolated():
        session = open_session(model)  # opened and run by the other process

The process is started by ``start``, or with the first session, and serves all others. If it dies,
the call that it was working on raises ``RuntimeCrash``; the next call starts another one, where
sessions are opened again as they are needed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import Context, ContextVar, copy_context
from itertools import count
from multiprocessing.spawn import get_executable
from pathlib import Path
from typing import Any, cast

from numpy.typing import NDArray

from calibrators.errors import CalibrationError, RuntimeCrash
from calibrators.onnx_runtime.custom_operators import check_importable
from calibrators.onnx_runtime.interrupt import waited
from calibrators.onnx_runtime.worker import (
    BinaryFile,
    EngineLayer,
    SessionSettings,
    Value,
    receive,
    send,
    widen_pipe,
)

#: Seconds that the process gets to end by itself.
_GRACE = 5.0
#: Characters of the process's last output that an error quotes.
_LAST_WORDS = 500
#: Arrays in files start at multiples of this, to be mapped into memory.
_PAGE = 4096
#: Signal number on Linux and macOS; Windows has none.
_SIGKILL = 9


class _Died(Exception):  # noqa: N818
    """The process has ended; the message tells how.

    Attributes:
        printed: the end of its output.
        killed: ended from outside, as systems do when memory runs out.
    """

    def __init__(self, code: int, printed: str) -> None:
        """Create the error from an exit code, or minus the number of a signal."""
        super().__init__(ending(code))
        self.printed = printed
        self.killed = code == -_SIGKILL


class Isolation:
    """A process for sessions, restarted after a crash."""

    def __init__(self) -> None:
        self.number = next(_isolations)
        self._owner = os.getpid()
        self._lock = threading.RLock()
        self._numbers = count()
        self._folder: Path | None = None
        self._stored: dict[str, tuple[Path, int, int]] = {}
        self._process: _Process | None = None
        self._closed = False
        _alive.add(self)

    @property
    def usable(self) -> bool:
        """True in the process that has started the isolation.

        A fork must not write into its pipes.
        """
        return not self._closed and os.getpid() == self._owner

    @property
    def folder(self) -> Path:
        """Folder of the models for the isolated process."""
        with self._lock:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="quark_onnx_"))
            return self._folder

    def new_folder(self) -> Path:
        """Return a new folder for a model in several files."""
        return Path(tempfile.mkdtemp(dir=self.folder))

    def stored(
        self, arrays: Mapping[str, NDArray[Any]]
    ) -> Mapping[str, tuple[Path, int, int]]:
        """Return file, offset and length of arrays, which are written once for all sessions.

        Args:
            arrays: arrays that do not change, by a key that no other array has.

        Raises:
            CalibrationError: the temporary folder has no room for them.
        """
        with self._lock:
            # A session opens with the weights that earlier sessions wrote, and adds only the
            # others.
            unknown = {
                key: array for key, array in arrays.items() if key not in self._stored
            }
            if unknown:
                # Windows cannot append to a file that another process has mapped.
                path = self.folder / f"{next(self._numbers)}.weights"
                with self._writing("weights"), path.open("wb") as file:
                    for key, array in unknown.items():
                        file.seek(-file.tell() % _PAGE, os.SEEK_CUR)
                        offset = file.tell()
                        self._stored[key] = (path, offset, file.write(array.data))
            return self._stored

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            raise CalibrationError(
                f"the {what} cannot be written to the temporary folder"
                f" {self.folder.parent} (see TMPDIR): {reason}",
            ) from error

    def open(
        self,
        source: str | bytes,
        settings: SessionSettings,
        what: str,
        *,
        temporary: Path | None = None,
    ) -> IsolatedSession:
        """Open a session.

        Args:
            source: a file, or a serialized model.
            settings: options of the session.
            what: names the model in errors, as in "the quantized model".
            temporary: a folder to remove with the session.

        Raises:
            RuntimeCrash: the process died while opening it.
        """
        check_importable(settings.libraries)
        number = next(self._numbers)
        # Large models would fill the pipe; a file is also there for the next process after a crash.
        if isinstance(source, bytes):
            temporary = self.folder / f"{number}.onnx"
            with self._writing("model"):
                temporary.write_bytes(source)
        if isinstance(source, bytes):
            path = temporary
        else:
            path = Path(source).absolute()
        session = IsolatedSession(
            self, (number, str(path), isinstance(source, bytes), settings), what
        )
        # At the exit of the interpreter the worker removes the whole folder.
        weakref.finalize(session, self._discard, number, temporary).atexit = False
        session.open()
        return session

    def _discard(self, number: int, temporary: Path | None) -> None:
        """Forget a session.

        The next request closes it, as this finalizer may run at any time.
        """
        if not self.usable:
            return
        if self._process is not None:
            # A list append needs no lock, which a finalizer that runs inside ``ask`` could not get.
            self._process.closed.append(number)
        if temporary is not None and temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        elif temporary is not None:
            temporary.unlink(missing_ok=True)

    def ask_onnx(self, doing: str, action: str, *arguments: Any) -> Any:
        """Return the answer of onnx to an action of the worker.

        Raises:
            RuntimeCrash: the process died.
        """
        try:
            return self.process().ask(action, arguments)
        except _Died as death:
            raise _crash(death, "onnx", doing) from death

    def release(self) -> None:
        """Close unreferenced sessions."""
        if self._process is not None and self._process.usable:
            with suppress(_Died):
                self._process.ask("release", ())

    def process(self) -> _Process:
        """Return the running process, started if need be."""
        with self._lock:
            if self._closed:
                raise CalibrationError(
                    "the process that ran this session was ended with its isolated()"
                    " block",
                )
            if self._process is None or not self._process.usable:
                self._process = _Process(self.folder)
            return self._process

    def close(self, *, kill: bool = False) -> None:
        """End the process, and remove the models."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.end(kill=kill)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def abandon(self) -> None:
        """Close the pipes in a fork: open pipes would keep the child process alive."""
        self._closed = True
        if self._process is not None:
            self._process.abandon()


#: All isolations of this process, for its forks.
_alive: weakref.WeakSet[Isolation] = weakref.WeakSet()
_isolations = count()
_current: ContextVar[Isolation | None] = ContextVar("isolation", default=None)


def current() -> Isolation | None:
    """Return the active isolation; None to open sessions in-process."""
    isolation = _current.get()
    return isolation if isolation is not None and isolation.usable else None


def start() -> None:
    """Start the isolated process ahead of its first session, to load onnxruntime meanwhile.

    Without an active isolation, do nothing.
    """
    isolation = current()
    if isolation is not None:
        isolation.process()


def release() -> None:
    """Close unreferenced sessions of the isolated process, and unmap their files."""
    isolation = current()
    if isolation is not None:
        isolation.release()


@contextmanager
def isolated(wanted: bool = True) -> Iterator[None]:
    """Open sessions in another process inside the block.

    A nested block uses the process of the outer one.

    Args:
        wanted: if false, nothing is changed.
    """
    if not wanted or current() is not None:
        yield
        return
    isolation = Isolation()
    token = _current.set(isolation)
    complete = False
    try:
        yield
        complete = True
    finally:
        _current.reset(token)
        isolation.close(kill=not complete)


@contextmanager
def always_isolated() -> Iterator[Context]:
    """Yield a context in which sessions are opened in another process, whatever the caller chose.

    For native code on untrusted bytes. The process is that of the active isolation, or one for this
    block. The caller's own context stays as it is, so that a generator may yield inside the block.
    """
    context = copy_context()
    if current() is not None:
        yield context
        return
    isolation = Isolation()
    context.run(_current.set, isolation)
    try:
        yield context
    finally:
        isolation.close(kill=True)


class IsolatedSession:
    """A session in another process, with the used methods of ``onnxruntime.InferenceSession``."""

    def __init__(
        self,
        isolation: Isolation,
        recipe: tuple[int, str, bool, SessionSettings],
        what: str,
    ) -> None:
        """Create a session.

        Args:
            isolation: owns the process.
            recipe: arguments with which each new process opens the session.
            what: names the model in errors.
        """
        self._isolation = isolation
        self._recipe = recipe
        self.what = what
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._interface: tuple[list[Value], list[Value]] = [], []

    @property
    def settings(self) -> SessionSettings:
        """Options of the session."""
        return self._recipe[-1]

    def get_inputs(self) -> list[Value]:
        """Return the inputs of the model."""
        return self._interface[0]

    def get_outputs(self) -> list[Value]:
        """Return the outputs of the model."""
        return self._interface[1]

    def run(self, names: Sequence[str] | None, feeds: Mapping[str, Any]) -> Any:
        """Compute outputs.

        Args:
            names: outputs to return; None for all.
            feeds: arrays by input name.

        Raises:
            RuntimeCrash: the process died.
        """
        process = self.open()
        return self._ask(process, "running", "run", self._recipe[0], names, dict(feeds))

    def seconds(self, feeds: Mapping[str, Any], runs: int) -> list[float]:
        """Return the seconds that each run takes in the other process, transfers not counted."""
        process = self.open()
        number = self._recipe[0]
        seconds = self._ask(process, "running", "time", number, dict(feeds), runs)
        return cast("list[float]", seconds)

    def layers(self) -> list[EngineLayer]:
        """Return the layers of a model that is open in an engine."""
        process = self.open()
        layers = self._ask(process, "reading", "layers", self._recipe[0])
        return cast("list[EngineLayer]", layers)

    def open(self) -> _Process:
        """Return the process of the session; a new process opens the session again."""
        with self._lock:
            process = self._isolation.process()
            # The process was restarted after a crash, and knows no session.
            if process is not self._process:
                self._interface = self._ask(process, "loading", "open", *self._recipe)
                self._process = process
            return process

    def _ask(self, process: _Process, doing: str, action: str, *arguments: Any) -> Any:
        try:
            return process.ask(action, arguments)
        except _Died as death:
            library = self.settings.library
            raise _crash(death, library, f"{doing} {self.what}") from death


def _crash(death: _Died, library: str, doing: str) -> RuntimeCrash:
    """Return the error for the end of the process while a library was at work."""
    message = f"{library}'s process {death} while {doing}"
    return RuntimeCrash(message, death.printed, killed=death.killed, library=library)


class _Process:
    """A child process, from start to end."""

    def __init__(self, folder: Path) -> None:
        self.dead = self._ending = False
        self.closed: list[int] = []
        self._lock = threading.Lock()
        self._words = ""
        self._tickets = count()
        self._waiting: dict[int, Future[Any]] = {}
        # open as long as the process runs
        self._printed = tempfile.TemporaryFile("a+b")  # noqa: SIM115
        # The other process finds the same modules, also in an environment that changed sys.path.
        path = [str(entry) for entry in sys.path]
        call = (
            f"from calibrators.onnx_runtime.worker import serve; serve({str(folder)!r})"
        )
        program = f"import sys; sys.path[:] = {path!r}; {call}"
        # start_new_session: Ctrl-C reaches only this process, which stops the worker.
        flags: dict[str, Any] = {"start_new_session": True}
        if os.name == "nt":
            flags = {
                "creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
            }
        self._popen = subprocess.Popen(
            [os.fsdecode(get_executable()), "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._printed,
            bufsize=0,
            **flags,
        )
        self._requests = cast("BinaryFile", self._popen.stdin)
        self._answers = cast("BinaryFile", self._popen.stdout)
        widen_pipe(self._requests)
        widen_pipe(self._answers)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def number(self) -> int:
        """The number that the system gave to the process."""
        return self._popen.pid

    def ask(self, action: str, arguments: tuple[Any, ...]) -> Any:
        """Send a request and return its answer, or raise the error in the answer.

        Args:
            action: what to do.
            arguments: arguments of the action.

        Raises:
            _Died: the process has ended.
        """
        future: Future[Any] = Future()
        try:
            with self._lock:
                ticket = next(self._tickets)
                self._waiting[ticket] = future
                closed = self.closed
                self.closed = []
                # The listener has failed the pending requests already: this one came too late for
                # it.
                if self.dead:
                    self._fail()
                else:
                    # A broken pipe means that it has died, as the listener will find out.
                    with suppress(OSError):
                        send(self._requests, (ticket, closed, action, arguments))
        except BaseException:
            # The pipe may hold half a request: the process cannot be used any more.
            self.kill()
            raise
        return waited(future, self.kill)

    @property
    def usable(self) -> bool:
        """Whether the process takes requests; the end of a killed one is noticed a moment later."""
        return not (self.dead or self._ending)

    def kill(self) -> None:
        """End the process at once."""
        self._ending = True
        self._popen.kill()

    def end(self, *, kill: bool) -> None:
        """End the process, and wait for the end."""
        if kill:
            self._popen.kill()
        self._requests.close()
        try:
            # The closed pipe is the end of the worker's standard input, at which it exits.
            self._popen.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        # A generator that is closed by the garbage collector may run in any thread, and at the end
        # of the interpreter, when other threads have stopped.
        if threading.current_thread() is not self._listener and not sys.is_finalizing():
            self._listener.join()

    def abandon(self) -> None:
        """Close the pipes."""
        self._requests.close()
        self._answers.close()

    def _listen(self) -> None:
        """Deliver answers to their futures, until the process ends."""
        try:
            while True:
                ticket, worked, value = receive(self._answers)
                future = self._waiting.pop(ticket)
                if worked:
                    future.set_result(value)
                else:
                    future.set_exception(value)
                # The arrays of an answer must not live until the next answer.
                del future, value
        except Exception:
            # End of file, or the incomplete last message of a process that died.
            self._popen.kill()
        self._popen.wait()
        with self._lock:
            self.dead = True
            self._printed.seek(0)
            self._words = " ".join(
                self._printed.read().decode("utf-8", "replace").split(),
            )[-_LAST_WORDS:]
            for stream in (self._requests, self._answers, self._printed):
                stream.close()
            self._fail()

    def _fail(self) -> None:
        """Fail pending requests; the caller holds the lock."""
        while self._waiting:
            _, future = self._waiting.popitem()
            future.set_exception(_Died(self._popen.returncode, self._words))


def ending(code: int) -> str:
    """Describe how a process has ended.

    >>> ending(-6)
    'was ended by SIGABRT (signal 6)'
    >>> ending(0xC0000005)
    'ended with exit code 0xc0000005'
    """
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = "a signal"
        return f"was ended by {name} (signal {-code})"
    return f"ended with exit code {code if code < 256 else hex(code)}"


def _abandon_all() -> None:
    for isolation in list(_alive):
        isolation.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
