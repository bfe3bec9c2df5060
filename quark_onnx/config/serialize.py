"""Convert a QConfig to and from dictionaries and YAML.

An unknown key is an error with the nearest match.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from calibrators.limits import read_text
from calibrators.shown import short
from quark_onnx.config.qconfig import Override, QConfig
from quark_onnx.config.spec import (
    QuantizationSpec,
    check_names,
    settings_of,
    spec_of,
)
from quark_onnx.config.tensors import TensorOverride
from quark_onnx.config.text import format_call
from quark_onnx.errors import ConfigError, nearest
from quark_onnx.registry import PRESETS

#: Most bytes of a file: five times a file with an override for each of 10,000 nodes.
_BYTES = 1 << 22
#: Most values of a file with expanded aliases: a hundred times those of the largest in use.
_VALUES = 100_000


def to_dict(config: QConfig) -> dict[str, Any]:
    """Return plain dictionaries, lists, strings and numbers for ``from_dict``."""
    return _plain(config)  # type: ignore[no-any-return]


def _plain(value: Any) -> Any:
    if isinstance(value, QConfig | Override | TensorOverride | QuantizationSpec):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if hasattr(value, "statistic") or hasattr(value, "stage"):
        return format_call(value)
    return str(value)


def from_dict(data: dict[str, Any]) -> QConfig:
    """Return the configuration of a dictionary.

    ``preset`` names the configuration to start from (A8W8 if absent), the other keys change it.
    ``calibrator`` and ``per_channel`` are shortcuts as in ``QConfig.with_``.

    >>> from_dict({"preset": "S8S8", "per_channel": True}).weight.per_channel
    True
    """
    changes = settings_of(data, "the config")
    preset = changes.pop("preset", "A8W8")
    if not isinstance(preset, str | QConfig):
        raise ConfigError(
            f"preset is {short(preset)}; it must be a preset's name{nearest(str(preset), PRESETS)}",
        )
    base: QConfig = preset if isinstance(preset, QConfig) else PRESETS[preset]
    if "overrides" in changes:
        if not isinstance(changes["overrides"], list | tuple):
            raise ConfigError(
                f"overrides is {short(changes['overrides'])}; it must be a list",
            )
        changes["overrides"] = tuple(
            _override(item, base) for item in changes["overrides"]
        )
    if isinstance(changes.get("tensors"), list | tuple):
        changes["tensors"] = tuple(
            _tensor_override(item) for item in changes["tensors"]
        )
    return base.with_(**changes)


def _tensor_override(data: Any) -> TensorOverride:
    if isinstance(data, TensorOverride):
        return data
    settings = settings_of(data, "an override of tensors")
    check_names(settings, TensorOverride)
    if "tensors" not in settings:
        raise ConfigError("an override of tensors names none; give tensors")
    return TensorOverride(**settings)


def _override(data: Any, base: QConfig) -> Override:
    if isinstance(data, Override):
        return data
    settings = settings_of(data, "an override")
    check_names(settings, Override)
    for name in ("activation", "weight"):
        if settings.get(name) is not None:
            settings[name] = spec_of(settings[name], getattr(base, name), name)
    return Override(**settings)


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses duplicate keys and excessive aliases.

    YAML would take the last of duplicate keys.
    """

    def construct_document(self, node: yaml.Node) -> Any:
        """Construct a document, unless the aliases expand too far."""
        if _expanded(node, {}) > _VALUES:
            raise yaml.constructor.ConstructorError(
                None,
                None,
                f"its aliases stand for more than {_VALUES:,} values",
                node.start_mark,
            )
        return super().construct_document(node)

    def construct_mapping(
        self,
        node: yaml.MappingNode,
        deep: bool = False,
    ) -> dict[Any, Any]:
        """Construct a mapping, unless a key is given twice."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for place, key in enumerate(keys):
            if key in keys[:place]:
                raise yaml.constructor.ConstructorError(
                    None,
                    None,
                    f"{short(key)} is given twice",
                    node.start_mark,
                )
        return super().construct_mapping(node, deep)


def _expanded(node: yaml.Node, known: dict[int, int]) -> int:
    """Return the number of values of a node with expanded aliases.

    A node that contains itself exceeds the limit.
    """
    if id(node) not in known:
        # Provisional: a node that is met again before its count is known contains itself.
        known[id(node)] = _VALUES + 1
        parts: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                parts += [key, value]
        elif isinstance(node, yaml.SequenceNode):
            parts = node.value
        known[id(node)] = 1 + sum(_expanded(part, known) for part in parts)
    return known[id(node)]


def load_yaml(path: Path) -> QConfig:
    """Read a configuration from a YAML file.

    Raises:
        ConfigError: the file is missing, is not YAML, or describes no configuration; the message
            names it.
    """
    try:
        data = yaml.load(read_text(path, _BYTES), _Loader)
    except OSError as error:
        raise ConfigError(
            f"config file {path} cannot be read: {error.strerror}",
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"config file {path} is not valid YAML: {error}") from error
    try:
        return from_dict({} if data is None else data)
    except ConfigError as error:
        raise ConfigError(f"config file {path}: {error}") from error


def to_yaml(config: QConfig) -> str:
    """Return the YAML text of a configuration for ``load_yaml``."""
    return str(yaml.safe_dump(to_dict(config), sort_keys=False))
