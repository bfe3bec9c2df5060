"""Options of the execution provider, by device.

Source: Ryzen AI documentation 1.8 (2026-07-23), modelrun.rst. Values are texts. ``{folder}``
represents the model's folder and ``{env:NAME}`` an environment variable; the loader that opens the
session substitutes both.
"""

from __future__ import annotations

from typing import Any

from quark_onnx.common.registry import TARGETS
from quark_onnx.targets import Target

#: The overlay of Phoenix and Hawk Point; the installer of 1.8 lacks it (amd/RyzenAI-SW#345, #396,
#: #400): take 1.7.1.
_XCLBIN = (
    "{env:RYZEN_AI_INSTALLATION_PATH}/voe-4.0-win_amd64/xclbins/phoenix/4x4.xclbin"
)
#: Cache of the compiled model; "0" keeps it on disk, which the report of offloaded nodes requires.
_CACHE = {"cache_dir": "{folder}/cache", "enable_cache_file_io_in_mem": "0"}
CONFIG_FILE = "vitisai_config.json"
#: Devices that the loaders can detect.
DETECTED = ("phx", "stx", "krk")


def provider_options(target: Target, kind: str) -> dict[str, str]:
    """Return the options for a device and a number format.

    Args:
        target: the device.
        kind: "XINT8", "A8W8", "A16W8" or "BF16".
    """
    if kind == "BF16":
        # The BF16 compiler is chosen by the file, without the option ``target``.
        return {"config_file": "{folder}/" + CONFIG_FILE, **_CACHE}
    if target.compiler == "X1":
        return {
            "target": "X1",
            "xclbin": _XCLBIN,
            # As in AMD's quicktest on Phoenix: 1 would round ties as Python 3 does.
            "xlnx_enable_py3_round": "0",
            **_CACHE,
        }
    return {"target": "X2", **_CACHE}


def devices_for(target: Target, kind: str) -> dict[str, dict[str, str]]:
    """Return the options of every detectable device that supports a number format.

    The target's options come first.
    """
    rows = {name: TARGETS[name] for name in DETECTED if kind in TARGETS[name].presets}
    # Hawk Point has the PCI id of Phoenix, and is detected as such.
    first = {"hpt": "phx"}.get(target.name, target.name)
    names = sorted(rows, key=lambda name: name != first)
    return {name: provider_options(rows[name], kind) for name in names}


def compiler_config() -> dict[str, Any]:
    """Return the ``config_file`` for BF16 (modelrun.rst of release 1.8).

    ``targets`` is required since release 1.6.
    """
    return {
        "passes": [
            {"name": "init", "plugin": "vaip-pass_init"},
            {
                "name": "vaiml_partition",
                "plugin": "vaip-pass_vaiml_partition",
                "vaiml_config": {"optimize_level": 1, "preferred_data_storage": "auto"},
            },
        ],
        "target": "VAIML",
        "targets": [{"name": "VAIML", "pass": ["init", "vaiml_partition"]}],
    }
