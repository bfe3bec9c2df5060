"""Read from the engine's report and log how many operators run on which device.

The engine writes a report while it compiles a model, and counts to the log at severity 1 (since
release 1.7). A model that comes from a cache or was compiled before has the report of that time.
Needs nothing but Python.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Variable of the environment that names the report (modelrun.rst, since release 1.5), and a name.
REPORT_VARIABLE, REPORT = "XLNX_ONNX_EP_REPORT_FILE", "vitisai_ep_report.json"
#: Names that reports and logs have for the processor.
PROCESSOR = {"DPU": "NPU", "IPU": "NPU", "VAIML": "NPU"}
#: Lines of onnxruntime's log below warnings.
_INFO = re.compile(r".*\[[VI]:onnxruntime[^\]]*\]")
#: A device and its count in the log.
_COUNT = re.compile(r"([A-Z][A-Z_]*)\s+(\d+)")
#: Number of subgraphs that the processor runs in the end: 5 of the 63 of DenseNet121 in AMD's logs.
_RUNNING = re.compile(r"Actually running on NPU\s+(\d+)")
_MOST = 5


@dataclass(frozen=True)
class Counts:
    """Devices of a model's operators.

    Attributes:
        operators: number of operators by device.
        subgraphs: number of subgraphs by device; empty if unknown.
        devices: device of each node but Q and DQ, by its first output; empty if unknown.
        running: number of subgraphs that run on the processor; None if unknown.
    """

    operators: dict[str, int]
    subgraphs: dict[str, int] = field(default_factory=dict)
    devices: dict[str, str] = field(default_factory=dict)
    running: int | None = None


def report_of(options: Mapping[str, str]) -> Path | None:
    """Return the newest report in the cache of a model; None if there is none.

    Args:
        options: options of the provider, of which ``cache_dir`` and ``cache_key`` are read.
    """
    name = os.environ.get(REPORT_VARIABLE, REPORT)
    cache = Path(options["cache_dir"])
    # The documentation names the folder of the cache alone; reports of other models may lie there.
    found = [*(cache / options["cache_key"]).rglob(name)] or [*cache.glob(name)]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def counts_of_report(path: Path) -> Counts:
    """Return the counts of a ``vitisai_ep_report.json``.

    Raises:
        OSError, ValueError, KeyError: the file is missing, or no report.
    """
    document = json.loads(path.read_text(encoding="utf-8"))
    operators, subgraphs = Counter[str](), Counter[str]()
    for row in document["deviceStat"]:
        if row["name"] != "all":  # the total of the others
            # protobuf writes 64-bit integers as strings
            operators[_device(row["name"])] += int(row["nodeNum"])
    for row in document.get("subgraphStat") or ():
        subgraphs[_device(row["device"])] += int(row["count"])
    devices = {
        row["output"][0]: _device(row["device"])
        for row in document.get("nodeStat") or ()
        if row.get("output")
        and not row.get("opType", "").lower().endswith("quantizelinear")
    }
    return Counts(dict(operators), dict(subgraphs), devices)


def running_of_log(lines: Iterable[str]) -> int | None:
    """Return the number of subgraphs on the processor by a log; None if it names no number."""
    found = [match for line in lines if (match := _RUNNING.search(line))]
    return sum(int(match[1]) for match in found) if found else None


def counts_of_log(lines: Iterable[str]) -> Counts | None:
    """Return the counts in a log, in the layouts of 1.5 to 1.8; None if it has none."""
    counts: dict[str, Counter[str]] = {"Operators": Counter(), "Subgraphs": Counter()}
    current: Counter[str] | None = None
    lines = list(lines)
    for line in lines:
        text = _RUNNING.sub("", _INFO.sub("", line))
        title = re.search(r"No\. of (Operators|Subgraphs)\s*:(.*)", text)
        if title:
            current, text = counts[title[1]], title[2]
        # Releases since 1.7 have a line for each device, earlier ones a single line.
        if current is None or _COUNT.sub("", text).strip():
            current = None
            continue
        for name, count in _COUNT.findall(text):
            current[_device(name)] += int(count)
    if not counts["Operators"]:
        return None
    return Counts(
        dict(counts["Operators"]),
        dict(counts["Subgraphs"]),
        running=running_of_log(lines),
    )


def compared(counts: Counts, forecast: Mapping[str, Any]) -> tuple[bool, list[str]]:
    """Return whether a forecast held, with the counts in words.

    Args:
        counts: the counts on this machine.
        forecast: "forecast" of report.json.
    """
    expected, lines = forecast["counts"], list[str]()
    rows = [
        (device, expected.get(device, 0), counts.operators.get(device, 0))
        for device in dict.fromkeys([*expected, *counts.operators])
    ]
    if counts.subgraphs:
        rows.append(
            ("subgraphs", forecast["subgraphs"], counts.subgraphs.get("NPU", 0))
        )
    if counts.running is not None:
        rows.append(("running subgraphs", forecast["subgraphs"], counts.running))
    for name, before, after in rows:
        lines.append(f"{name}: {after}, forecast {before}")
    # Devices off the processor are not told apart.
    off = set(forecast.get("off", ()))
    wrong = [
        f"{output}: on the {device}, forecast {'off' if output in off else 'on'} the NPU"
        for output, device in counts.devices.items()
        if (device == "NPU") == (output in off)
    ]
    lines += wrong[:_MOST]
    if len(wrong) > _MOST:
        lines.append(f"and {len(wrong) - _MOST} further nodes elsewhere than forecast")
    decisive = ("NPU", "subgraphs", "running subgraphs")
    held = not wrong and all(
        before == after for name, before, after in rows if name in decisive
    )
    return held, lines


@contextmanager
def logged() -> Iterator[list[str]]:
    """Collect what the process writes to stderr meanwhile; warnings are written there after all.

    onnxruntime logs from C++, past ``sys.stderr``.
    """
    lines = list[str]()
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            lines += file.read().decode("utf-8", "replace").splitlines()
            for line in lines:
                if not _INFO.match(line) and "[Vitis AI EP]" not in line:
                    print(line, file=sys.stderr)


def _device(name: str) -> str:
    return PROCESSOR.get(name, name)
