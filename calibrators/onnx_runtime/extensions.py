"""Locate the library of onnxruntime-extensions, whose operators decode images and text."""

from __future__ import annotations

import os

#: Domains of the operators of onnxruntime-extensions.
DOMAINS = frozenset({"ai.onnx.contrib", "com.microsoft.extensions"})

_MODULE = "onnxruntime_extensions"
_MISSING = (
    "onnxruntime-extensions decodes images and splits texts, and is not installed: pip"
    " install onnxruntime-extensions. Python 3.14 has no wheel of it: pass arrays (.npy,"
    " .npz) there"
)
_PROTOBUF = "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"


def library() -> str:
    """Return the path of the shared library to register with onnxruntime.

    Importing onnxruntime-extensions 0.15 sets the environment variable that selects protobuf's
    Python implementation. This process has loaded another implementation already, but its child
    processes would parse models several times as slowly: the variable is restored.

    Raises:
        ImportError: onnxruntime-extensions is not installed.
    """
    before = os.environ.get(_PROTOBUF)
    try:
        import onnxruntime_extensions
    except ImportError as error:
        raise ImportError(f"{_MISSING} ({error})", name=_MODULE) from error
    finally:
        if before is None:
            os.environ.pop(_PROTOBUF, None)
        else:
            os.environ[_PROTOBUF] = before
    return str(onnxruntime_extensions.get_library_path())
