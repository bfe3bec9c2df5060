"""Changes of a configuration, as the options of the command line that make them."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from quark_onnx.common.errors import ConfigError
from quark_onnx.common.registry import PRESETS, RECIPES, TARGETS
from quark_onnx.config import QConfig
from quark_onnx.config.tensors import tensor_calibrator
from quark_onnx.optimizers import AutoMixedPrecision
from quark_onnx.targets import unfit


def changed(config: QConfig | str | Path | dict[str, Any], options: str) -> QConfig:
    """Return a configuration with a change, written as an option of the command line.

    A preset replaces the formats and their settings, a recipe all settings but exclusions, the
    target and the gate.

    Args:
        config: the configuration, as for ``quantize_static``.
        options: one option with its values, as in ``NextStep``.

    Raises:
        ConfigError: the option changes no configuration, or a value is wrong.

    >>> changed(QConfig.of("S8S8"), "--preset A8W8") == QConfig.of("A8W8")
    True
    """
    option, *values = shlex.split(options)
    if option not in _CHANGES:
        raise ConfigError(f"{option} changes no configuration")
    return _CHANGES[option](QConfig.of(config), values)


def is_possible(config: QConfig, options: str) -> bool:
    """Return whether a change makes another configuration, which the target takes.

    Args:
        config: the configuration.
        options: as for ``changed``.
    """
    try:
        other = changed(config, options)
    except ConfigError:
        return False
    if other == config:
        return False
    return not config.target or not unfit(TARGETS[config.target], other)


def _with_preset(config: QConfig, values: Sequence[str]) -> QConfig:
    preset = PRESETS[values[0]]
    # Exclusions, optimizers and the target are the user's, and stay.
    return config.with_(**{name: getattr(preset, name) for name in _preset_fields()})


def _preset_fields() -> list[str]:
    """Return the settings in which presets differ, but for optimizers."""
    names = list[str]()
    for field in fields(QConfig):
        values = [getattr(preset, field.name) for preset in PRESETS.values()]
        if field.name != "optimizers" and any(value != values[0] for value in values):
            names.append(field.name)
    return names


def _with_recipe(config: QConfig, values: Sequence[str]) -> QConfig:
    recipe: QConfig = RECIPES[values[0]].config_for(config.target)
    return recipe.with_(
        target=config.target,
        fix_sizes=config.fix_sizes,
        exclude=config.exclude,
        min_sqnr=config.min_sqnr,
    )


def _with_float_nodes(config: QConfig, values: Sequence[str]) -> QConfig:
    mixed = AutoMixedPrecision(target=float(values[0]), to="float")
    return config.with_(optimizers=(mixed, *config.optimizers))


def _with_tensor_calibrators(config: QConfig, values: Sequence[str]) -> QConfig:
    overrides = [tensor_calibrator(value) for value in values]
    return config.with_(tensors=(*config.tensors, *overrides))


_CHANGES: dict[str, Callable[[QConfig, Sequence[str]], QConfig]] = {
    "--preset": _with_preset,
    "--recipe": _with_recipe,
    "--exclude": lambda config, values: config.with_(
        exclude=(*config.exclude, *values)
    ),
    "--calibrator": lambda config, values: config.with_(calibrator=values[0]),
    "--per-channel": lambda config, _: config.with_(per_channel=True),
    "--optimize": lambda config, values: config.with_(
        optimizers=(*config.optimizers, *values)
    ),
    "--auto-exclude": _with_float_nodes,
    "--tensor-calibrator": _with_tensor_calibrators,
}
