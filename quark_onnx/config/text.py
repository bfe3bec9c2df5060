"""Calibrators and optimizers as text: ``"name"``, or ``"name:setting=value,..."``; and names in
lists.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from calibrators.shown import short
from quark_onnx.errors import ConfigError


def name_tuple(value: Any, where: str) -> tuple[str, ...]:
    """Return a tuple of names from one name or any collection of them.

    Args:
        value: what the user wrote.
        where: how messages call it.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(value, str):
        return (value,)
    try:
        items = tuple(value)
    except TypeError:
        items = (None,)
    if not all(isinstance(item, str) for item in items):
        raise ConfigError(
            f"{where} is {short(value)}; it must be a name or a list of names",
        )
    return items


def parse_call(
    text: str,
    what: str,
    *,
    words: bool = True,
) -> tuple[str, dict[str, Any]]:
    """The name and the settings in a text.

    Args:
        what: how messages call it.
        words: a value may be anything else than a number, true or false.

    >>> parse_call("minmax:moving_average=true,constant=0.1", "calibrator")
    ('minmax', {'moving_average': True, 'constant': 0.1})
    """
    name, _, rest = text.partition(":")
    settings: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(
                f"{what} {short(text)}: {short(part)} is not of the form setting=value",
            )
        if key.strip() in settings:
            raise ConfigError(
                f"{what} {short(text)}: {short(key.strip())} is given twice",
            )
        settings[key.strip()] = found = _value(value.strip())
        if isinstance(found, str) and not words:
            raise ConfigError(
                f"{what} {short(text)}: {short(found)} is neither a number nor true or false",
            )
    return name.strip(), settings


def _value(text: str) -> Any:
    """A number, true or false; anything else is a word."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def format_call(value: Any) -> str:
    """The text form of something with a name; settings at their defaults are left out."""
    changed = [
        f"{f.name}={getattr(value, f.name)}"
        for f in fields(value)
        if getattr(value, f.name) != f.default
    ]
    return str(value.name) + (":" + ",".join(changed) if changed else "")
