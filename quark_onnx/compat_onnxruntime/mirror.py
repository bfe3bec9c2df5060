"""Access to onnxruntime's modules that hold data, prepare models or compare them."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any


class Mirror:
    """Names of a module of ``onnxruntime.quantization``, looked up on access.

    Attributes:
        module: full name of the module.
    """

    def __init__(self, module: str) -> None:
        self.module = (
            f"onnxruntime.quantization.{module}"
            if module
            else "onnxruntime.quantization"
        )

    def load(self) -> ModuleType:
        """Import the module.

        Raises:
            ImportError: the installed onnxruntime does not have the module.
        """
        # ``sys.modules`` keeps the module, so that later look-ups are cheap.
        return importlib.import_module(self.module)

    def __call__(self, name: str) -> Any:
        """Return the value of a name.

        Args:
            name: the name.

        Raises:
            AttributeError: the installed onnxruntime does not have the name; ``from ... import``
                converts the error to an ImportError.
        """
        # inspect, pickle and others ask modules for such names; onnxruntime's describe another
        # module.
        if name.startswith("__"):
            raise AttributeError(f"{self.module} hands no {name} through")
        return getattr(self.load(), name)

    def names(self) -> list[str]:
        """Return the public names."""
        # Only now imported: a script that lists no names never loads the module.
        return sorted(name for name in vars(self.load()) if not name.startswith("_"))
