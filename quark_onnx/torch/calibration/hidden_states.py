"""HiddenStates: block outputs for all samples, in memory or in memory-mapped files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, overload

import torch

from calibrators.scratch import ScratchFolder
from quark_onnx.common.errors import ConfigError
from quark_onnx.torch.runtime.checkpoint_folder import write_errors

# Numbers of files, unique in the process: several lists write to one folder.
_NUMBERS = count()


@contextlib.contextmanager
def spilling(folder: Path | None) -> Iterator[Path | None]:
    """Create a temporary subfolder for hidden states; without a folder, yield None.

    Raises:
        ConfigError: the folder cannot be created.
    """
    if folder is None:
        yield None
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch = ScratchFolder(folder, "hidden")
    except OSError as error:
        raise ConfigError(f"{folder} cannot hold hidden states: {error}") from error
    with scratch as path:
        yield path


class HiddenStates:
    """Growing list of tensors.

    Args:
        folder: the folder with a file per tensor, for as long as the tensor is in a list; None
            keeps tensors in memory.
        states: the tensors.
        room: bytes of tensors that stay on their device. The remaining ones are in host memory
            while they are not in use. None for no limit.
    """

    def __init__(
        self,
        folder: Path | None = None,
        states: Iterable[Any] = (),
        *,
        room: int | None = None,
    ) -> None:
        self._folder, self._room = folder, room
        self._resident = 0
        self._kept: list[Any] = [self._keep(state) for state in states]

    def __len__(self) -> int:
        return len(self._kept)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [_read(entry) for entry in self._kept[index]]
        return _read(self._kept[index])

    def __setitem__(self, index: int, state: torch.Tensor) -> None:
        before = self._kept[index]
        # Tensors in files or in host memory were never counted.
        if isinstance(before, torch.Tensor):
            self._resident -= before.nbytes
        self._kept[index] = self._keep(state)

    def __iter__(self) -> Iterator[Any]:
        return map(_read, self._kept)

    def append(self, state: torch.Tensor) -> None:
        """Add a tensor."""
        self._kept.append(self._keep(state))

    def copy(self) -> HiddenStates:
        """Return a copy of the list that shares tensors and files."""
        copy = HiddenStates(self._folder, room=self._room)
        copy._resident = self._resident
        # A tensor is replaced, never changed in place, so that both lists may hold the same one.
        copy._kept = list(self._kept)
        return copy

    def _keep(self, state: torch.Tensor) -> Any:
        """Return the entry of a tensor in the list: a file, host memory or the tensor itself."""
        if self._folder is not None and state.numel():
            return _File(self._folder, state)
        # First come, first kept: moving tensors back and forth would cost more than the room is
        # worth.
        if self._room is not None and self._resident + state.nbytes > self._room:
            return _Hosted(state)
        self._resident += state.nbytes
        return state


class _Hosted:
    """Tensor in host memory, copied to the original device on reading."""

    def __init__(self, state: torch.Tensor) -> None:
        self._device, self._state = state.device, state.cpu()

    def read(self) -> Any:
        return self._state.to(self._device)


class _File:
    """Tensor in a file; the last reference removes the file.

    Tensors that were read from the file remain valid.
    """

    def __init__(self, folder: Path, state: torch.Tensor) -> None:
        self._path = folder / f"{next(_NUMBERS)}.hidden"
        self._shape, self._dtype, self._device = state.shape, state.dtype, state.device
        # As bytes: numpy has no bfloat16.
        values = state.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        with write_errors(self._path):
            self._path.write_bytes(values.data)

    def read(self) -> Any:
        # A private mapping: pages are read when they are used, and writes do not reach the file.
        flat = torch.from_file(
            str(self._path), shared=False, size=self._shape.numel(), dtype=self._dtype
        )
        return flat.reshape(self._shape).to(self._device)

    def __del__(self) -> None:
        # Some systems cannot remove mapped files; the folder is removed at the end.
        with contextlib.suppress(OSError):
            self._path.unlink()


def _read(entry: Any) -> Any:
    """Return the tensor of an entry of the list."""
    return entry.read() if isinstance(entry, _File | _Hosted) else entry
