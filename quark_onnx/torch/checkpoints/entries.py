"""Read entries of a ``quantization_config`` whose types may be wrong.

Other programs and people write config.json. An entry of a wrong type is an error that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quark_onnx.config.checks import require


def as_object(value: Any, where: str = "") -> Mapping[str, Any]:
    """Return an entry that must be an object.

    Args:
        value: the entry.
        where: name of the entry, for errors; empty for the whole configuration.

    Raises:
        ConfigError: the entry is of another type.

    >>> as_object([1], "export")
    Traceback (most recent call last):
    quark_onnx.common.errors.ConfigError: quantization_config: export is [1]; it must be an object
    """
    require(isinstance(value, Mapping), _place(where), value, "an object")
    return dict(value)


def object_in(found: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the object at a key; empty if missing.

    Raises:
        ConfigError: the entry is of another type.
    """
    # Some programs write null for an empty entry.
    return as_object(found.get(key) or {}, key)


def number_in(found: Mapping[str, Any], key: str) -> float:
    """Return the number at a key; 0 if missing.

    Raises:
        ConfigError: the entry is of another type.
    """
    value = found.get(key) or 0
    # isinstance would accept True as a number.
    require(type(value) in (int, float), _place(key), value, "a number")
    return float(value)


def size_in(found: Mapping[str, Any], key: str, where: str) -> int:
    """Return the whole number at a key.

    Args:
        found: the configuration.
        key: the key.
        where: name of the object that has the key, for errors.

    Raises:
        ConfigError: the entry is missing or of another type.
    """
    value = found.get(key)
    require(type(value) is int, _place(f"{key} of {where}"), value, "a whole number")
    return int(found[key])


def names_in(found: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return the list of names at a key; empty if missing.

    Raises:
        ConfigError: the entry is not a list of names.
    """
    names = found.get(key)
    if names is None:
        return ()
    is_list = isinstance(names, list)
    require(
        is_list and all(isinstance(name, str) for name in names),
        _place(key),
        names,
        "a list of names",
    )
    return tuple(names)


def _place(where: str) -> str:
    """Return the name of an entry, for errors."""
    return f"quantization_config: {where}" if where else "quantization_config"
