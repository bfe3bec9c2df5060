"""Keys of a search's dependencies: hashes of models, configurations and metrics."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

from quark_onnx.config import QConfig, to_dict


def config_key(config: QConfig) -> str:
    """Return the hash of a configuration's dictionary form."""
    return document_key(to_dict(config))


def document_key(document: Mapping[str, Any]) -> str:
    """Return the hash of a configuration's plain values.

    Args:
        document: the values; their order does not matter.
    """
    text = json.dumps(document, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def function_key(function: Callable[..., Any]) -> str:
    """Return a key for a function: name, and code if written in Python.

    Args:
        function: the function.
    """
    # Callable instances are identified by their class.
    named = function if hasattr(function, "__qualname__") else type(function)
    code = getattr(function, "__code__", None) or getattr(
        type(function).__call__,
        "__code__",
        None,
    )
    digest = ""
    if code is not None:
        text = _code_text(code).encode()
        digest = hashlib.blake2b(text, digest_size=8).hexdigest()
    return f"{named.__module__}.{named.__qualname__} {digest}".strip()


def _code_text(code: CodeType) -> str:
    """Return a text of a code object that is independent of file and line."""
    # The repr of a nested code object holds the file and the address, which change from run to run.
    constants = [
        _code_text(each) if isinstance(each, CodeType) else repr(each)
        for each in code.co_consts
    ]
    return f"{code.co_code.hex()} {code.co_names} {constants}"
