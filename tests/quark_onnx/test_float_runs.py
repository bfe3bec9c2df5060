"""A job runs the float model once on each sample, whatever steps need its outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from quark_onnx import QConfig, quantize
from quark_onnx.optimizers import CLE, BiasCorrection
from tests.models import parse, weight

SAMPLES = 24


def classifier(opset: int = 17) -> onnx.ModelProto:
    """A classifier of ten classes, which has a verdict beyond SQNR."""
    return parse(
        """g (float[N, 3, 16, 16] x) => (float[N, 10] y) {
            a = Conv <pads = [1, 1, 1, 1]> (x, w, b)
            c = Relu (a)
            d = GlobalAveragePool (c)
            e = Flatten (d)
            f = Gemm (e, v)
            y = Softmax <axis = 1> (f)
        }""",
        w=weight(8, 3, 3, 3),
        b=np.linspace(-1, 1, 8, dtype=np.float32),
        v=weight(8, 10, seed=1),
        opset=opset,
    )


def numbered(count: int) -> list[dict[str, Any]]:
    """Samples of noise, whose first value is the number of the sample."""
    generator = np.random.default_rng(0)
    samples = []
    for number in range(count):
        image = generator.normal(size=(1, 3, 16, 16)).astype(np.float32)
        image[0, 0, 0, 0] = number
        samples.append({"x": image})
    return samples


@pytest.fixture
def float_runs(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Count the runs of whole float models, by the number of the sample."""
    counts: Counter[int] = Counter()
    native = onnxruntime.InferenceSession

    class Counting:
        """A session that counts its runs."""

        def __init__(
            self, source: str | bytes, options: Any = None, **settings: Any
        ) -> None:
            self._session = native(source, options, **settings)
            data = Path(source).read_bytes() if isinstance(source, str) else source
            kinds = {node.op_type for node in onnx.load_from_string(data).graph.node}
            self._counts = "QuantizeLinear" not in kinds and kinds >= {"Conv", "Gemm"}

        def run(
            self,
            names: Sequence[str] | None,
            feeds: Mapping[str, Any],
            options: Any = None,
        ) -> Any:
            self._count(feeds)
            return self._session.run(names, feeds, options)

        def run_with_ort_values(
            self,
            names: Sequence[str],
            feeds: Mapping[str, Any],
            options: Any = None,
        ) -> Any:
            self._count({name: value.numpy() for name, value in feeds.items()})
            return self._session.run_with_ort_values(names, feeds, options)

        def _count(self, feeds: Mapping[str, Any]) -> None:
            if self._counts:
                counts[int(feeds["x"].flat[0])] += 1

        def __getattr__(self, name: str) -> Any:
            return getattr(self._session, name)

    monkeypatch.setattr(onnxruntime, "InferenceSession", Counting)
    return counts


@pytest.mark.parametrize("calibrator", ["minmax", "best"])
def test_a_job_runs_the_float_model_once_on_each_sample(
    float_runs: Counter[int], calibrator: str
) -> None:
    config = QConfig.of("A8W8").with_(calibrator=calibrator)
    result = quantize(classifier(), numbered(SAMPLES), config)
    verdict = result.report.verdict
    assert verdict is not None and verdict.task == "classifier"
    assert verdict.samples == verdict.held_out == 2
    first = float_runs.pop(0)
    assert dict(float_runs) == dict.fromkeys(range(1, SAMPLES), 1)
    assert first <= 3, "as given, as rewritten, and with its tensors exposed"


@pytest.mark.parametrize("opset", [17, 11])
def test_an_optimizer_that_is_tried_adds_no_runs(
    float_runs: Counter[int], opset: int
) -> None:
    """A trial measures the ranges of the run, also of a Softmax that a higher opset has changed."""
    config = QConfig.of("A8W8").with_(optimizers=(CLE(least_gain=1.0),))
    report = quantize(classifier(opset), numbered(SAMPLES), config).report
    assert any(note.startswith("cle") for note in report.notes)
    # A higher opset is verified once, on the first sample, and clipped values are counted last.
    higher = 1 if opset == 11 else 0
    assert float_runs.pop(0) <= 3 + higher
    deciding = dict.fromkeys((10, 20), 2)
    assert dict(float_runs) == dict.fromkeys(range(1, SAMPLES), 1) | deciding


def test_biases_that_an_optimizer_adds_are_those_of_the_trial(
    float_runs: Counter[int],
) -> None:
    """A layer without a bias gets one before ranges are measured, in the trial as in the run."""
    optimizers = (CLE(least_gain=1.0), BiasCorrection())
    config = QConfig.of("A8W8").with_(optimizers=optimizers)
    quantize(classifier(), numbered(SAMPLES), config)
    others = [float_runs[number] for number in range(1, SAMPLES) if number % 10]
    assert others == [1] * len(others)


def test_the_search_of_scales_adds_a_few_runs_on_few_samples(
    float_runs: Counter[int],
) -> None:
    """Local errors need the float model again, with roundings next to it.

    The held-out samples of these decisions run once more: clipped values are counted with the
    scales
    that were chosen.
    """
    quantize(classifier(), numbered(SAMPLES), QConfig.of("XINT8"))
    assert float_runs.pop(0) <= 3
    deciding = dict.fromkeys((10, 20), 2)
    assert dict(float_runs) == dict.fromkeys(range(1, SAMPLES), 1) | deciding
