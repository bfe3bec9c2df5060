"""Libraries of custom operators, which sessions register, and other options of sessions."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from calibrators.errors import CalibrationError

#: Message of onnxruntime about an unknown operator of a domain other than ONNX's, which is empty.
_UNKNOWN = re.compile(
    r"Fatal error: ([^\s:]+:\w+)\(-?\d+\) is not a registered function/op"
)
#: What to do about an unknown operator.
REMEDY = (
    "give the library that has it by --custom-op-library FILE, in Python by"
    " custom_op_libraries(file)"
)

#: A file, or a function that changes the ``onnxruntime.SessionOptions`` of a session.
Library = str | Callable[[Any], object]

_current: ContextVar[tuple[Library, ...]] = ContextVar("libraries", default=())


def current_libraries() -> tuple[Library, ...]:
    """Return the libraries that sessions of this context register."""
    return _current.get()


@contextmanager
def libraries(entries: Sequence[Library]) -> Iterator[None]:
    """Let sessions that are opened in the block register the operators of these libraries."""
    token = _current.set(tuple(entries))
    try:
        yield
    finally:
        _current.reset(token)


def check_importable(entries: Sequence[Library]) -> None:
    """Raise CalibrationError for a function that another process cannot import by its name."""
    for entry in entries:
        if isinstance(entry, str):
            continue
        module = sys.modules.get(str(getattr(entry, "__module__", "")))
        name = str(getattr(entry, "__qualname__", entry))
        is_known = getattr(module, name, None) is entry
        if not is_known or module is sys.modules["__main__"]:
            raise CalibrationError(
                f"session_options is {name}, which another process cannot import: define it at the"
                " top of a module that can be imported, or run without isolation"
            )


def unknown_operator(error: Exception) -> str:
    """Return the custom operator that onnxruntime lacks, as "domain:type"; empty if none."""
    match = _UNKNOWN.search(str(error))
    return "" if match is None else match[1]
