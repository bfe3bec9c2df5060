"""--workers: the address of a Dask scheduler, and a calibration on its workers."""

from __future__ import annotations

from argparse import ArgumentTypeError
from typing import Any

import numpy as np
import onnx
import pytest

from quark_onnx.cli.parsing import Parser
from quark_onnx.cli.workers import add_workers_option


@pytest.mark.parametrize("text", ["dask://", "dask://host", "dask://:1", "dask://h:x"])
def test_what_is_no_address(text: str) -> None:
    parser = Parser("p", "d")
    add_workers_option(parser)
    (action,) = parser.with_destination("workers")
    assert callable(action.type)
    with pytest.raises(ArgumentTypeError, match="no address of a Dask scheduler"):
        action.type(text)
    assert action.type("dask://[::1]:8786") == "dask://[::1]:8786"
    assert action.type("4") == 4


def test_no_scheduler(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed")
    monkeypatch.setattr("quark_onnx.cli.workers.CONNECT_SECONDS", 0.5)
    command = ("quantize", "model.onnx", "-o", "q.onnx", "--data", "data")
    finished = cli(*command, "--workers", "dask://127.0.0.1:9")
    assert finished.code == 2
    assert "no Dask scheduler answers there; start one with" in finished.error


def test_a_cluster_of_two_processes_gives_the_same_file(cli: Any) -> None:
    distributed = pytest.importorskip("distributed")
    command = ("quantize", "model.onnx", "--data", "data", "-o")
    assert cli(*command, "one.onnx").code == 0
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=None
    ) as cluster:
        address = cluster.scheduler_address.replace("tcp://", "dask://")
        assert cli(*command, "many.onnx", "--workers", address).code == 0
    one, many = (onnx.load(name) for name in ("one.onnx", "many.onnx"))
    assert one.graph == many.graph
    assert any(np.size(tensor.raw_data) for tensor in one.graph.initializer)
