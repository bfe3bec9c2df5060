"""The processor's own report, ``vitisai_ep_report.json``, beside a forecast.

The report is written while a model is compiled, where XLNX_ONNX_EP_REPORT_FILE names it and the
provider option enable_cache_file_io_in_mem is 0. It is the JSON form of a protobuf message
(zmaychek84/vaip, capability.proto, 2025-03) and knows nodes by the tensors they compute; it gives
no reasons.
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

#: Names that a device had in older releases.
_DEVICES = {"DPU": "NPU", "IPU": "NPU", "VAIML": "NPU"}


@dataclass(frozen=True)
class EPReport:
    """What ran where.

    Attributes:
        counts: nodes by device, with "NPU" for whatever the report calls it.
        devices: the device of a node, by the first tensor that it computes.
        subgraphs: pieces by device; empty where the report has none.
    """

    counts: dict[str, int]
    devices: dict[str, str]
    subgraphs: dict[str, int]


@dataclass(frozen=True)
class Scored:
    """A forecast held against a report.

    Attributes:
        counts: for each device how many nodes were forecast, and how many the report has.
        matched: of how many nodes the report names the device.
        wrong: the nodes of which the forecast was another: name, operator, forecast, reported.
    """

    counts: dict[str, tuple[int, int]]
    matched: int
    wrong: tuple[tuple[str, str, str, str], ...]

    def __str__(self) -> str:
        rows = [
            f"{device}: {before} forecast, {after} reported"
            for device, (before, after) in self.counts.items()
        ]
        rows.append(
            f"{self.matched - len(self.wrong)} of {self.matched} nodes are where they"
            " were forecast",
        )
        rows += [
            f"{name} ({kind}): forecast {before}, reported {after}"
            for name, kind, before, after in self.wrong
        ]
        return "\n".join(rows)


def read_report(path: str | Path) -> EPReport:
    """Read a report.

    Raises:
        ConfigError: there is no such file, or it is none.
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
        counts = _summed(
            (row["name"], row["nodeNum"])
            for row in found["deviceStat"]
            if row["name"] != "all"
        )
        rows = [
            (list(row["output"]), row["device"])
            for row in found.get("nodeStat", [])
            if _is_list(row["output"])
        ]
        nodes = {
            str(outputs[0]): _device(device) for outputs, device in rows if outputs
        }
        pieces = _summed(
            (row["device"], row["count"]) for row in found.get("subgraphStat", [])
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"report {path} is no vitisai_ep_report.json: {type(error).__name__}"
            f" {error}; it needs deviceStat with name and nodeNum",
        ) from error
    return EPReport(counts, nodes, pieces)


def score(forecast: Preflight, report: EPReport) -> Scored:
    """Hold a forecast against a report on the same model."""
    names = dict.fromkeys([*forecast.counts, *report.counts])
    counts = {
        name: (forecast.counts.get(name, 0), report.counts.get(name, 0))
        for name in names
    }
    if report.subgraphs:
        counts["pieces on the NPU"] = (
            forecast.subgraphs,
            report.subgraphs.get("NPU", 0),
        )
    wrong, matched = list[tuple[str, str, str, str]](), 0
    for verdict in forecast.verdicts:
        real = report.devices.get(verdict.output)
        if real is None:
            continue
        matched += 1
        if (real == "NPU") != (verdict.device == "NPU"):
            wrong.append((verdict.node, verdict.op_type, verdict.device, real))
    return Scored(counts, matched, tuple(wrong))


def _summed(rows: Iterable[tuple[Any, Any]]) -> dict[str, int]:
    """Counts by device; a device may have several rows, under older names.

    Raises:
        ValueError: a count is none.
    """
    found = Counter[str]()
    for name, count in rows:
        number = int(count)
        if number < 0 or (isinstance(count, float) and number != count):
            raise ValueError(f"{count!r} is no count")
        found[_device(name)] += number
    return dict(found)


def _is_list(outputs: Any) -> bool:
    if not isinstance(outputs, list):
        raise TypeError(f"output is {outputs!r}, not a list")
    return True


def _device(name: Any) -> str:
    return _DEVICES.get(str(name), str(name))
