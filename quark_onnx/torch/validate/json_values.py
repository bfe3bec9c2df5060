"""Values of a configuration that may have any type, as JSON allows it."""

from __future__ import annotations

from typing import Any

from quark_onnx.common.containers import of_type


def object_of(value: Any) -> dict[str, Any]:
    """Return a JSON object; an empty object for any other value.

    >>> object_of({"bits": 4}), object_of(None)
    ({'bits': 4}, {})
    """
    if isinstance(value, dict):
        return value
    return {}


def objects_in(value: Any) -> dict[str, dict[str, Any]]:
    """Return the object-valued entries of a JSON object; empty for any other value.

    >>> objects_in({"group_0": {"format": None}, "group_1": "int4"})
    {'group_0': {'format': None}}
    """
    entries = object_of(value)
    # entries of another type have findings of their own, and must not stop the other checks
    return {key: entry for key, entry in entries.items() if isinstance(entry, dict)}


def strings_of(value: Any) -> list[str]:
    """Return the strings of a JSON array; none for any other value.

    >>> strings_of(["lm_head", 3]), strings_of("lm_head")
    (['lm_head'], [])
    """
    # a string is iterable, too, and must not be taken for a list of its letters
    if isinstance(value, list):
        return of_type(value, str)
    return []
