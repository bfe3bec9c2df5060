"""The onnxruntime that is installed: several distributions bring the module ``onnxruntime``.

None of them is a dependency of ``quark-onnx-core``, as two of them overwrite each other's files.
"""

from __future__ import annotations

import re
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

#: Oldest supported release: QuantizeLinear for 4 and 16 bits, and numpy 2.
OLDEST = (1, 20)

#: What to install, by device.
COMMANDS = """\
  CPU                            pip install onnxruntime
  NVIDIA GPU                     pip install onnxruntime-gpu
  GPU on Windows (DirectML)      pip install onnxruntime-directml
  Ryzen AI                       the environment of the Ryzen AI Software has its own build"""
_UPGRADES = COMMANDS.replace("pip install", "pip install --upgrade").replace(
    "has its own build", "of a later release"
)


def require_onnxruntime() -> None:
    """Check that a complete onnxruntime of a supported release is installed.

    onnxruntime is not imported.

    Raises:
        ImportError: onnxruntime is missing, incomplete or too old; the message has the commands
            that install it.
    """
    try:
        # Found, but not imported: the import takes longer than most commands.
        spec = find_spec("onnxruntime")
    except ValueError:  # a module without a spec stands in for it
        return
    if spec is None:
        raise ImportError(
            "quark_onnx needs onnxruntime, and none is installed. Install one of"
            f" these:\n{COMMANDS}",
            name="onnxruntime",
        )
    if _is_remainder(spec):
        raise ImportError(
            f"the onnxruntime in {', '.join(spec.submodule_search_locations or ())} is"
            " incomplete, as after one of two builds was uninstalled. Uninstall all of"
            f" them, and install one again with --force-reinstall:\n{COMMANDS}",
            name="onnxruntime",
        )
    version = _version(spec)
    if _release(version) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ImportError(
            f"quark_onnx needs onnxruntime {oldest} or later, and {version} is installed"
            f" in {Path(spec.origin or '').parent}. Upgrade the build that is"
            f" installed:\n{_UPGRADES}",
            name="onnxruntime",
        )


def _is_remainder(spec: ModuleSpec) -> bool:
    """Return whether only a folder without ``__init__.py`` is left."""
    return spec.origin is None and spec.submodule_search_locations is not None


def _version(spec: ModuleSpec) -> str:
    """Return the version in ``__init__.py``; empty if the file does not state a version.

    All builds have this line, whatever the name of their distribution is.
    """
    if spec.origin is None:
        return ""
    try:
        text = Path(spec.origin).read_text(encoding="utf-8")
    except (OSError, ValueError):  # a compiled file, or a file in an archive
        return ""
    match = re.search(r"""^__version__ = ["'](.+)["']""", text, re.MULTILINE)
    return match[1] if match else ""


def _release(version: str) -> tuple[int, ...]:
    """Return major and minor number; the oldest supported release for an unknown version."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else OLDEST
