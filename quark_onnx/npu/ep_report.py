"""The processor's own report, ``vitisai_ep_report.json``, compared with a forecast.

The compiler writes the report to the path in XLNX_ONNX_EP_REPORT_FILE if the provider option
enable_cache_file_io_in_mem is 0. The format is the JSON form of a protobuf message
(zmaychek84/vaip, capability.proto, 2025-03). The report identifies nodes by their output tensors
and gives no reasons.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from calibrators.json_file import Entry, read_json
from calibrators.limits import TEXT
from quark_onnx.common.errors import ConfigError
from quark_onnx.npu.bundle.npu_engine import PROCESSOR
from quark_onnx.npu.preflight import Preflight
from quark_onnx.page.blocks import Block, Notes
from quark_onnx.page.reported import Reported


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


@dataclass(frozen=True, repr=False)
class Scored(Reported):
    """A forecast compared with a report.

    Attributes:
        counts: numbers of nodes by device: forecast, reported.
        matched: number of nodes with a device in the report.
        wrong: nodes with another device than forecast: name, operator, forecast, reported.
    """

    counts: dict[str, tuple[int, int]]
    matched: int
    wrong: tuple[tuple[str, str, str, str], ...]

    def blocks(self) -> list[Block]:
        """Return the numbers of nodes, and the nodes elsewhere than forecast, as blocks."""
        rows = [
            f"{device}: {expected} forecast, {counted} reported"
            for device, (expected, counted) in self.counts.items()
        ]
        rows.append(
            f"{self.matched - len(self.wrong)} of {self.matched} nodes are where they"
            " were forecast",
        )
        for name, kind, before, after in self.wrong:
            rows.append(f"{name} ({kind}): forecast {before}, reported {after}")
        return [Notes("Reported by the NPU", rows, "reported")]

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain values."""
        return asdict(self)


def read_report(path: str | Path) -> EPReport:
    """Read a report.

    Args:
        path: path of ``vitisai_ep_report.json``.

    Returns:
        The devices of the nodes.

    Raises:
        ConfigError: the file does not exist, or is no report.
    """
    remedy = "name a vitisai_ep_report.json, which has deviceStat with name and nodeNum"
    document = read_json(path, "report", ConfigError, remedy, TEXT)
    # The row "all" is the total of the others.
    counts = _summed(document["deviceStat"], "name", "nodeNum", total="all")
    nodes, pieces = document.get("nodeStat"), document.get("subgraphStat")
    return EPReport(
        counts,
        {} if nodes is None else _devices_of(nodes),
        {} if pieces is None else _summed(pieces, "device", "count"),
    )


def score(forecast: Preflight, report: EPReport) -> Scored:
    """Compare a forecast with a report on the same model.

    Args:
        forecast: the forecast.
        report: the report of the compiler.

    Returns:
        Numbers of nodes, and the nodes with another device than forecast.
    """
    counts = {
        device: (forecast.counts.get(device, 0), report.counts.get(device, 0))
        for device in dict.fromkeys([*forecast.counts, *report.counts])
    }
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
    rows: Entry, device_key: str, count_key: str, total: str = ""
) -> dict[str, int]:
    """Add up counts by device; a device may have several rows, under older names.

    Args:
        rows: array of a report.
        total: device of a row that is not counted; empty for none.
    """
    counts = Counter[str]()
    for row in rows.array():
        name = row[device_key].text()
        count = row[count_key]
        if total and name == total:
            continue
        # protobuf writes 64-bit integers as strings in JSON.
        text = str(count.value).removesuffix(".0")
        if isinstance(count.value, bool) or not re.fullmatch("[0-9]{1,18}", text):
            raise count.wrong("a count")
        counts[_device(name)] += int(text)
    return dict(counts)


def _devices_of(rows: Entry) -> dict[str, str]:
    """Return the device of each node by the first output of the node.

    The report names no nodes, only their output tensors.
    """
    devices = dict[str, str]()
    for row in rows.array():
        device = row["device"].text()
        outputs = row["output"].array()
        if outputs:
            devices[outputs[0].text()] = _device(device)
    return devices


def _device(name: str) -> str:
    return PROCESSOR.get(name, name)
