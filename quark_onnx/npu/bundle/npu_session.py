"""Open the model of this folder on the NPU; on the CPU where that is not possible, saying so.

    from npu_session import open_session
    session, where = open_session()
    outputs = session.run(None, {"input": array})

As a program it runs one sample:  python npu_session.py samples/0000.npz [--device auto|npu|cpu]
Needs onnxruntime (the one of Ryzen AI for the NPU) and numpy; to read images, onnxruntime-extensions, and so does what
is made of the outputs where it has operators of these.
"""  # noqa: E501

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

# Importing onnxruntime 1.32 writes a file .ses with a UUID into the temporary folder, unless this
# is set.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

PROVIDER = "VitisAIExecutionProvider"
HERE = Path(__file__).resolve().parent


def open_session(
    device: str = "auto",
    *,
    strict: bool = False,
    verbose: bool = False,
    fresh: bool = False,
    folder: Path = HERE,
) -> tuple[Any, str]:
    """A session, and "npu" or "cpu": what it was opened for.

    Args:
        device: "npu" and "cpu" ask for one of them; "auto" takes the NPU where there is one.
        strict: with the NPU, an operator that would run on the CPU is an error.
        verbose: with the NPU, the engine logs at severity 1, which has counts of operators.
        fresh: with the NPU, do not take a model that precompile.py has compiled.
        folder: the folder of the bundle. One program may open several: see README.md.

    Raises:
        RuntimeError: the NPU was asked for by name, and cannot be had.
    """
    import onnxruntime as ort

    settings = _settings(folder)
    model = str(folder / settings["model"])
    if device != "cpu":
        try:
            options = ort.SessionOptions()
            if strict:
                options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
            if verbose:
                options.log_severity_level = 1
            found, chosen = provider_options(ort, settings, folder)
            compiled = None if fresh else compiled_model(found, chosen, folder)
            return session_of(ort, str(compiled or model), options, chosen), "npu"
        except (
            Exception
        ) as error:  # a provider that is not there, or that does not take the model
            if device == "npu":
                raise RuntimeError(f"the NPU cannot be used: {error}") from error
            print(f"npu_session: running on the CPU: {error}", file=sys.stderr)
    return ort.InferenceSession(model, providers=["CPUExecutionProvider"]), "cpu"


def read_image(file: str | os.PathLike[str], *, folder: Path = HERE) -> Any:
    """The array that the model takes of a JPEG or PNG file, read as the calibration data was.

    Raises:
        RuntimeError: this folder has nothing that reads images, or onnxruntime-extensions is
        missing. OSError, ValueError: the file cannot be read, is no JPEG or PNG, or is damaged.
    """
    import numpy as np

    reader = _on_cpu(
        folder,
        "preprocess",
        "this model was not made with images; give it a .npz file",
    )
    encoded = _encoded(folder).read_encoded(Path(file))
    return reader.run(None, {"encoded": np.frombuffer(encoded, np.uint8)})[0]


def postprocess(arrays: Mapping[str, Any], *, folder: Path = HERE) -> dict[str, Any]:
    """Run the operators after the model on the CPU; return their results by name.

    Args:
        arrays: outputs of the model by name, and inputs of the model that are read as well.
        folder: the folder of the bundle.

    Raises:
        RuntimeError: the bundle has no operators after the model.
    """
    session = _on_cpu(folder, "postprocess", "nothing stands behind this model")
    found = session.run(
        None,
        {value.name: arrays[value.name] for value in session.get_inputs()},
    )
    return dict(
        zip((value.name for value in session.get_outputs()), found, strict=True),
    )


