"""Range files of quark_onnx, and calibration caches of TensorRT and onnxruntime.

TensorRT's cache is text: a first line ``TRT-VERSION-CALIBRATOR``, then ``TENSOR: SCALE`` with
the bits of a float32 in hexadecimal, most significant first; 127 times the scale is the
greatest magnitude (NVIDIA TensorRT, IInt8Calibrator::readCalibrationCache). onnxruntime's are
JSON with ``lowest`` and ``highest`` of each tensor (onnxruntime/quantization/calibrate.py,
save_tensors_data), and text with a greatest value for each (quant_utils.py,
write_calibration_table).
"""

from __future__ import annotations

import io
import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from calibrators import Calibrator, Grid
from calibrators.base import range_of
from calibrators.json_file import Entry, parse_json, read_document
from calibrators.shown import short
from quark_onnx.common.errors import ConfigError
from quark_onnx.config import QConfig, TensorOverride
from quark_onnx.config.checks import require_known
from quark_onnx.graph import Graph
from quark_onnx.measuring.calibration import TITLE, Calibration, write_ranges

#: Formats of files and their descriptions, by name on the command line.
FORMATS = {
    "quark": "statistics for every calibrator (the default)",
    "tensorrt": "TensorRT's calibration cache",
    "onnxruntime": "onnxruntime's calibration cache, JSON",
}
_TENSORRT = re.compile(r"TRT-[^\n]*\n")
_LARGEST_CODE = 127.0


@dataclass(frozen=True)
class GivenRanges:
    """Ranges of tensors by name, without further statistics.

    Attributes:
        source: the source file.
        ends: least and greatest value of each tensor.
    """

    source: str
    ends: Mapping[str, tuple[float, float]]

    def override(self, config: QConfig, graph: Graph) -> QConfig:
        """Return a configuration with given ranges instead of measured ranges.

        Args:
            config: the settings; the user's overrides for single tensors take precedence.
            graph: the graph; ranges of names that it lacks are ignored.

        Raises:
            ConfigError: no tensor of the graph has one of the names.
        """
        names = graph.names
        overrides = [
            TensorOverride(name, low=low, high=high)
            for name, (low, high) in self.ends.items()
            if name in names
        ]
        if not overrides:
            raise ConfigError(
                f"ranges {self.source}: none of its tensors is in the"
                f" model (it begins with {short(next(iter(self.ends)))}); was it"
                " written for another one?",
            )
        # the user's override takes precedence
        return config.with_(tensors=(*overrides, *config.tensors))


def load_ranges(path: str | Path) -> Calibration | GivenRanges:
    """Read a file of ranges; the content decides the format.

    Args:
        path: the file.

    Returns:
        A ``Calibration`` for a file of this package; ranges alone for files of other tools.

    Raises:
        ConfigError: the file cannot be read, is damaged, or holds no ranges.
    """
    text = read_document(path, "ranges", ConfigError)
    # A JSON document begins with a brace; a text without title or brace is onnxruntime's table.
    if _TENSORRT.match(text):
        return _given(path, _read_tensorrt(path, text))
    if not text.lstrip().startswith("{"):
        return _given(path, _read_table(path, text))
    remedy = "write it anew with quark-onnx calibrate, TensorRT or onnxruntime"
    document = parse_json(text, f"ranges {path}", ConfigError, remedy)
    if document.get(TITLE) is not None:
        return Calibration.of_document(document, str(path))
    return _given(path, _read_onnxruntime(document))


def save_ranges(
    calibration: Calibration, path: str | Path, kind: str, calibrator: Calibrator
) -> None:
    """Write a file of ranges in a format of ``FORMATS``.

    Args:
        calibration: the measured statistics.
        path: the file.
        kind: the format; formats of other tools hold one range per tensor.
        calibrator: computes the range from the statistic, for formats that need one.

    Raises:
        ConfigError: the format is unknown, or the file cannot be written.
    """
    require_known(kind, FORMATS, "unknown format of ranges")
    if kind == "quark":
        calibration.save(path)
        return
    ends = _ends(calibration, calibrator)
    if kind == "tensorrt":
        rows = [
            f"{name}: {_scale_bits(low, high)}" for name, (low, high) in ends.items()
        ]
        write_ranges(path, "\n".join(["TRT-8601-EntropyCalibration2", *rows]) + "\n")
        return
    document = {
        "CLS": "TensorsData",
        "data": {
            name: {"lowest": low, "highest": high, "CLS": "TensorData"}
            for name, (low, high) in ends.items()
        },
        "calibration_method": {
            "CLS": "CalibrationMethod",
            "value": "CalibrationMethod.MinMax",
        },
        "smooth_quant": False,
    }
    write_ranges(path, json.dumps(document))


