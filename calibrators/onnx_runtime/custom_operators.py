"""Libraries of custom operators, which sessions register."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

#: Message of onnxruntime about an unknown operator of a domain other than ONNX's, which is empty.
_UNKNOWN = re.compile(
    r"Fatal error: ([^\s:]+:\w+)\(-?\d+\) is not a registered function/op"
)
#: What to do about an unknown operator.
REMEDY = (
    "give the library that has it by --custom-op-library FILE, in Python by"
    " custom_op_libraries(file)"
)

_current: ContextVar[tuple[str, ...]] = ContextVar("libraries", default=())


def current_libraries() -> tuple[str, ...]:
    """Return the libraries that sessions of this context register."""
    return _current.get()


@contextmanager
def libraries(files: Sequence[str]) -> Iterator[None]:
    """Let sessions that are opened in the block register the operators of these libraries."""
    token = _current.set(tuple(files))
    try:
        yield
    finally:
        _current.reset(token)


def unknown_operator(error: Exception) -> str:
    """Return the custom operator that onnxruntime lacks, as "domain:type"; empty if none."""
    match = _UNKNOWN.search(str(error))
    return "" if match is None else match[1]
