"""Locate the library of onnxruntime-extensions, whose operators decode images and text."""

from __future__ import annotations

from importlib.machinery import PathFinder
from importlib.util import find_spec

#: Domains of the operators of onnxruntime-extensions.
DOMAINS = frozenset({"ai.onnx.contrib", "com.microsoft.extensions"})

_MODULE = "onnxruntime_extensions"
_MISSING = (
    "onnxruntime-extensions decodes images and splits texts, and is not installed: pip"
    " install onnxruntime-extensions. Python 3.14 has no wheel of it: pass arrays (.npy,"
    " .npz) there"
)
#: The module of the package that is the library.
_LIBRARY = f"{_MODULE}._extensions_pydll"


def library() -> str:
    """Return the path of the shared library to register with onnxruntime.

    The package is not imported: it imports torch and transformers where they are installed, which
    takes seconds, and 0.15 selects protobuf's slow implementation for child processes.

    Raises:
        ImportError: onnxruntime-extensions is not installed.
    """
    package = find_spec(_MODULE)
    places = None if package is None else package.submodule_search_locations
    found = None if places is None else PathFinder.find_spec(_LIBRARY, places)
    if found is None or found.origin is None:
        raise ImportError(_MISSING, name=_MODULE)
    return found.origin
