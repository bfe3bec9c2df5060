"""Create temporary folders and files that are removed even if the process is killed.

Nothing runs in a process that is killed (SIGKILL, a power failure). The next process removes the
files that it left. A lock, which the operating system drops with the process, on this machine or
another one, distinguishes such files from those of a living process.
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
#: Seconds after which a folder without a lock is stale: a folder is locked right after its
#: creation.
_AGE = 24 * 3600.0
#: Pattern at the end of temporary names: eight characters, as in the tempfile module and here.
_RANDOM = "[a-z0-9_]{8}"


class ScratchFolder:
    """A folder ``.NAME.RANDOM`` that is removed by ``close``.

    Folders of the same name that killed processes have left are removed first.

    Args:
        parent: the folder to create it in.
        name: purpose of the folder, such as the name of the file to write.

    Raises:
        OSError: the folder cannot be created.
    """

    def __init__(self, parent: Path, name: str) -> None:
        sweep_folders(parent, name)
        self._folder = tempfile.TemporaryDirectory(
            dir=parent, prefix=f".{name}.", ignore_cleanup_errors=True
        )
        self.path = Path(self._folder.name)
        self._lock = (self.path / _LOCK).open("wb")
        lock(self._lock)

    def close(self) -> None:
        """Remove the folder and the contents."""
        # Windows cannot remove an open file.
        self._lock.close()
        self._folder.cleanup()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def sweep_folders(parent: Path, name: str) -> None:
    """Remove the temporary folders of a name that no process uses."""
    pattern = re.compile(rf"\.{re.escape(name)}\.{_RANDOM}")
    with contextlib.suppress(OSError):
        # A list, as the folder changes while it is swept.
        for path in list(parent.iterdir()):
            if (
                pattern.fullmatch(path.name)
                and path.is_dir()
                and not path.is_symlink()
                and _is_stale(path)
            ):
                shutil.rmtree(path, ignore_errors=True)


def _is_stale(folder: Path) -> bool:
    lock_file = folder / _LOCK
    # Without one, the folder may have been created a moment ago by another process.
    return _is_free(lock_file) if lock_file.exists() else _is_old(folder)


def _is_old(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return time.time() - path.stat().st_mtime > _AGE
    return False


@contextmanager
def written(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces ``path`` atomically at the end of the body.

    The file is flushed to the disk first. If the body raises, ``path`` stays as it was. Permissions
    follow the umask. Files that killed processes have left are removed first. A link stays: the
    file that it leads to is replaced.

    Args:
        path: the file to replace.

    Yields:
        The temporary file, open for binary writing.

    Raises:
        OSError: the file cannot be written; the error names ``path``.
    """
    # A device or a pipe is written to, not replaced.
    if path.exists() and not path.is_file():
        with path.open("wb") as device:
            yield device
        return
    path = followed(path)
    sweep_files(path.absolute().parent, path.name)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        # mkstemp would ignore the umask, and create a file that its owner alone can read.
        with os.fdopen(os.open(temporary, _FLAGS, 0o666), "wb") as file:
            lock(file)
            yield file
            # Data first, then the name: a rename that reaches the disk before the data would leave
            # an empty file after a power failure.
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        if error.errno is None:  # not of the system, such as a missing model
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            # After the rename there is nothing to remove.
            temporary.unlink(missing_ok=True)


def followed(path: Path) -> Path:
    """Return the path that a symbolic link leads to; other paths are returned as they are.

    A rename would replace the link.
    """
    # realpath leaves a circular link as it is; resolve() would raise.
    return Path(os.path.realpath(path)) if path.is_symlink() else path


_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)


def sweep_files(folder: Path, name: str) -> None:
    """Remove temporary files of `written` that no process writes.

    Args:
        folder: where to look.
        name: name of the file that they would have replaced.
    """
    pattern = re.compile(rf"\.{re.escape(name)}\.{_RANDOM}\.tmp")
    with contextlib.suppress(OSError):
        for path in list(folder.iterdir()):
            if pattern.fullmatch(path.name) and _is_free(path):
                path.unlink(missing_ok=True)


def _is_free(path: Path) -> bool:
    """Return whether no process writes a file.

    A free file can be locked, and was not created just now by a process about to lock it.
    """
    try:
        with path.open("r+b") as file:
            # Closing the file drops the lock again.
            return lock(file) and time.time() - path.stat().st_mtime > 1.0
    except OSError:
        return False


if sys.platform == "win32":
    import msvcrt

    def lock(file: IO[bytes]) -> bool:
        """Lock a file until closed; return False if another process holds the lock."""
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def lock(file: IO[bytes]) -> bool:
        """Lock a file until closed; return False if another process holds the lock."""
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            # Some network file systems have no locks: files that cannot be locked are not removed.
            return False
        return True
