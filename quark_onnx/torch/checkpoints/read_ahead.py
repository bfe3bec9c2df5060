"""ReadAhead: read the next block from disk while the current block is quantized.

A thread reads the bytes of the next tensors and drops them, so that the system has them in its file
cache when the tensors are mapped. The process keeps one block in memory; the cached bytes belong to
the system, which frees them when memory is short. No value depends on the thread: tensors are read
as without it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import TracebackType

from quark_onnx.torch.runtime.memory import available
from quark_onnx.torch.runtime.safetensors_header import StoredTensor

logger = logging.getLogger(__name__)

#: Bytes of a single read.
_CHUNK = 4 << 20
#: Share of the available memory that the tensors ahead may take in the file cache. A larger part
#: would displace the block in use.
_SHARE = 0.5


class ReadAhead:
    """Thread that reads tensors before they are used. Use it as a context manager.

    Attributes:
        size: number of bytes that were read.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        self._stop = Event()
        self.size = 0

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def start(self, tensors: Sequence[StoredTensor]) -> None:
        """Begin to read tensors that are used next.

        A read that is still in progress stops: its tensors are in use now.
        """
        # The read in progress keeps its own event, which stays set.
        self._stop.set()
        self._stop = Event()
        self._thread.submit(self._read, tensors, self._stop)

    def wait(self) -> None:
        """Wait until the tensors of the last ``start`` are read."""
        # The single thread runs its tasks in order: this one ends after the read.
        self._thread.submit(int).result()

    def _read(self, tensors: Sequence[StoredTensor], stop: Event) -> None:
        """Read tensors until all are read, or ``stop`` is set.

        An error is left to the caller, who reads the same bytes and knows the tensor.
        """
        try:
            for size in self._chunks(tensors, int(available() * _SHARE)):
                self.size += size
                if stop.is_set():
                    return
        except (OSError, EOFError) as error:
            logger.debug("tensors cannot be read ahead: %s", error)

    def _chunks(self, tensors: Sequence[StoredTensor], room: int) -> Iterator[int]:
        """Yield the sizes of the chunks of tensors as they are read, at most ``room`` bytes."""
        # One buffer for all chunks: the bytes themselves are not needed.
        buffer = memoryview(bytearray(_CHUNK))
        for tensor in tensors:
            room -= tensor.size
            if room < 0:
                return
            # Without a buffer of Python, which would copy the bytes once more.
            with tensor.path.open("rb", buffering=0) as file:
                file.seek(tensor.start)
                remaining = tensor.size
                while remaining:
                    size = file.readinto(buffer[: min(remaining, _CHUNK)])
                    if not size:
                        raise EOFError(f"{tensor.path} ends before {tensor.name}")
                    remaining -= size
                    yield size
