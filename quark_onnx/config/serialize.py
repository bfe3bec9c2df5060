"""Write a QConfig as a dictionary or as YAML, for ``from_dict`` and ``load_yaml``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import yaml

from calibrators.shown import short
from quark_onnx.common.errors import ConfigError
from quark_onnx.common.registry import DTYPES
from quark_onnx.config.override import Override
from quark_onnx.config.qconfig import QConfig, optimizer_of
from quark_onnx.config.spec import QuantizationSpec, parse_calibrator
from quark_onnx.config.tensors import TensorOverride
from quark_onnx.config.text import changed_settings, format_call


def to_dict(config: QConfig) -> dict[str, Any]:
    """Return plain dictionaries, lists, strings and numbers for ``from_dict``.

    Raises:
        ConfigError: a part cannot be read back: a function, or an object that is not registered.
    """
    return _plain(config)  # type: ignore[no-any-return]


def _plain(value: Any) -> Any:
    """Return a value of a configuration as dictionaries, lists, strings and numbers.

    Raises:
        ConfigError: the value cannot be read back.
    """
    if isinstance(value, QConfig | Override | TensorOverride | QuantizationSpec):
        return {
            field.name: _plain(getattr(value, field.name)) for field in fields(value)
        }
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str | bool | int | float | None):
        return _plain_scalar(value)
    # Calibrators have a statistic, optimizers a stage; both are written as calls.
    if hasattr(value, "statistic"):
        return _read_back(value, [format_call(value)], parse_calibrator)
    if hasattr(value, "stage"):
        return _plain_optimizer(value)
    # Number formats are written by name.
    return _read_back(value, [str(value)], DTYPES.__getitem__)


def _plain_scalar(
    value: str | bool | int | float | None,
) -> str | bool | int | float | None:
    """Return a value of a type that YAML has a form for."""
    # bool comes before int, of which it is a subclass.
    for kind in (bool, str, int, float):
        if isinstance(value, kind):
            # Numbers of numpy are instances of Python's float, but YAML has no form for them.
            return kind(value)
    return value


def _plain_optimizer(value: Any) -> Any:
    """Return an optimizer as a call, or as a mapping where a call has no form for a setting."""
    # A function among the settings has no form at all; the call shows it in the message.
    settings = changed_settings(value)
    forms: list[Any] = [format_call(value)]
    if not any(map(callable, settings.values())):
        plain = {name: _plain(setting) for name, setting in settings.items()}
        forms.append({"name": value.name, **plain})
    return _read_back(value, forms, optimizer_of)


def _read_back(value: Any, forms: list[Any], read: Callable[[Any], object]) -> Any:
    """Return the first form of a value from which an equal value is read.

    Args:
        value: a calibrator, an optimizer or a number format.
        forms: texts or mappings, the preferred one first.

    Raises:
        ConfigError: there is no such form.
    """
    for form in forms:
        try:
            if read(form) == value:
                return form
        except ConfigError:
            continue
    raise ConfigError(
        f"{short(forms[0])} cannot be written: only registered objects have a text, and"
        " functions have none; write the configuration without it, and add it in Python",
    )


def to_yaml(config: QConfig) -> str:
    """Return the YAML text of a configuration for ``load_yaml``.

    Raises:
        ConfigError: a part cannot be read back: a function, or an object that is not registered.
    """
    # The order of the fields, which begin with the most important ones.
    return str(yaml.safe_dump(to_dict(config), sort_keys=False))
