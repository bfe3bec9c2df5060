"""Access to the PyTorch modules; other commands do not need torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from quark_onnx.errors import MissingDependency
from quark_onnx.extras import pip_install


def torch_side(name: str) -> Any:
    """Import a module that needs torch.

    Args:
        name: name of the module.

    Raises:
        MissingDependency: torch, or another dependency of the module, is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingDependency(
            f"{error.name or error} is not installed; language models need it:"
            f" {pip_install('llm')}",
        ) from error
