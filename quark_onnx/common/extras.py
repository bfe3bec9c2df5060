"""Commands that install an extra of the installed distribution.

``quark-onnx-core`` has all code and no onnxruntime. ``quark-onnx`` adds onnxruntime for CPUs.
A hint that named ``quark-onnx`` would install a second onnxruntime next to the build of a user of
``quark-onnx-core``.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution

#: Names of the distributions.
_PLAIN = "quark-onnx"
_CORE = "quark-onnx-core"


def installed_distribution() -> str:
    """Return the name of the installed distribution.

    Without an installation, as on ``PYTHONPATH``, the name is ``quark-onnx``.
    """
    # Both are installed with quark-onnx, which depends on the other: it comes first.
    for name in (_PLAIN, _CORE):
        try:
            distribution(name)
        except PackageNotFoundError:
            continue
        return name
    return _PLAIN


def pip_install(extra: str) -> str:
    """Return the command that installs an extra.

    Args:
        extra: name of the extra, such as ``llm``.
    """
    return f"pip install '{installed_distribution()}[{extra}]'"
