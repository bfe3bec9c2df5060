"""Names and settings of the algorithms for language models, without an import of torch.

The algorithms need torch, whose import takes seconds. The command line is checked earlier.
"""

from __future__ import annotations

from dataclasses import fields
from importlib.util import find_spec

from quark_onnx.common.errors import ConfigError, nearest
from quark_onnx.common.registry import ALGORITHMS
from quark_onnx.config.checks import require_known
from quark_onnx.config.text import parse_call
from quark_onnx.torch.config.refusals import (
    REFUSED_ALGORITHMS,
    REFUSED_SETTINGS,
    Refusal,
)

_GPTQ = (
    "damping",
    "act_order",
    "search_scales",
    "coordinate_descent_passes",
    "rounds_activations",
)
_ROTATION = ("r1", "r2", "r3", "r4", "size", "trained", "steps", "seed")
_EVERY_CLIENT = "every client of the scheme"

#: The settings of each algorithm, as its dataclass has them.
ALGORITHM_SETTINGS: dict[str, tuple[str, ...]] = {
    "autoround": (
        "steps",
        "lr",
        "minmax_lr",
        "batch",
        "tune_ranges",
        "optimizer",
        "seed",
    ),
    "autosmoothquant": ("steps", "scale_clamp_min"),
    "awq": ("steps", "duo", "clip"),
    "clip": ("steps", "shrink"),
    "distill": ("steps", "lr", "batch", "sequences", "seed"),
    "gptaq": (*_GPTQ, "alpha"),
    "gptq": _GPTQ,
    "hqq": ("p", "beta", "kappa", "iterations"),
    "qronos": (*_GPTQ, "relative_to"),
    "quarot": _ROTATION,
    "rotation": _ROTATION,
    "smoothquant": ("alpha", "scale_clamp_min"),
    "spinquant": _ROTATION,
}


#: Algorithms without data; a rotation learns if ``trained``.
_WITHOUT_DATA = ("hqq", "quarot", "rotation", "spinquant")


def learns_from_data(text: str) -> bool:
    """Return whether an algorithm of this package needs calibration data.

    >>> learns_from_data("gptq"), learns_from_data("rotation"), learns_from_data("rotation:trained=true")
    (True, False, True)
    """  # noqa: E501
    name, settings = parse_call(text, "algorithm")
    if name.lower() in _WITHOUT_DATA:
        return bool(settings.get("trained"))
    return name.lower() in ALGORITHM_SETTINGS


def check_algorithm(text: str) -> None:
    """Raise ConfigError for an unknown algorithm, or an unknown setting.

    Values of settings are checked when the algorithm is created.

    >>> check_algorithm("gptq:damping=0.02")
    """
    name, settings = parse_call(text, "algorithm")
    known = _settings_of(name)
    for setting in settings:
        # Before the check for unknown settings, whose error would give no reason.
        refusal = _refused_setting(name, setting)
        if refusal is not None:
            raise ConfigError(f"{name} has no setting {setting!r}: {refusal}")
        require_known(setting, known, f"{name} has no setting")


def _refused_setting(name: str, setting: str) -> Refusal | None:
    """Return the refusal of a setting, if any; names of one algorithm share their settings."""
    settings = ALGORITHM_SETTINGS.get(name.lower())
    for (algorithm, refused), refusal in REFUSED_SETTINGS.items():
        # Equal settings tell that quarot and spinquant are names of rotation.
        if (settings, setting) == (ALGORITHM_SETTINGS[algorithm], refused):
            return refusal
    return None


def _settings_of(name: str) -> tuple[str, ...]:
    """Return the names of an algorithm's settings; plug-ins need an import of torch."""
    refusal = REFUSED_ALGORITHMS.get(name.lower())
    if refusal is not None:
        raise ConfigError(f"the algorithm {name!r} is not offered: {refusal}")
    # Any name may belong to a plug-in, whose settings are known from its class alone.
    if ALGORITHMS.plugins and find_spec("torch") is not None:
        return tuple(field.name for field in fields(ALGORITHMS[name]))
    settings = ALGORITHM_SETTINGS.get(name.lower())
    if settings is None:
        raise ConfigError(
            f"unknown algorithm {name!r}{nearest(name, ALGORITHM_SETTINGS)}",
        )
    return settings


def clients_of_algorithm(name: str) -> str:
    """Return the clients that load an algorithm's result, in words.

    >>> clients_of_algorithm("gptq")
    'every client of the scheme'
    """
    # R4 rotates the inputs of layers at runtime, which no client does.
    if ALGORITHM_SETTINGS.get(name) == _ROTATION:
        return f"{_EVERY_CLIENT}; with r4=true none, the model has no checkpoint"
    return _EVERY_CLIENT
