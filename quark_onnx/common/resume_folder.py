"""ResumeFolder: intermediate results on disk, from which an interrupted run resumes."""

from __future__ import annotations

import json
import logging
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from calibrators.json_file import read_json
from calibrators.scratch import ScratchFolder
from quark_onnx.common.errors import ConfigError, QuarkError, system_reason

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Name of the temporary folders in which results are written.
_SCRATCH = "resume"
#: File that identifies the run to which a folder belongs.
_STATE = "state.json"
#: Ending of the file beside a result that has the result's checksum.
_SUM = ".crc32"
#: Bytes that are read at once for a checksum.
_CHUNK = 1 << 20


class ResumeFolder:
    """A folder of results. Each result is a file, written atomically, and a file with its checksum.

    Args:
        folder: the folder; None to store nothing.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        # A result could not be stored, for instance on a full disk.
        self._failed = False

    def open(self) -> None:
        """Create the folder, and remove the temporary files of runs that were killed.

        Raises:
            ConfigError: the folder cannot be created or written to.
        """
        if self._folder is None:
            return
        with access_errors(f"resume folder {self._folder}"):
            self._folder.mkdir(parents=True, exist_ok=True)
            # Creating it removes those of killed runs, and fails where nothing can be written.
            ScratchFolder(self._folder, _SCRATCH).close()

    def claim(self, marks: Mapping[str, str], names: re.Pattern[str]) -> bool:
        """Reserve the folder for one run.

        Args:
            marks: values that identify the run, by what they describe.
            names: pattern of the names of the run's results. Those of a run without marks are
                removed; any other file is foreign.

        Returns:
            True if the run has claimed the folder before.

        Raises:
            ConfigError: the folder belongs to another run, holds foreign files, or cannot be read
                and written.
        """
        if self._folder is None:
            return False
        with access_errors(f"resume folder {self._folder}"):
            path = self._folder / _STATE
            if not path.exists():
                self._clear(names)
                text = json.dumps(dict(marks), indent=1)
                self.write(_STATE, lambda path: path.write_text(text, encoding="utf-8"))
                return False
            remedy = "remove the folder to start anew"
            stored = read_json(path, "state", ConfigError, remedy).object()
        for key, mark in marks.items():
            if key not in stored or stored[key].value != mark:
                raise ConfigError(
                    f"{self._folder} holds the work of another run: its {key} differs;"
                    " name another folder to resume from, or remove it",
                )
        return True

    def _clear(self, names: re.Pattern[str]) -> None:
        """Remove the results of a run that stopped before it claimed the folder."""
        assert self._folder is not None
        files = [
            path
            for path in sorted(self._folder.iterdir())
            if not path.name.startswith(f".{_SCRATCH}.")
        ]
        # A mistyped folder must not lose its files.
        foreign = [
            path.name
            for path in files
            if not names.fullmatch(path.name.removesuffix(_SUM))
            and path.name != _STATE + _SUM
        ]
        if foreign:
            raise ConfigError(
                f"{self._folder} holds other files, as {foreign[0]}; name an empty"
                " folder, or one to resume from",
            )
        for path in files:
            path.unlink()

    def names(self, pattern: str) -> list[str]:
        """Return the sorted names of the results that match a shell pattern."""
        if self._folder is None:
            return []
        return sorted(path.name for path in self._folder.glob(pattern))

    def path(self, name: str) -> Path:
        """Return the path of a stored result."""
        assert self._folder is not None
        return self._folder / name

    def read(self, name: str, load: Callable[[Path], T]) -> T | None:
        """Return a result; None if it is not stored, or damaged, which is logged.

        Args:
            name: name of the file.
            load: function that reads the file of a given path. Any error of it means damage.
        """
        if self._folder is None:
            return None
        path = self.path(name)
        try:
            result = load(path)
            if _checksum(path) not in self._checksums(name):
                raise ValueError("its content does not have its checksum")
            return result
        except FileNotFoundError:
            return None
        # zipfile, numpy, json and safetensors raise many types on damaged bytes.
        except Exception as error:
            logger.warning("%s is damaged (%s): it is computed anew", path, error)
            return None

    def keep(self, name: str, write: Callable[[Path], object]) -> bool:
        """Store a result atomically.

        A full disk must not end hours of work: after an error, which is logged, nothing more is
        stored.

        Args:
            name: name of the file.
            write: function that writes the file of a given path.

        Returns:
            True if the result is stored.
        """
        if self._folder is None or self._failed:
            return False
        try:
            self.write(name, write)
        except OSError as error:
            self._failed = True
            logger.warning(
                "resume: %s could not be kept in %s: %s; this run keeps no further results",
                name,
                self._folder,
                system_reason(error),
            )
        return not self._failed

    def write(self, name: str, write: Callable[[Path], object]) -> None:
        """Write a file atomically, through a temporary folder.

        Args:
            name: name of the file.
            write: function that writes the file of a given path.

        Raises:
            OSError: the file cannot be written.
        """
        assert self._folder is not None
        with ScratchFolder(self._folder, _SCRATCH) as scratch:
            temporary = scratch / name
            write(temporary)
            # Data first, then the name, as a power failure may come in between. Windows flushes
            # only files that are open for writing.
            with temporary.open("r+b") as file:
                os.fsync(file.fileno())
            # A run may be killed between the two files: both the earlier result and this one have
            # a checksum then.
            files = [path for path in (self.path(name), temporary) if path.exists()]
            beside = scratch / (name + _SUM)
            checksums = "\n".join(map(_checksum, files))
            beside.write_text(checksums, encoding="ascii")
            beside.replace(self._folder / beside.name)
            temporary.replace(self._folder / name)

    def _checksums(self, name: str) -> list[str]:
        """Return the checksums of which a result has one; empty if none is stored."""
        path = self.path(name + _SUM)
        return path.read_text(encoding="ascii").split() if path.exists() else []

    def remove(self, name: str) -> None:
        """Remove a result, if it is stored."""
        if self._folder is not None:
            for file in (name, name + _SUM):
                (self._folder / file).unlink(missing_ok=True)


def _checksum(path: Path) -> str:
    """Return the CRC-32 of a file in hexadecimal digits."""
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            checksum = zlib.crc32(chunk, checksum)
    return f"{checksum:08x}"


@contextmanager
def access_errors(place: str) -> Iterator[None]:
    """Name a folder of results, or a journal, in errors of the system and of its content.

    Args:
        place: the kind of the place, and its path.

    Raises:
        ConfigError: in place of an ``OSError``, a ``ValueError`` or a ``KeyError``, which Optuna
            raises for damaged journals.
    """
    try:
        yield
    except QuarkError:  # some of them are a ValueError
        raise
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{place} cannot be read and written: {system_reason(error)}"
        ) from error
