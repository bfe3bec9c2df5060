"""The execution provider of onnxruntime that sessions run on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from calibrators.errors import CalibrationError

#: The end of the full name of every provider.
_SUFFIX = "ExecutionProvider"

_current: ContextVar[str] = ContextVar("provider", default="")


def current_provider() -> str:
    """Return the full name of the provider of this context; empty for the CPU's."""
    return _current.get()


@contextmanager
def provider(name: str) -> Iterator[None]:
    """Open all sessions of onnxruntime in the block on a provider, those of the float model too.

    Args:
        name: name as in ``find_provider``; empty changes nothing.

    Raises:
        CalibrationError: the provider is not installed.
    """
    if not name:
        yield
        return
    token = _current.set(find_provider(name))
    try:
        yield
    finally:
        _current.reset(token)


def find_provider(name: str) -> str:
    """Return the full name of an installed provider.

    Args:
        name: the name in any case, with or without the ending "ExecutionProvider", such as CUDA.

    Raises:
        CalibrationError: the provider is not installed; the message lists those that are.
    """
    import onnxruntime as ort

    installed = ort.get_available_providers()
    for full_name in installed:
        if name.lower() in (full_name.lower(), short_name(full_name).lower()):
            return str(full_name)
    names = ", ".join(map(short_name, installed))
    raise CalibrationError(
        f"the installed onnxruntime {ort.__version__} has no provider {name!r}; it has"
        f" {names}. Name one of these, or install a build of onnxruntime with it"
    )


def short_name(full_name: str) -> str:
    """Return the name of a provider without its ending.

    >>> short_name("CUDAExecutionProvider")
    'CUDA'
    """
    return full_name.removesuffix(_SUFFIX)
