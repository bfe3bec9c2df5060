"""Models and settings for Qualcomm's NPUs: onnxruntime's own settings.

This package's quantizer supports the settings.
"""

from __future__ import annotations

from typing import Any

from quark_onnx.compat_onnxruntime.mirror import Mirror

_theirs = Mirror("execution_providers.qnn")


def __getattr__(name: str) -> Any:
    return _theirs(name)


def __dir__() -> list[str]:
    return [*globals(), *_theirs.names()]
