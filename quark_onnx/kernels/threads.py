"""Threads of the libraries that multiply matrices: one, where the sum must not depend on how many
there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any


@contextmanager
def one_thread() -> Iterator[None]:
    """While it is open, a product of numpy is computed on the core that asks for it.

    On several cores it is summed in another order, on some processors. The limit is one for the
    whole process: whoever opens it first sets it, and the last one to close it takes it back, in
    whatever order threads do so.
    """
    _LIMIT.open()
    try:
        yield
    finally:
        _LIMIT.close()


class _Limit:
    """The limit of the process, and how many rely on it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._users = 0
        self._before: Any = None

    def open(self) -> None:
        with self._lock:
            _let_anybody_set()
            limit = _libraries().limit(
                limits=1,
                user_api="blas",
            )  # of each: some libraries have one for each thread
            self._before = self._before if self._users else limit
            self._users += 1

    def close(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                _let_anybody_set()
                self._before.restore_original_limits()
                _let_anybody_set()


_LIMIT = _Limit()


def _let_anybody_set() -> None:
    """Threadpoolctl 3.8 obeys the thread alone that has set a limit first, and does not tell the
    others.
    """
    from threadpoolctl import OpenBLASController

    clear = getattr(OpenBLASController, "clear_controlling_thread", None)
    if clear is not None:
        clear(force=True)


@cache  # to look for the libraries takes longer than most products
def _libraries() -> Any:
    import numpy.linalg  # noqa: F401  loads the library that is to be found
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()
