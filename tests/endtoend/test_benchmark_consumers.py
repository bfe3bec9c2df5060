"""The benchmarks of other programs: what counts as the same result, and what is a known miss."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.testing import assert_allclose
from onnx.reference import ReferenceEvaluator

FOLDER = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="the benchmarks are not part of this distribution"
)


@pytest.fixture
def consumers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("consumers")


@pytest.fixture
def own_tests(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER.parent))
    return importlib.import_module("benchmarks.ort_own_tests")


def test_errors_of_all_outputs_count(consumers: Any) -> None:
    reference = [np.ones(4, np.float32), np.full(4, 3, np.float32)]
    outputs = [reference[0] + np.float32(0.1), reference[1]]
    assert consumers.sqnr(reference, outputs) == pytest.approx(30, abs=1e-5)
    assert consumers.sqnr(reference, reference) == np.inf


def test_a_consumer_that_fails_or_differs_is_in_the_table(consumers: Any) -> None:
    row = {"version": "1", "note": "ran", "consumer dB": 20.0, "own dB": 21.0}
    rows = {
        "good": row | {"same": True},
        "other": row | {"same": False},
        "broken": {"error": "no such file"},
    }
    lines = "\n".join(consumers.report(rows)).splitlines()
    verdicts = {name: line for name in rows for line in lines if f"| {name}" in line}
    assert "same" in verdicts["good"]
    assert "differs" in verdicts["other"]
    assert "no such file" in verdicts["broken"] and "fails" in verdicts["broken"]


def test_the_model_of_features_returns_its_input(consumers: Any) -> None:
    random = np.random.default_rng(0)
    given = random.normal(size=(1, 100, 80)).astype(np.float32)
    [found] = ReferenceEvaluator(consumers.features_model()).run(None, {"x": given})
    assert_allclose(found.reshape(given.shape), given)
    onnx.checker.check_model(consumers.speaker_extractor(random), full_check=True)


def test_a_worker_that_fails_says_why(consumers: Any) -> None:
    code = "import sys; sys.exit('the model has no input')"
    with pytest.raises(consumers.Failed, match=r"^the model has no input$"):
        consumers.run([sys.executable, "-c", code])


def test_an_installer_that_fails_says_why(consumers: Any) -> None:
    code = "import sys; sys.exit('ERROR: no such package')"
    with pytest.raises(consumers.NotInstalled, match=r"^ERROR: no such package$"):
        consumers.run_installer([sys.executable, "-c", code])


def test_each_less_accurate_test_is_a_known_difference(own_tests: Any) -> None:
    assert set(own_tests.LESS_ACCURATE) <= set(own_tests.DIFFERENT)
    name = "test_op_matmul.TestOpMatMul.test_quantize_matmul_s8s8_entropy"
    assert own_tests.reason_for(own_tests.DIFFERENT, name)
    assert not own_tests.reason_for(own_tests.DIFFERENT, f"{name}_twice")
