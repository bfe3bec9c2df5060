"""Access to onnxruntime's modules that hold data, prepare models or compare them."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

_THEIRS = "onnxruntime.quantization"


class Mirror:
    """Names of a module of ``onnxruntime.quantization``, looked up on access.

    Attributes:
        module: full name of the module.
    """

    def __init__(self, module: str) -> None:
        self.module = f"{_THEIRS}.{module}" if module else _THEIRS

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
        # ``from ... import *`` takes the names of the module alone, without this list.
        if name == "__all__":
            return self.names()
        # inspect, pickle and others ask modules for such names; onnxruntime's describe another
        # module.
        if name.startswith("__"):
            raise AttributeError(f"{self.module} hands no {name} through")
        return _replaced(getattr(self.load(), name))

    def names(self) -> list[str]:
        """Return the public names."""
        # Only now imported: a script that lists no names never loads the module.
        return sorted(name for name in vars(self.load()) if not name.startswith("_"))


def _replaced(value: Any) -> Any:
    """Return the module of this package that replaces one of onnxruntime; others unchanged.

    ``from ... import matmul_nbits_quantizer`` asks for a name before it looks for a module.

    Args:
        value: the value of a name.
    """
    if not isinstance(value, ModuleType):
        return value
    package, _, module = value.__name__.partition(f"{_THEIRS}.")
    if package or not module:
        return value
    try:
        return importlib.import_module(f"{__package__}.{module}")
    except ModuleNotFoundError as error:
        # onnxruntime has modules that nothing here replaces, such as its operators.
        if not str(error.name).startswith(f"{__package__}."):
            raise
        return value