def printable(name: str) -> str:
    """A name for a terminal: control characters, which names in models may hold, are escaped."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in name
    )


def arrays_of(name: str, value: Any) -> dict[str, Any]:
    """The arrays of an output, by names that start with its own: sequences and maps have several.

    Args:
        name: name of the output.
        value: an array, a list of values, a map of numbers or texts, or None.
    """
    import numpy as np

    if value is None:
        return {}
    if isinstance(value, dict):
        keys = sorted(value)
        # A map of numbers, as classifiers return it: probabilities by class.
        named = {
            f"{name}.keys": keys,
            f"{name}.values": [value[key] for key in keys],
        }
    elif isinstance(value, list):
        found = {}
        for place, entry in enumerate(value):
            found.update(arrays_of(f"{name}[{place}]", entry))
        return found
    else:
        named = {name: value}
    arrays = {key: np.asarray(array) for key, array in named.items()}
    # Texts are objects in the arrays of onnxruntime, which files cannot hold.
    return {
        key: array.astype(str) if array.dtype == object else array
        for key, array in arrays.items()
    }


@cache
def _encoded(folder: Path) -> Any:
    """The module encoded.py of a bundle, which need not be the folder of this module."""
    spec = importlib.util.spec_from_file_location("encoded", folder / "encoded.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _settings(folder: Path) -> Any:
    return json.loads((folder / "provider_options.json").read_text(encoding="utf-8"))


@cache  # applications call for each image
def _on_cpu(folder: Path, name: str, missing: str) -> Any:
    """A session for the part before the model, or after it."""
    import onnxruntime as ort

    settings = _settings(folder)
    if name not in settings:
        raise RuntimeError(missing)
    options, lacking = ort.SessionOptions(), ""
    try:
        from onnxruntime_extensions import get_library_path

        options.register_custom_ops_library(get_library_path())
    except ImportError:
        lacking = (
            "if it has operators of onnxruntime-extensions: pip install"
            " onnxruntime-extensions"
        )
    try:
        return ort.InferenceSession(
            str(folder / settings[name]),
            options,
            providers=["CPUExecutionProvider"],
        )
    except Exception as error:  # onnxruntime raises many unrelated types
        if not lacking:
            raise
        raise RuntimeError(
            f"{settings[name]} cannot be opened; {lacking}: {error}",
        ) from error


def session_of(
    ort: Any, model: str, session_options: Any, options: dict[str, str]
) -> Any:
    """Open a session of the provider, which onnxruntime has itself or by Windows ML."""
    if PROVIDER in ort.get_available_providers():
        return ort.InferenceSession(
            model, session_options, providers=[PROVIDER], provider_options=[options]
        )
    session_options.add_provider_for_devices(ep_devices(ort)[:1], options)
    return ort.InferenceSession(model, session_options)


#: Prints the path of the provider's library. Windows ML is asked in a process of its own, as its
#: Python modules disturb other providers (documentation of Ryzen AI 1.8, winml/winml_ep.rst).
_WINDOWS_ML = f"""
import winui3.microsoft.windows.ai.machinelearning as windows_ml
from winui3.microsoft.windows.applicationmodel.dynamicdependency import bootstrap
with bootstrap.initialize(options=bootstrap.InitializeOptions.ON_NO_MATCH_SHOW_UI):
    for provider in windows_ml.ExecutionProviderCatalog.get_default().find_all_providers():
        if provider.name == "{PROVIDER}":
            provider.ensure_ready_async().get()
            print(provider.library_path)
"""


def ep_devices(ort: Any) -> list[Any]:
    """Return the NPUs of the provider that Windows ML installs; empty without Windows ML."""
    if not hasattr(ort, "get_ep_devices"):  # onnxruntime before 1.23
        return []
    if not _npus(ort) and platform.system() == "Windows":
        library = _printed([sys.executable, "-c", _WINDOWS_ML])
        if library:
            ort.register_execution_provider_library(PROVIDER, library)
    return _npus(ort)


def _npus(ort: Any) -> list[Any]:
    return [
        device
        for device in ort.get_ep_devices()
        if device.ep_name == PROVIDER
        and device.device.type == ort.OrtHardwareDeviceType.NPU
    ]


def provider_options(
    ort: Any, settings: Mapping[str, Any], folder: Path
) -> tuple[str, dict[str, str]]:
    """The processor of this machine, and the options of the provider for it.

    Raises:
        RuntimeError: the provider, the processor or a file of the installation is missing, or the
        driver is too old.
    """
    if PROVIDER not in ort.get_available_providers() and not ep_devices(ort):
        raise RuntimeError(
            f"this onnxruntime has no {PROVIDER}; install that of Ryzen AI, or Windows ML",
        )
    found = detect()
    if found is None:
        raise RuntimeError("no Ryzen AI NPU was found")
    options = settings["devices"].get(found)
    if options is None:
        raise RuntimeError(
            f"the model is for {', '.join(settings['devices'])}, this processor is"
            f" {found}",
        )
    options = {key: _filled(value, folder) for key, value in options.items()}
    overlay = options.get("xclbin")
    # the provider prints "Failed to open xclbin" and goes on (amd/RyzenAI-SW#396)
    if overlay is not None and not Path(overlay).is_file():
        raise RuntimeError(
            f"there is no overlay {overlay}; Ryzen AI 1.7.1 installs it, later releases do not:"
            " ship a copy, quark-onnx npu deploy --xclbin FILE",
        )
    _check_driver(settings.get("least_driver", ""))
    # a cache of another provider, driver, overlay or model must never be used
    version = f"{found}_{ort.__version__}_{driver_version()}"
    if overlay is not None:
        version += f"_{_digest(overlay)}"
    options["cache_key"] = (
        f"{settings['cache_key']}_{re.sub('[^A-Za-z0-9]', '_', version)}"
    )
    return found, options


def _check_driver(least: str) -> None:
    """Raise RuntimeError for a driver of Windows that the release does not take."""
    driver = driver_version()
    if platform.system() != "Windows" or not re.fullmatch(r"\d+(\.\d+){3}", driver):
        return
    if _numbers(driver) < _numbers(least):
        raise RuntimeError(
            f"the driver of the NPU is {driver}, and {least} or later is needed"
        )


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def _digest(file: str) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:8]


def compiled_model(
    device: str, options: Mapping[str, str], folder: Path
) -> Path | None:
    """The model that precompile.py has made for this processor, engine and driver, if any."""
    path = folder / "compiled" / f"{device}.onnx"
    if not path.is_file():
        return None
    try:
        made = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        made = {}
    # The key has the model, the engine, the driver and the overlay.
    if made == {"cache_key": options["cache_key"]}:
        return path
    print(
        f"npu_session: {path.name} was compiled with another engine, driver, overlay or model and"
        " is not used; run precompile.py again",
        file=sys.stderr,
    )
    return None


def cache_folder() -> Path:
    """The folder of caches, to which the user may write; the variable NPU_CACHE names another."""
    named = os.environ.get("NPU_CACHE")
    if named:
        return Path(named)
    variable = "LOCALAPPDATA" if platform.system() == "Windows" else "XDG_CACHE_HOME"
    base = os.environ.get(variable)
    return (Path(base) if base else Path.home() / ".cache") / "npu_bundles"


@cache
def driver_version() -> str:
    """The version of the driver of the NPU; "unknown" where the system does not tell it."""
    if platform.system() == "Windows":
        command = (
            "Get-CimInstance Win32_PnPSignedDriver | Where-Object { $_.DeviceID -match"
            " 'VEN_1022&DEV_(1502|17F0)' } | Select-Object -First 1 -ExpandProperty DriverVersion"
        )
        return _printed(["powershell", "-NoProfile", "-Command", command]) or "unknown"
    try:
        return Path("/sys/module/amdxdna/version").read_text(encoding="utf-8").strip()
    except OSError:  # a driver of the kernel itself has the version of the kernel
        return platform.release() or "unknown"


def _printed(command: list[str]) -> str:
    """Return what a command prints; empty if it cannot be run or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return "" if done.returncode else done.stdout.strip()


