"""The PyTorch side, for commands that need it; others do without torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from quark_onnx.errors import MissingDependency


def torch_side(name: str) -> Any:
    """A module that needs torch, by its name.

    Raises:
        MissingDependency: torch, or what else it imports, is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingDependency(
            f"{error.name or error} is not installed; language models need it: pip"
            " install 'quark-onnx[llm]'",
        ) from error
