"""Options of the execution provider, by device.

Source: Ryzen AI documentation 1.8 (2026-07-23), modelrun.rst. Values are texts. ``{folder}``
represents the model's folder, ``{cache}`` a folder that the user may write to, and ``{env:NAME}``
an environment variable; the loader that opens the session substitutes them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from quark_onnx.common.errors import ConfigError
from quark_onnx.common.registry import TARGETS
from quark_onnx.targets import Target

#: The overlay of Phoenix and Hawk Point; the installer of 1.8 lacks it (amd/RyzenAI-SW#345, #396,
#: #400): take 1.7.1, or ship a copy.
_XCLBIN = (
    "{env:RYZEN_AI_INSTALLATION_PATH}/voe-4.0-win_amd64/xclbins/phoenix/4x4.xclbin"
)
#: Name of the copy of the overlay in a bundle.
OVERLAY_FILE = "4x4.xclbin"
#: First bytes of every overlay: field m_magic of axlf in XRT's xclbin.h.
OVERLAY_MAGIC = b"xclbin2"
#: Cache of the compiled model; "0" keeps it on disk, which the report of offloaded nodes requires.
#: The folder of a program may not be writable (microsoft/winml-cli#1378).
_CACHE = {"cache_dir": "{cache}", "enable_cache_file_io_in_mem": "0"}
#: Options that the loader sets for each device, so that no text from outside may replace them.
_OWN = ("cache_dir", "cache_key", "config_file", "xclbin")
CONFIG_FILE = "vitisai_config.json"
#: Options of the BF16 compiler with their values; None for any text. The first two are documented
#: (modelrun.rst of 1.8), the others are those of AMD's Whisper demo and release notes.
_COMPILER_OPTIONS: dict[str, tuple[str, ...] | None] = {
    "optimize_level": ("1", "2", "3"),
    "preferred_data_storage": ("auto", "vectorized", "unvectorized"),
    "fe_experiment": None,
    "aiecompiler_args": None,
}
#: Documented values of ``opt_level``, which is an option for integer models (modelrun.rst of 1.8).
_LEVELS = ("0", "1", "2", "3", "65536")
#: Devices that the loaders can detect.
DETECTED = ("phx", "stx", "krk")
#: Devices as the loaders detect them: Hawk Point has the PCI id of Phoenix, and a compiler does not
#: change the device.
_DETECTED_AS = {"hpt": "phx", "stx-x1": "stx", "krk-x1": "krk"}
#: Oldest driver for Windows of the releases 1.5 to 1.8 (app_development.rst, inst.rst). Drivers for
#: Linux have other numbers.
LEAST_DRIVER = "32.0.203.280"


def provider_options(
    target: Target,
    kind: str,
    extra: Mapping[str, str] = MappingProxyType({}),
    *,
    overlay: bool = False,
) -> dict[str, str]:
    """Return the options for a device and a number format.

    Args:
        target: the device.
        kind: "XINT8", "A8W8", "A16W8" or "BF16".
        extra: further options, such as ``opt_level``; they replace the ones of the same name.
        overlay: True if the folder holds a copy of the overlay.
    """
    if kind == "BF16":
        # The BF16 compiler is chosen by the file, without the option ``target``.
        return {"config_file": "{folder}/" + CONFIG_FILE, **_CACHE, **extra}
    if target.compiler == "X1":
        return {
            "target": "X1",
            "xclbin": "{folder}/" + OVERLAY_FILE if overlay else _XCLBIN,
            # As in AMD's quicktest on Phoenix: 1 would round ties as Python 3 does.
            "xlnx_enable_py3_round": "0",
            **_CACHE,
            **extra,
        }
    return {"target": "X2", **_CACHE, **extra}


def compiled_for(target: str, extra: Mapping[str, str]) -> str:
    """Return the name of the target with the compiler that provider options choose.

    Args:
        target: name of the target.
        extra: options of the execution provider; ``target`` is the compiler.

    Raises:
        ConfigError: the target is unknown.

    >>> compiled_for("stx", {"target": "X1"}), compiled_for("stx", {})
    ('stx-x1', 'stx')
    """
    is_older = TARGETS[target].compiler == "X2" and extra.get("target") == "X1"
    return f"{target}-x1" if is_older else target


def check_options(extra: Mapping[str, str], target: Target, kind: str) -> None:
    """Raise ConfigError for an option without a name or value, or that cannot be chosen.

    Args:
        extra: as for ``provider_options``.
        target: the device.
        kind: as for ``provider_options``.
    """
    for name, value in extra.items():
        # A name such as "opt level" reaches the provider, which does not report it.
        if not re.fullmatch(r"\w+", name, re.ASCII) or not value:
            raise ConfigError(
                f"provider option {name!r} is {value!r}; it has a name of letters, digits and"
                " underscores, and a value: opt_level=2"
            )
        if name in _OWN:
            raise ConfigError(
                f"provider option {name!r} is set by the loader of the bundle; leave it out"
            )
        if name in _COMPILER_OPTIONS:
            _check_compiler_option(name, value, kind)
        if name == "opt_level":
            _check_level(value, kind)
        if name == "target" and value not in ("X1", "X2"):
            raise ConfigError(f"provider option target is {value!r}; it is X1 or X2")
        if name == "target" and kind == "BF16":
            raise ConfigError(
                f"provider option target is {value!r}, but {CONFIG_FILE} chooses the compiler of"
                " BF16; leave it out"
            )
        if name == "target" and value == "X1" and kind != "XINT8":
            raise ConfigError(
                f"provider option target is 'X1', whose compiler takes XINT8 alone, not {kind};"
                " leave it out, or deploy XINT8"
            )
        if name == "target" and value == "X2" != target.compiler:
            raise ConfigError(
                "provider option target is 'X2', a compiler for stx and krk, not for"
                f" {target.name}; leave it out"
            )


def _check_level(value: str, kind: str) -> None:
    """Raise ConfigError for an ``opt_level`` that has no such value or format."""
    if kind == "BF16":
        raise ConfigError(
            "opt_level is an option of the compiler for integers, but the model is BF16;"
            " optimize_level is that of BF16"
        )
    if value not in _LEVELS:
        raise ConfigError(
            f"option opt_level is {value!r}; it is one of {', '.join(_LEVELS)}"
        )


def _check_compiler_option(name: str, value: str, kind: str) -> None:
    """Raise ConfigError for an option of the BF16 compiler that has no such value or format."""
    if kind != "BF16":
        raise ConfigError(
            f"{name} is an option of the BF16 compiler, but the model is {kind}; leave it out"
        )
    values = _COMPILER_OPTIONS[name]
    if values is not None and value not in values:
        raise ConfigError(
            f"option {name} is {value!r}; it is one of {', '.join(values)}"
        )


def split_options(extra: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the options of the provider, and those of the BF16 compiler.

    >>> split_options({"opt_level": "2", "optimize_level": "3"})
    ({'opt_level': '2'}, {'optimize_level': '3'})
    """
    compiler = {name: extra[name] for name in extra if name in _COMPILER_OPTIONS}
    provider = {name: extra[name] for name in extra if name not in compiler}
    return provider, compiler