def _filled(value: str, folder: Path) -> str:
    """A value of an option, with the folder and variables of the environment put in."""
    text = value.replace("{folder}", str(folder))
    text = text.replace("{cache}", str(cache_folder()))
    for name in re.findall(r"\{env:(\w+)\}", text):
        if name not in os.environ:
            raise RuntimeError(
                f"the environment variable {name} is not set; install Ryzen AI",
            )
        text = text.replace(f"{{env:{name}}}", os.environ[name])
    return text


#: PCI device and revision of the NPU: Ryzen AI documentation 1.8 (2026-07-23), app_development.rst.
_KNOWN = {
    "1502": {"00": "phx"},
    "17F0": {"00": "stx", "10": "stx", "11": "stx", "20": "krk"},
}


def detect() -> str | None:
    """The processor of this machine: "phx" (Phoenix, Hawk Point), "stx" or "krk".

    None if there is no NPU.
    """
    for device, revision in _pci():
        if revision in _KNOWN.get(device, {}):
            return _KNOWN[device][revision]
    return None


def _pci() -> list[tuple[str, str]]:
    """Device and revision of all PCI devices of AMD, as hexadecimal digits."""
    if platform.system() == "Windows":
        command = ["pnputil", "/enum-devices", "/bus", "PCI", "/deviceids"]
        text = _printed(command)
        return re.findall(r"VEN_1022&DEV_([0-9A-F]{4}).*?REV_([0-9A-F]{2})", text)
    found = []
    for path in sorted(Path("/sys/bus/pci/devices").glob("*")):
        try:
            vendor, device, revision = (
                (path / name).read_text().strip()
                for name in ("vendor", "device", "revision")
            )
        except OSError:
            continue
        if vendor == "0x1022":
            found.append((device[2:].upper(), revision[2:].upper()))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Run the model of this folder on one sample.",
    )
    parser.add_argument(
        "sample",
        type=Path,
        help="a .npz file, its keys the names of the inputs; or a JPEG or PNG file",
    )
    parser.add_argument("--device", choices=["auto", "npu", "cpu"], default="auto")
    parser.add_argument(
        "--strict",
        action="store_true",
        help="an operator off the NPU is an error",
    )
    options = parser.parse_args()
    try:
        return _run(options.sample, options.device, strict=options.strict)
    except Exception as error:  # numpy and onnxruntime raise many unrelated types
        print(f"npu_session: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _run(sample: Path, device: str, *, strict: bool) -> int:
    import numpy as np

    session, where = open_session(device, strict=strict)
    if sample.suffix.lower() == ".npz":
        with np.load(sample, allow_pickle=False) as arrays:
            feeds = {value.name: arrays[value.name] for value in session.get_inputs()}
    else:
        feeds = {session.get_inputs()[0].name: read_image(sample)}
    print(f"on the {where.upper()}:")
    outputs = {
        value.name: array
        for value, array in zip(
            session.get_outputs(),
            session.run(None, feeds),
            strict=True,
        )
    }
    _show(outputs)
    if "postprocess" in _settings(HERE):
        print("behind it, on the CPU:")
        _show(postprocess({**feeds, **outputs}))
    return 0


def _show(arrays: Mapping[str, Any]) -> None:
    import numpy as np

    for name, array in arrays.items():
        if isinstance(array, np.ndarray):
            print(
                f"  {printable(name)} {array.shape}: first values {np.ravel(array)[:4]}"
            )
        else:  # what stands behind a model may make lists and tables, too
            print(f"  {printable(name)}: {str(array)[:200]}")


if __name__ == "__main__":
    sys.exit(main())
