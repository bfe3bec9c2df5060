"""Temporary folders and files that do not outlive a killed process for long: the next one removes
them.

Nothing runs in a process that is killed (SIGKILL, a machine that loses power). What it leaves is
told from what a living process uses by a lock, which the operating system drops with the process,
on this machine or another one.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

#: File whose lock says that a temporary folder is in use.
_LOCK = ".in-use"
#: Seconds after which a folder or file without a lock is stale: between its making and its locking
#: is next to no time.
_AGE = 24 * 3600.0
#: What temporary names end with: of eight characters, as the tempfile module and this one make
#: them.
_RANDOM = "[a-z0-9_]{8}"


class ScratchFolder:
    """A folder ``.NAME.RANDOM`` that is removed in the end.

    Those that killed processes have left are removed first.

    Args:
        parent: the folder to make it in.
        name: what it is for; the name of the file that is written, say.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, parent: Path, name: str) -> None:
        sweep_folders(parent, name)
        self._folder = tempfile.TemporaryDirectory(
            dir=parent,
            prefix=f".{name}.",
            ignore_cleanup_errors=True,
        )
        self.path = Path(self._folder.name)
        self._lock = (self.path / _LOCK).open("wb")
        lock(self._lock)

    def close(self) -> None:
        """Remove it, with all that is in it."""
        self._lock.close()  # Windows removes no file that is open
        self._folder.cleanup()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def sweep_folders(parent: Path, name: str) -> None:
    """Remove the temporary folders of that name that no process uses any more."""
    pattern = re.compile(rf"\.{re.escape(name)}\.{_RANDOM}")
    with contextlib.suppress(OSError):
        for path in list(parent.iterdir()):
            if (
                pattern.fullmatch(path.name)
                and path.is_dir()
                and not path.is_symlink()
                and _is_stale(path)
            ):
                shutil.rmtree(path, ignore_errors=True)


def _is_stale(folder: Path) -> bool:
    try:
        with (folder / _LOCK).open("r+b") as file:
            return lock(file)
    except FileNotFoundError:
        return _is_old(folder)
    except OSError:
        return False


def _is_old(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return time.time() - path.stat().st_mtime > _AGE
    return False


@contextmanager
def written(path: Path) -> Iterator[IO[bytes]]:
    """A file beside ``path`` that takes its place at the end of the body, whole and on the disk.

    Else ``path`` stays.

    It gets the permissions that the umask leaves. Files of killed processes are removed first.

    Raises:
        OSError: it cannot be written; the error names ``path``.
    """
    if (
        path.exists() and not path.is_file()
    ):  # a device or a pipe is written to, not replaced
        with path.open("wb") as device:
            yield device
        return
    sweep_files(path.absolute().parent, path.name)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        # of mkstemp it would be its owner's alone, whatever the umask
        with os.fdopen(os.open(temporary, _FLAGS, 0o666), "wb") as file:
            lock(file)
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)


def sweep_files(folder: Path, name: str = "") -> None:
    """Remove the temporary files of `written`, for a file of that name or of any, that no process
    writes any more.
    """
    pattern = re.compile(rf"\.{re.escape(name) if name else '.+'}\.{_RANDOM}\.tmp")
    with contextlib.suppress(OSError):
        for path in list(folder.iterdir()):
            if pattern.fullmatch(path.name) and _is_free(path):
                path.unlink(missing_ok=True)


def _is_free(path: Path) -> bool:
    """Whether no process writes a file: it can be locked, and was not made just now, before its
    lock.
    """
    try:
        with path.open("r+b") as file:
            return lock(file) and time.time() - path.stat().st_mtime > 1.0
    except OSError:
        return False


if sys.platform == "win32":
    import msvcrt

    def lock(file: IO[bytes]) -> bool:
        """Lock a file until it is closed; False if another process has."""
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def lock(file: IO[bytes]) -> bool:
        """Lock a file until it is closed; False if another process has."""
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            # some network file systems have no locks: what cannot be locked is not removed
            return False
        return True
