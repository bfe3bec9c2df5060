"""Store samples for repeated reading: in memory up to a limit, then in temporary files."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from calibrators.errors import DataError
from calibrators.scratch import ScratchFolder

#: Default limit of the bytes that a spool keeps in memory.
MEMORY = 1 << 29


class Spool:
    """A sequence of samples, ``{name: array}``, with bounded memory.

    Arrays that readers get must not be written to. The files are removed by ``close``, or with the
    spool.

    >>> with Spool([{"x": np.zeros(3)}, {"x": np.ones(3)}], memory=24) as spool:
    ...     [float(sample["x"].sum()) for sample in spool]
    [0.0, 3.0]
    """

    def __init__(
        self, samples: Iterable[Mapping[str, Any]] = (), *, memory: int = MEMORY
    ) -> None:
        """Store samples, of which ``memory`` bytes of arrays stay in memory."""
        self._left = memory
        self._samples: list[dict[str, Any] | Path] = []
        self._folder: Path | None = None
        self._remove: weakref.finalize[[], Spool] | None = None
        for sample in samples:
            self.append(sample)

    def append(self, sample: Mapping[str, Any]) -> None:
        """Store another sample, which must not be written to from then on."""
        # Strings as objects, sequences, and bfloat16 arrays are none of a .npz file's types.
        plain = all(_is_stored_as_itself(value) for value in sample.values())
        # A sample that a .npz file cannot hold stays in memory, uncounted.
        size = sum(value.nbytes for value in sample.values()) if plain else 0
        if size <= self._left:
            self._left -= size
            self._samples.append(dict(sample))
            return
        parent = Path(tempfile.gettempdir())
        try:
            if self._folder is None:
                # Created with the first sample that does not fit: most data needs no folder.
                folder = ScratchFolder(parent, "quark_onnx")
                self._folder = folder.path
                # Bound to the folder alone: a bound method of the spool would keep the spool alive.
                self._remove = weakref.finalize(self, folder.close)
            path = self._folder / f"{len(self._samples)}.npz"
            # Names of inputs may be no file names, such as "a/b": the arrays are numbered instead.
            names = np.array(list(sample), dtype=str)
            np.savez(path, names, *sample.values(), allow_pickle=False)
        except OSError as error:
            reason = error.strerror or error
            raise DataError(
                f"samples cannot be kept in the temporary folder {parent} (see TMPDIR): {reason}",
            ) from error
        self._samples.append(path)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one sample; from a file, with newly read arrays."""
        sample = self._samples[index]
        if isinstance(sample, dict):
            return sample
        with np.load(sample, allow_pickle=False) as stored:
            names = stored["arr_0"].tolist()
            return {
                name: stored[f"arr_{number}"] for number, name in enumerate(names, 1)
            }

    def value(self, index: int, name: str) -> Any:
        """Return a single array of a sample, without reading the others."""
        sample = self._samples[index]
        if isinstance(sample, dict):
            return sample[name]
        with np.load(sample, allow_pickle=False) as stored:
            # The members of a .npz are read on access: the other arrays stay on disk.
            names = stored["arr_0"].tolist()
            return stored[f"arr_{names.index(name) + 1}"]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def close(self) -> None:
        """Forget the samples, and remove the files."""
        self._samples = []
        if self._remove is not None:
            self._remove()

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self, *error: type[BaseException] | BaseException | TracebackType | None
    ) -> None:
        self.close()


def _is_stored_as_itself(value: Any) -> bool:
    """Return whether a value is an array whose type a .npy file can name.

    Not so for objects, nor for the narrow floats of ml_dtypes.
    """
    if not isinstance(value, np.ndarray):
        return False
    return value.dtype.kind in "biufcSU" and value.dtype.isbuiltin != 2
