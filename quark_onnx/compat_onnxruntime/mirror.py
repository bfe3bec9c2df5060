"""Hand names of onnxruntime's modules through that hold data, prepare models or compare them."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any


class Mirror:
    """The names of a module of ``onnxruntime.quantization``, looked up when they are asked for.

    Attributes:
        module: its name there.
    """

    def __init__(self, module: str) -> None:
        self.module = (
            f"onnxruntime.quantization.{module}"
            if module
            else "onnxruntime.quantization"
        )

    def load(self) -> ModuleType:
        """The module itself.

        Raises:
            ImportError: the installed onnxruntime does not have it.
        """
        return importlib.import_module(self.module)

    def __call__(self, name: str) -> Any:
        """The value of a name.

        Raises:
            AttributeError: the installed onnxruntime does not have it; ``from ... import`` makes an
                ImportError of it.
        """
        if name.startswith("__"):
            raise AttributeError(f"{self.module} hands no {name} through")
        return getattr(self.load(), name)

    def names(self) -> list[str]:
        """Its public names."""
        return sorted(name for name in vars(self.load()) if not name.startswith("_"))
