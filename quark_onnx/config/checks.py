"""Check the fields of settings."""

from __future__ import annotations

from collections.abc import Iterable

from calibrators.shown import short
from quark_onnx.errors import ConfigError


def require_flags(settings: object, names: Iterable[str]) -> None:
    """Raise ConfigError unless the fields of these names are booleans."""
    for name in names:
        value = getattr(settings, name)
        if not isinstance(value, bool):
            raise ConfigError(f"{name} is {short(value)}; it must be true or false")
