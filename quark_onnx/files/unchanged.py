"""Notice that another program has changed the files of a model during a run."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path

from quark_onnx.common.errors import ModelError
from quark_onnx.files.overwrites import stored_beside

#: Device, inode, size in bytes, and time of the last change in ns.
_State = tuple[int, int, int, int]


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model, with their states before they were read.

    A run maps weights from these files and opens them again for its sessions. Files that change in
    the meantime would give a result that mixes two models.

    Attributes:
        states: state of each file; empty for a model in memory.
    """

    states: dict[Path, _State]

    @classmethod
    def of(cls, model: object) -> ModelFiles:
        """Return the files of a model: its file, and those of its external data.

        Args:
            model: path of the model; anything else has no files. A file that is missing is no
                error here, but where it is read.
        """
        if not isinstance(model, str | Path):
            return NO_FILES
        path = Path(model)
        files = [path, *(path.parent / name for name in sorted(stored_beside(path)))]
        states = {file: _state(file) for file in files}
        return cls({file: state for file, state in states.items() if state})

    def require_unchanged(self) -> None:
        """Raise an error if a file is another one than before, or has changed.

        Raises:
            ModelError: names the file. A file that is gone is no error, as it was read before.
        """
        for file, before in self.states.items():
            if _state(file) not in (before, None):
                raise ModelError(
                    f"{file} was changed or replaced by another program during the run,"
                    " which read parts of both files; nothing was written: run it again",
                )


#: The files of a model in memory.
NO_FILES = ModelFiles({})


def _state(path: Path) -> _State | None:
    """Return the state of a regular file; None for anything else."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