def _ends(
    calibration: Calibration, calibrator: Calibrator
) -> dict[str, tuple[float, float]]:
    """Return the range of every tensor with a per-tensor statistic.

    Args:
        calibrator: computes ranges for int8 without -128; tensors without the statistic that it
            needs are left out.

    Returns:
        Least and greatest value by tensor name, rounded to float32.
    """
    # Codes of TensorRT's int8, without -128.
    grid = Grid(-127, 127, symmetric=True)
    ends_by_name = {}
    for key, entry in calibration.entries():
        # The formats have one range per tensor.
        if entry.axis is not None:
            continue
        statistic = calibration.find(key, None, calibrator.statistic())
        if statistic is None or not statistic.lo.size:
            continue
        ends = range_of(calibrator, statistic, grid)
        low, high = np.float32(ends.lo.item()), np.float32(ends.hi.item())
        ends_by_name[entry.name] = (float(low), float(high))
    return ends_by_name


def _scale_bits(low: float, high: float) -> str:
    """Return the scale of a symmetric int8 range as TensorRT writes it, 8 hexadecimal digits."""
    return struct.pack(">f", max(-low, high) / _LARGEST_CODE).hex()


def _lines(text: str) -> list[str]:
    """Return the lines of a text.

    ``str.splitlines`` also ends lines at U+2028 and others that names of tensors may contain.
    """
    return [line.rstrip("\n") for line in io.StringIO(text)]


def _read_tensorrt(path: str | Path, text: str) -> dict[str, tuple[float, float]]:
    """Return the ranges in TensorRT's calibration cache, by tensor name.

    Args:
        path: the file, for messages.
        text: its content, with the title in the first line.

    Raises:
        ConfigError: a line is no name with a scale.
    """
    ends = {}
    for number, line in enumerate(_lines(text)[1:], 2):
        if not line.strip():
            continue
        # From the right, because names of tensors may contain the separator.
        name, _, bits = line.rpartition(": ")
        try:
            (scale,) = struct.unpack(">f", bytes.fromhex(bits.strip()))
        except (ValueError, struct.error) as error:
            raise _damaged(path, f"line {number} is {short(line)}") from error
        ends[name] = (-_LARGEST_CODE * scale, _LARGEST_CODE * scale)
    return ends


def _read_table(path: str | Path, text: str) -> dict[str, tuple[float, float]]:
    """Return the ranges in onnxruntime's table of greatest values, by tensor name.

    Args:
        path: the file, for messages.
        text: its content, a name and a number a line.

    Raises:
        ConfigError: a line is no name with a number.
    """
    ends = {}
    for number, line in enumerate(_lines(text), 1):
        name, _, value = line.rpartition(" ")
        try:
            greatest = abs(float(value))
        except ValueError as error:
            raise _damaged(path, f"line {number} is {short(line)}") from error
        ends[name] = (-greatest, greatest)
    return ends


def _read_onnxruntime(document: Entry) -> dict[str, tuple[float, float]]:
    """Return the ranges in onnxruntime's JSON document, by tensor name."""
    # A TensorsData document has the tensors under ``data``; without it they are at the root.
    entries = document.get("data") or document
    # Beside the tensors there are texts, such as the name of a class.
    return {
        name: (_number(entry["lowest"]), _number(entry["highest"]))
        for name, entry in entries.object().items()
        if isinstance(entry.value, dict)
    }


def _number(entry: Entry) -> float:
    """Return a number, unpacking onnxruntime's one-element arrays."""
    if isinstance(entry.value, dict):
        entry = entry["data"]
    # Arrays of one element, nested by their shape.
    while isinstance(entry.value, list):
        elements = entry.array()
        if len(elements) != 1:
            raise entry.wrong("a number, or an array of one number")
        entry = elements[0]
    return entry.number()


def _given(path: str | Path, ends: dict[str, tuple[float, float]]) -> GivenRanges:
    if not ends:
        raise _damaged(path, "it is empty")
    for name, (low, high) in ends.items():
        # NaN fails the comparison, too.
        if not np.all(np.abs((low, high)) <= np.finfo(np.float32).max):
            raise _damaged(path, f"the range of {short(name)} is not finite in float32")
        if low > high:
            raise _damaged(path, f"the range of {short(name)} is from {low} to {high}")
    return GivenRanges(str(path), ends)


def _damaged(path: str | Path, reason: str) -> ConfigError:
    return ConfigError(
        f"ranges {path}: the file is none of quark-onnx calibrate, TensorRT or"
        f" onnxruntime, or is damaged ({short(reason)})",
    )
