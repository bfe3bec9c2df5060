"""The processor's own report, ``vitisai_ep_report.json``, compared with a forecast.

The compiler writes the report to the path in XLNX_ONNX_EP_REPORT_FILE if the provider option
enable_cache_file_io_in_mem is 0. The format is the JSON form of a protobuf message
(zmaychek84/vaip, capability.proto, 2025-03). The report identifies nodes by their output tensors
and gives no reasons.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibrators.limits import read_text
from quark_onnx.errors import ConfigError
from quark_onnx.npu.preflight import Preflight

#: Older names of devices.
_DEVICES = {"DPU": "NPU", "IPU": "NPU", "VAIML": "NPU"}


@dataclass(frozen=True)
class EPReport:
    """Devices of a compiled model's nodes.

    Attributes:
        counts: number of nodes by device; "NPU" replaces the report's names of the processor.
        devices: device of each node, by the node's first output tensor.
        subgraphs: number of subgraphs by device; empty if the report lists none.
    """

    counts: dict[str, int]
    devices: dict[str, str]
    subgraphs: dict[str, int]


@dataclass(frozen=True)
class Scored:
    """A forecast compared with a report.

    Attributes:
        counts: numbers of nodes by device: forecast, reported.
        matched: number of nodes with a device in the report.
        wrong: nodes with another device than forecast: name, operator, forecast, reported.
    """

    counts: dict[str, tuple[int, int]]
    matched: int
    wrong: tuple[tuple[str, str, str, str], ...]

    def __str__(self) -> str:
        rows = list[str]()
        for device, (expected, counted) in self.counts.items():
            rows.append(f"{device}: {expected} forecast, {counted} reported")
        rows.append(
            f"{self.matched - len(self.wrong)} of {self.matched} nodes are where they"
            " were forecast",
        )
        for name, kind, before, after in self.wrong:
            rows.append(f"{name} ({kind}): forecast {before}, reported {after}")
        return "\n".join(rows)


def read_report(path: str | Path) -> EPReport:
    """Read a report.

    Args:
        path: path of ``vitisai_ep_report.json``.

    Returns:
        The devices of the nodes.

    Raises:
        ConfigError: the file does not exist, or is no report.
    """
    try:
        text = read_text(Path(path))
    except (
        OSError,
        ValueError,
    ) as error:  # a ValueError is a path that no file can have, or no text
        raise ConfigError(f"report {path} cannot be read: {error}") from error
    try:
        found = json.loads(text)
        # The row "all" is the total of the others.
        counts = _summed(found["deviceStat"], "name", "nodeNum", total="all")
        nodes = _devices_of(found.get("nodeStat", []))
        pieces = _summed(found.get("subgraphStat", []), "device", "count")
    # JSON from another program: missing keys, other types, Infinity as a count, deep nesting.
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"report {path} is no vitisai_ep_report.json: {type(error).__name__}"
            f" {error}; it needs deviceStat with name and nodeNum",
        ) from error
    return EPReport(counts, nodes, pieces)


def score(forecast: Preflight, report: EPReport) -> Scored:
    """Compare a forecast with a report on the same model.

    Args:
        forecast: the forecast.
        report: the report of the compiler.

    Returns:
        Numbers of nodes, and the nodes with another device than forecast.
    """
    names = dict.fromkeys([*forecast.counts, *report.counts])
    counts = dict[str, tuple[int, int]]()
    for name in names:
        counts[name] = forecast.counts.get(name, 0), report.counts.get(name, 0)
    # Some reports list no subgraphs, which is no statement of zero.
    if report.subgraphs:
        counts["pieces on the NPU"] = (
            forecast.subgraphs,
            report.subgraphs.get("NPU", 0),
        )
    wrong, matched = list[tuple[str, str, str, str]](), 0
    for placement in forecast.placements:
        # A node without a row in the report is not judged.
        real = report.devices.get(placement.output)
        if real is None:
            continue
        matched += 1
        # Devices off the processor are not told apart: the forecast has "abort", the report has
        # not.
        if (real == "NPU") != (placement.device == "NPU"):
            wrong.append((placement.node, placement.op_type, placement.device, real))
    return Scored(counts, matched, tuple(wrong))


def _summed(
    rows: Iterable[Any],
    device_key: str,
    count_key: str,
    total: str = "",
) -> dict[str, int]:
    """Add up counts by device; a device may have several rows, under older names.

    Args:
        rows: mappings of a report.
        device_key: key of the device in a row.
        count_key: key of the count in a row.
        total: device of a row that is not counted; empty for none.

    Raises:
        KeyError: a row has not these keys.
        ValueError: a count is no natural number.
    """
    found = Counter[str]()
    for row in rows:
        name = row[device_key]
        if total and name == total:
            continue
        count = row[count_key]
        # protobuf writes 64-bit integers as strings in JSON.
        number = int(count)
        if number < 0 or (isinstance(count, float) and number != count):
            raise ValueError(f"{count!r} is no count")
        found[_device(name)] += number
    return dict(found)


def _devices_of(rows: Iterable[Any]) -> dict[str, str]:
    """Return the device of each node by the first output of the node.

    The report names no nodes, only their output tensors.

    Raises:
        KeyError: a row has no device, or no outputs.
        TypeError: the outputs of a row are no list.
    """
    devices = dict[str, str]()
    for row in rows:
        outputs = row["output"]
        if not isinstance(outputs, list):
            raise TypeError(f"output is {outputs!r}, not a list")
        device = row["device"]
        if outputs:
            devices[str(outputs[0])] = _device(device)
    return devices


def _device(name: Any) -> str:
    return _DEVICES.get(str(name), str(name))
