"""Parse and format calibrators, optimizers (``"name:setting=value,..."``) and names."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from calibrators.shown import short
from quark_onnx.common.errors import ConfigError
from quark_onnx.config.checks import require


def name_tuple(value: Any, where: str) -> tuple[str, ...]:
    """Return a tuple of names from a name or a collection of names.

    Args:
        value: what the user wrote.
        where: how messages call it.

    Raises:
        ConfigError: it is something else.
    """
    # A string is iterable, and would become a tuple of letters.
    if isinstance(value, str):
        return (value,)
    try:
        items = tuple(value)
    except TypeError:
        # Not iterable: the check below refuses None, with the same message.
        items = (None,)
    require(
        all(isinstance(item, str) for item in items),
        where,
        value,
        "a name or a list of names",
    )
    return items


def parse_call(
    text: str, what: str, *, words: bool = True
) -> tuple[str, dict[str, Any]]:
    """Return the name and the settings in a text.

    Args:
        text: the text.
        what: kind of object, for messages.
        words: accept values other than numbers, true and false.

    >>> parse_call("minmax:moving_average=true,constant=0.1", "calibrator")
    ('minmax', {'moving_average': True, 'constant': 0.1})
    """
    name, _, settings_text = text.partition(":")
    settings: dict[str, Any] = {}
    # A text without settings splits into one empty part.
    for part in filter(None, settings_text.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(
                f"{what} {short(text)}: {short(part)} is not of the form setting=value",
            )
        if key.strip() in settings:
            raise ConfigError(
                f"{what} {short(text)}: {short(key.strip())} is given twice",
            )
        settings[key.strip()] = parsed = _value(value.strip())
        if isinstance(parsed, str) and not words:
            raise ConfigError(
                f"{what} {short(text)}: {short(parsed)} is neither a number nor true or false",
            )
    return name.strip(), settings


def _value(text: str) -> Any:
    """Parse a number, true or false; other texts are words.

    Args:
        text: the text without spaces at its ends.

    Returns:
        A bool, an int, a float or the text.
    """
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    # int first: float would turn a count of candidates into 128.0.
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def format_call(value: Any) -> str:
    """Return the text of an object with a name, without default settings."""
    settings = list[str]()
    for name, setting in changed_settings(value).items():
        if callable(setting):
            # Without the address, which differs between processes, as models hold this text.
            setting = getattr(setting, "__qualname__", type(setting).__qualname__)
        settings.append(f"{name}={setting}")
    if not settings:
        return str(value.name)
    return f"{value.name}:{','.join(settings)}"


def changed_settings(value: Any) -> dict[str, Any]:
    """Return the fields of an object whose values are not the defaults, by name."""
    # A field with a default_factory has no default here, and always counts as changed.
    return {
        field.name: getattr(value, field.name)
        for field in fields(value)
        if getattr(value, field.name) != field.default
    }
