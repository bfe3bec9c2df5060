"""The execution provider of onnxruntime that sessions run on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from calibrators.errors import CalibrationError

#: The end of the full name of every provider.
_SUFFIX = "ExecutionProvider"
#: Providers that run no operator of a model, so that all of it would run on the CPU: builds for
#: the CPU list Azure's, which calls a remote endpoint from operators of its own.
_WITHOUT_OPERATORS = frozenset({"AzureExecutionProvider"})

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
        CalibrationError: the provider is not installed, or runs no model; the message lists those
            that do.
    """
    import onnxruntime as ort

    listed = ort.get_available_providers()
    installed = [each for each in listed if each not in _WITHOUT_OPERATORS]
    for full_name in _WITHOUT_OPERATORS.intersection(listed):
        if _is_called(full_name, name):
            raise CalibrationError(
                f"provider {short_name(full_name)} calls a remote endpoint and runs no operator"
                f" of a model; name one of {', '.join(map(short_name, installed))}"
            )
    for full_name in installed:
        if _is_called(full_name, name):
            return str(full_name)
    names = ", ".join(map(short_name, installed))
    raise CalibrationError(
        f"the installed onnxruntime {ort.__version__} has no provider {name!r}; it has"
        f" {names}. Name one of these, or install a build of onnxruntime with it"
    )


def _is_called(full_name: str, name: str) -> bool:
    return name.lower() in (full_name.lower(), short_name(full_name).lower())


def short_name(full_name: str) -> str:
    """Return the name of a provider without its ending.

    >>> short_name("CUDAExecutionProvider")
    'CUDA'
    """
    return full_name.removesuffix(_SUFFIX)
