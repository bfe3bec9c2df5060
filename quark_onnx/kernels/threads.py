"""Limit BLAS to one thread, where sums must not depend on the number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute numpy products on the calling core inside the block.

    On several cores some processors sum in another order. The limit is one for the process: the
    first user sets it, and the last one resets it, in any order of threads.
    """
    _LIMIT.open()
    try:
        yield
    finally:
        _LIMIT.close()


class _Limit:
    """The limit of the process, and its number of users."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._users = 0
        self._before: Any = None

    def open(self) -> None:
        """Set the limit for the first user."""
        with self._lock:
            _let_anybody_set()
            # For every user: some libraries have a limit per thread.
            limit = _libraries().limit(limits=1, user_api="blas")
            # Later users find the limit of the first one, which is not what has to be restored.
            self._before = self._before if self._users else limit
            self._users += 1

    def close(self) -> None:
        """Reset the limit after the last user."""
        with self._lock:
            self._users -= 1
            if not self._users:
                _let_anybody_set()
                self._before.restore_original_limits()
                _let_anybody_set()


_LIMIT = _Limit()


def _let_anybody_set() -> None:
    """Release the limit of threadpoolctl 3.8 from the first user's thread."""
    from threadpoolctl import OpenBLASController

    clear = getattr(OpenBLASController, "clear_controlling_thread", None)
    if clear is not None:
        clear(force=True)


# Cached, as the search for the libraries takes longer than most products.
@cache
def _libraries() -> Any:
    import numpy.linalg  # noqa: F401  loads the library that is to be found
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()