def devices_for(
    target: Target,
    kind: str,
    extra: Mapping[str, str] = MappingProxyType({}),
    *,
    overlay: bool = False,
) -> dict[str, dict[str, str]]:
    """Return the options of every detectable device that supports a number format.

    The target's options come first. ``extra`` goes to devices of its architecture alone.
    """
    rows = {name: TARGETS[name] for name in DETECTED if kind in TARGETS[name].presets}
    first = _DETECTED_AS.get(target.name, target.name)
    if first != target.name and target.compiler != rows[first].compiler:
        extra = {**extra, "target": target.compiler}
    names = sorted(rows, key=lambda name: name != first)
    devices = dict[str, dict[str, str]]()
    for name in names:
        row = rows[name]
        same = target.architecture in ("", row.architecture)
        devices[name] = provider_options(
            row, kind, extra if same else {}, overlay=overlay
        )
    return devices


def compiler_config(
    extra: Mapping[str, str] = MappingProxyType({}), *, transformer: bool = False
) -> dict[str, Any]:
    """Return the ``config_file`` for BF16 (modelrun.rst of release 1.8).

    ``targets`` is required since release 1.6.

    Args:
        extra: options of the compiler; they replace the ones of the same name.
        transformer: True for a model with attention, whose data AMD's documentation and its
            DistilBERT sample store unvectorized.
    """
    storage = "unvectorized" if transformer else "auto"
    options: dict[str, Any] = {
        "optimize_level": 1,
        "preferred_data_storage": storage,
        **extra,
    }
    # A number in the file.
    options["optimize_level"] = int(options["optimize_level"])
    return {
        "passes": [
            {"name": "init", "plugin": "vaip-pass_init"},
            {
                "name": "vaiml_partition",
                "plugin": "vaip-pass_vaiml_partition",
                "vaiml_config": options,
            },
        ],
        "target": "VAIML",
        "targets": [{"name": "VAIML", "pass": ["init", "vaiml_partition"]}],
    }
