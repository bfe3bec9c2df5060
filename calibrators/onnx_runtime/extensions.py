"""The library of onnxruntime-extensions, whose operators decode images and text."""

from __future__ import annotations

import os

#: The domains of its operators.
DOMAINS = frozenset({"ai.onnx.contrib", "com.microsoft.extensions"})

_MODULE = "onnxruntime_extensions"
_MISSING = (
    "onnxruntime-extensions decodes images and splits texts, and is not installed: pip"
    " install onnxruntime-extensions. Python 3.14 has no wheel of it: pass arrays (.npy,"
    " .npz) there"
)
_PROTOBUF = "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"


def library() -> str:
    """The file that onnxruntime takes as a library of operators.

    Importing onnxruntime-extensions 0.15 asks, by the environment, for the implementation of
    protobuf in Python, from which this process is safe, as it has loaded another, and its children
    are not: models would take them several times as long. So the environment is put back.

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
