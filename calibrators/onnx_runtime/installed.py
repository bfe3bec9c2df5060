"""The onnxruntime that is installed: several distributions bring the module ``onnxruntime``.

None of them is a dependency of ``quark-onnx-core``, as two of them overwrite each other's files.
"""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from importlib.util import find_spec

#: What to install, by device.
COMMANDS = """\
  CPU                            pip install onnxruntime
  NVIDIA GPU                     pip install onnxruntime-gpu
  GPU on Windows (DirectML)      pip install onnxruntime-directml
  Ryzen AI                       the environment of the Ryzen AI Software has its own build"""


def require_onnxruntime() -> None:
    """Raise ImportError, with the commands that install one, where there is no onnxruntime.

    onnxruntime is not imported.
    """
    try:
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


def _is_remainder(spec: ModuleSpec) -> bool:
    """Return whether only a folder without ``__init__.py`` is left."""
    return spec.origin is None and spec.submodule_search_locations is not None
