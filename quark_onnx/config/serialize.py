"""Write a QConfig as a dictionary or as YAML, for ``from_dict`` and ``load_yaml``."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import yaml

from quark_onnx.config.override import Override
from quark_onnx.config.qconfig import QConfig
from quark_onnx.config.spec import QuantizationSpec
from quark_onnx.config.tensors import TensorOverride
from quark_onnx.config.text import format_call


def to_dict(config: QConfig) -> dict[str, Any]:
    """Return plain dictionaries, lists, strings and numbers for ``from_dict``."""
    return _plain(config)  # type: ignore[no-any-return]


def _plain(value: Any) -> Any:
    """Return a value of a configuration as dictionaries, lists, strings and numbers."""
    if isinstance(value, QConfig | Override | TensorOverride | QuantizationSpec):
        return _plain_fields(value)
    if isinstance(value, tuple):
        return list(map(_plain, value))
    if isinstance(value, str | bool | int | float | None):
        return value
    # Calibrators have a statistic, optimizers a stage; both are written as calls.
    if hasattr(value, "statistic") or hasattr(value, "stage"):
        return format_call(value)
    # Number formats are written by name.
    return str(value)


def _plain_fields(value: Any) -> dict[str, Any]:
    """Return all fields, also those at defaults, which a later release may change."""
    plain = dict[str, Any]()
    for field in fields(value):
        plain[field.name] = _plain(getattr(value, field.name))
    return plain


def to_yaml(config: QConfig) -> str:
    """Return the YAML text of a configuration for ``load_yaml``."""
    # The order of the fields, which begin with the most important ones.
    return str(yaml.safe_dump(to_dict(config), sort_keys=False))
