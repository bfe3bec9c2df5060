"""Runs: the end of a time limit ends a run wherever it comes, and nothing is half-written."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from onnx import ModelProto

from calibrators.onnx_runtime.interrupt import Lanes
from calibrators.onnx_runtime.isolation import isolated
from calibrators.readers.spool import Spool
from quark_onnx import QConfig, quantize
from quark_onnx.common.errors import QuarkError, TimeLimitError
from quark_onnx.common.progress import check_time, time_limit
from quark_onnx.optimizers import AutoMixedPrecision
from quark_onnx.search.runs import Outcome, Runs
from tests.models import residual, samples

#: A budget that no test exceeds unless ``late`` moves the clock.
HOUR = 3600.0
#: It rewrites the float graph, searches scales and judges both by trials.
CONFIG = QConfig.of("XINT8").with_(optimizers=("cle",))


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A function that is still at work when the time is over."""

    def overdue(*_: object, **__: object) -> None:
        monkeypatch.setattr(
            "quark_onnx.common.progress.monotonic", lambda: float("inf")
        )
        check_time()

    return overdue


def in_lanes(late: Callable[..., Any]) -> Callable[..., Any]:
    def work(*_: object, **__: object) -> None:
        with Lanes(2) as pool:
            list(pool.map(late, [0, 1]))

    return work


def run(config: QConfig) -> Outcome[object] | None:
    model = residual()
    with Spool() as spool:
        for sample in samples(model, 24):
            spool.append(sample)
        return Runs(model, spool, HOUR).run(config, lambda result: result)


#: Functions that catch whatever onnxruntime raises call these.
PLACES = {
    "scale search": "quark_onnx.trials.local.LocalErrors.measure",
    "trial": "quark_onnx.trials.trial.measure",
    "ranges of a rewrite": "quark_onnx.assemble.calibrate",
    "opening": "quark_onnx.writing.finish.open_session",
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("executor", [False, True], ids=["alone", "in an executor"])
def test_the_end_of_the_time_is_no_failure(
    place: str,
    executor: bool,
    late: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None says that a run was late; a failed one has an ``Outcome`` with the error."""
    called = []

    def overdue(*_: object, **__: object) -> None:
        called.append(place)
        (in_lanes(late) if executor else late)()

    monkeypatch.setattr(PLACES[place], overdue)
    assert run(CONFIG) is None
    assert called == [place]  # once: nothing went on


def test_the_time_ends_in_a_function_of_the_user(late: Callable[..., Any]) -> None:
    mixed = AutoMixedPrecision(0.1, metric=late)
    assert run(QConfig.of("A8W8").with_(optimizers=mixed)) is None


def test_the_time_ends_between_two_models_of_mixed_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The choice of nodes has no progress, and may open a dozen models."""
    last = sys.maxsize
    models = 0

    def metric(model: ModelProto) -> float:
        nonlocal models
        models += 1
        if models == last:
            monkeypatch.setattr(
                "quark_onnx.common.progress.monotonic", lambda: float("inf")
            )
        return float(
            not any(node.op_type == "QuantizeLinear" for node in model.graph.node)
        )

    mixed = AutoMixedPrecision(0.1, metric=metric)
    config = QConfig.of("A8W8").with_(optimizers=mixed)
    assert run(config) is not None
    last, models = models - 2, 0
    assert run(config) is None
    assert models == last


def test_an_executor_of_python_passes_it_on(late: Callable[..., Any]) -> None:
    """Its threads have no time limit of their own."""

    def limited() -> None:
        with time_limit(HOUR):
            late()

    with ThreadPoolExecutor(1) as pool, pytest.raises(TimeLimitError):
        pool.submit(limited).result()


def test_a_run_after_a_late_one_works_with_isolation_too(
    late: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with isolated(True):
        monkeypatch.setattr("quark_onnx.trials.trial.measure", late)
        assert run(CONFIG) is None
        monkeypatch.undo()
        outcome = run(CONFIG)
    assert outcome is not None and outcome.error == ""


@pytest.mark.parametrize("place", PLACES.values())
def test_nothing_is_half_written(
    place: str,
    late: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """In the verification of the written file, too."""
    monkeypatch.setattr(place, late)
    model = residual()
    with pytest.raises(TimeLimitError), time_limit(HOUR):
        quantize(model, samples(model, 24), CONFIG, tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_handlers_of_errors_let_it_pass() -> None:
    assert not issubclass(TimeLimitError, Exception)
    assert not issubclass(TimeLimitError, QuarkError)
