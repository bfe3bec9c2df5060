"""The processor's own report: read, and beside a forecast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quark_onnx import npu
from quark_onnx.common.errors import ConfigError
from tests.quark_onnx.npu.networks import NETWORKS


@pytest.fixture
def forecast() -> npu.Preflight:
    return npu.preflight(NETWORKS["SqueezeNet 1.1"]("XINT8"), "stx", kind="XINT8")


def report_of(forecast: npu.Preflight, swapped: int = 0) -> dict[str, Any]:
    """A report as the provider writes it; the devices of the first nodes are other ones."""
    rows = [
        {
            "output": [v.output],
            "input": ["x"],
            "opType": v.op_type,
            "device": "CPU" if at < swapped else v.device,
        }
        for at, v in enumerate(forecast.placements)
    ]
    counts = [("all", 204), ("CPU", 1), ("DPU", 201), ("VITIS_EP_CPU", 2)]
    return {
        "deviceStat": [
            {"name": name, "nodeNum": str(count), "supportedOpType": ["::Conv"]}
            for name, count in counts
        ],
        "nodeStat": rows,
        "subgraphStat": [{"device": "DPU", "count": 1}],
    }


def test_a_report_that_agrees(forecast: npu.Preflight, tmp_path: Path) -> None:
    path = tmp_path / "vitisai_ep_report.json"
    path.write_text(json.dumps(report_of(forecast)), encoding="utf-8")
    scored = npu.score(forecast, npu.read_report(path))
    assert scored.counts == {
        "NPU": (201, 201),
        "CPU": (1, 1),
        "VITIS_EP_CPU": (2, 2),
        "pieces on the NPU": (1, 1),
    }
    assert scored.matched == len(forecast.placements) and not scored.wrong


def test_nodes_that_are_elsewhere_are_named(
    forecast: npu.Preflight, tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report_of(forecast, swapped=2)), encoding="utf-8")
    scored = npu.score(forecast, npu.read_report(path))
    assert [row[1:] for row in scored.wrong] == [
        ("Conv", "NPU", "CPU"),
        ("Relu", "NPU", "CPU"),
    ]
    assert "64 of 66 nodes are where they were forecast" in str(scored)


@pytest.mark.parametrize(
    "text",
    [
        '{"deviceStat": [{"name": "CPU", "nodeNum": 1e999}]}',
        '{"deviceStat": [{"name": "CPU", "nodeNum": -3}]}',
        '{"deviceStat": [], "nodeStat": [{"output": "ab", "device": "NPU"}]}',
        "[" * 100_000,
        "",
        "[]",
        "{}",
        '{"deviceStat": [{"name": "NPU"}]}',
        '{"deviceStat": 3}',
        "\udc80",
    ],
    ids=repr,
)
def test_what_is_no_report(text: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=r"report\.json"):
        npu.read_report(path)


def test_a_device_under_several_names_is_one(tmp_path: Path) -> None:
    rows = [
        {"name": name, "nodeNum": count}
        for name, count in (("NPU", 7), ("VAIML", 5), ("CPU", 1))
    ]
    (tmp_path / "r.json").write_text(
        json.dumps({"deviceStat": rows, "subgraphStat": []}), encoding="utf-8"
    )
    assert npu.read_report(tmp_path / "r.json").counts == {"NPU": 12, "CPU": 1}


def test_a_report_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        npu.read_report(tmp_path / "none.json")
