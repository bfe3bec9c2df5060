"""Commands that install an extra of the installed distribution.

``quark-onnx-core`` has all code and no onnxruntime. ``quark-onnx`` adds onnxruntime for CPUs.
A hint that named ``quark-onnx`` would install a second onnxruntime next to the build of a user of
``quark-onnx-core``.
"""

from __future__ import annotations

import json
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

    A distribution that was installed from a folder is named by the folder, as no registry may have
    it.

    Args:
        extra: name of the extra, such as ``llm``.
    """
    name = installed_distribution()
    return f"pip install '{_folder_of(name) or name}[{extra}]'"


def _folder_of(name: str) -> str:
    """Return the folder that a distribution was installed from; empty for a registry or a file."""
    # Imported here: they load the modules of the network, and a message is rare.
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    try:
        origin = distribution(name).read_text("direct_url.json")
    except PackageNotFoundError:
        return ""
    # The file of PEP 610.
    entry = json.loads(origin or "{}")
    if "dir_info" not in entry:
        return ""
    return url2pathname(urlsplit(entry["url"]).path)
