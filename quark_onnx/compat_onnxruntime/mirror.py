"""Access to onnxruntime's modules that hold data, prepare models or compare them."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from quark_onnx.common.aliases import ALIASES, imports_of

_THEIRS = "onnxruntime.quantization"
#: Modules of this package with a file.
_WITH_FILES = frozenset(
    f"{__package__}.{module}" for module in ("quantize", "static_quantize_runner")
)


def mirror(
    module: str, own: Mapping[str, Any]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a module with onnxruntime's names.

    Python asks ``__getattr__`` for missing names alone (PEP 562), so that names of this package
    hide those of onnxruntime.

    Args:
        module: name of the module below ``onnxruntime.quantization``, or "".
        own: the names of this package's module.
    """
    theirs = f"{_THEIRS}.{module}" if module else _THEIRS

    def names() -> list[str]:
        # Only now imported: a script that lists no names never loads the module.
        attributes = vars(importlib.import_module(theirs))
        return sorted(name for name in attributes if not name.startswith("_"))

    def get(name: str) -> Any:
        # ``from ... import *`` takes the names of the module alone, without this list.
        if name == "__all__":
            return names()
        # inspect, pickle and others ask modules for such names; onnxruntime's describe another
        # module.
        if name.startswith("__"):
            raise AttributeError(f"{theirs} hands no {name} through")
        return _replaced(getattr(importlib.import_module(theirs), name))

    # dir() shows both, as a script cannot tell where a name comes from.
    return get, lambda: [*own, *names()]


def _replaced(value: Any) -> Any:
    """Return the counterpart in this package of onnxruntime's module; other values unchanged.

    ``from ... import matmul_nbits_quantizer`` asks for a name before it looks for a module.
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


def their_modules() -> list[str]:
    """Return the names of all modules below the installed ``onnxruntime.quantization``.

    Folders count as packages, whether they have an ``__init__.py`` or not.
    """
    spec = importlib.util.find_spec(_THEIRS)
    assert spec is not None and spec.origin is not None
    root = Path(spec.origin).parent
    names = set[str]()
    for file in root.rglob("*.py"):
        parts = file.relative_to(root).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        names |= {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
    return sorted(names)


def mirror_sources() -> dict[str, str]:
    """Return the sources of the modules of this package that have no file."""
    sources = {}
    for module in their_modules():
        path = f"{__package__}.{module}"
        if path in _WITH_FILES:
            continue
        sources[path] = (
            f'"""The names of {_THEIRS}.{module}."""\n'
            f"{imports_of(path) if path in ALIASES else ''}"
            "from quark_onnx.compat_onnxruntime.mirror import mirror\n"
            f"__getattr__, __dir__ = mirror({module!r}, globals())\n"
        )
        # ``python -m`` runs onnxruntime's command, unless this package quantizes instead.
        if not ALIASES.get(path):
            sources[path] += (
                'if __name__ == "__main__":\n'
                "    import runpy\n"
                f'    runpy.run_module("{_THEIRS}.{module}", run_name="__main__")\n'
            )
    return sources
