"""benefit: a rewrite of the float graph is kept where the quantized model is nearer to the float
one with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper, parser

from quark_onnx import QConfig, SmoothQuant, quantize, quantize_weights
from quark_onnx.graph import Graph
from quark_onnx.kernels.noise import Rounding
from quark_onnx.optimizers import FloatOptimizer, Samples
from quark_onnx.running.run import Sample
from quark_onnx.trials.trial import Trial
from tests import models

CHANNELS = 8


@dataclass(frozen=True)
class Stretch:
    """Multiplies one hidden channel, and divides what reads it: the float model computes the same."""  # noqa: E501

    name: ClassVar[str] = "stretch"
    stage: ClassVar[str] = "float"
    judged: ClassVar[bool] = True
    needs_data: ClassVar[bool] = False
    reads_data: ClassVar[bool] = False
    exact: ClassVar[bool] = True

    by: float = 1.0

    def __call__(self, graph: Graph, samples: Samples, rounding: Rounding) -> int:
        factor = np.float32([self.by] + [1] * (CHANNELS - 1))
        for name, way in (("v", factor), ("w", 1 / factor[:, None])):
            value = graph.constant(name)
            assert value is not None
            graph.set_constant(name, np.float32(value * way))
        return 1


class Unjudged(Stretch):
    """What does not claim to help."""

    judged = False


def model(loud: float = 1.0) -> ModelProto:
    """Two layers.

    One channel between them is so many times as loud as the others, and weighs as much less.
    """
    result = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 8] x) => (float[N, 8] y) '
        "{ h = MatMul (x, v) r = Relu (h) y = MatMul (r, w) }"
    )
    noise = np.random.default_rng(0)
    factor = np.float32([loud] + [1] * (CHANNELS - 1))
    weights = {
        "v": noise.standard_normal((8, 8)) * factor,
        "w": noise.standard_normal((8, 8)) / factor[:, None],
    }
    tensors = [
        numpy_helper.from_array(value.astype(np.float32), name)
        for name, value in weights.items()
    ]
    result.graph.initializer.extend(tensors)
    return result


def samples(count: int = 24) -> list[dict[str, Any]]:
    noise = np.random.default_rng(1)
    return [
        {"x": noise.standard_normal((4, 8)).astype(np.float32)} for _ in range(count)
    ]


def config(*optimizers: FloatOptimizer) -> QConfig:
    return QConfig.of("A8W8").with_(optimizers=optimizers)


def test_what_makes_outputs_worse_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    plain, found = (
        quantize(model(), samples(), config()),
        quantize(model(), samples(), config(Stretch(100.0))),
    )
    (note,) = [
        note for note in found.report.notes if note.startswith("stretch: left out")
    ]
    assert "dB SQNR with it on samples held out" in note
    assert not caplog.records, "nothing is wrong, and nothing to be done"
    # the metadata names what was asked for
    assert found.model.graph == plain.model.graph


def test_what_brings_outputs_nearer_is_kept() -> None:
    plain = quantize(model(100.0), samples(), config())
    found = quantize(model(100.0), samples(), config(Stretch(0.01)))
    assert "stretch: 1" in found.report.notes
    assert found.report.worst_sqnr > plain.report.worst_sqnr + 10


def test_each_is_judged_on_top_of_those_that_were_kept() -> None:
    both = config(Stretch(100.0), replace(Stretch(), by=0.01), Stretch(100.0))
    notes = quantize(model(100.0), samples(), both).report.notes
    kinds = [note.partition(";")[0] for note in notes if note.startswith("stretch")]
    assert kinds == ["stretch: left out", "stretch: 1", "stretch: left out"]


class Same(Stretch):
    """Changes nothing, and says that it did."""

    def __call__(self, graph: Graph, samples: Samples, rounding: Rounding) -> int:
        return 1


def test_the_model_that_is_judged_is_the_one_that_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With searched scales and corrected biases; all 24 samples are read for the ranges."""
    judged = list[ModelProto]()
    sqnr_to_decide = Trial.sqnr_to_decide

    def recorded(trial: Trial, samples: Sequence[Sample]) -> float | None:
        judged.append(trial.model)
        return sqnr_to_decide(trial, samples)

    monkeypatch.setattr(Trial, "sqnr_to_decide", recorded)
    data = models.samples(models.residual(), 24)
    found = quantize(
        models.residual(), data, QConfig.of("XINT8").with_(optimizers=(Same(),))
    )
    notes = " ".join(found.report.notes)
    assert "biases corrected" in notes and "moved by the error" in notes
    # Two candidates for the biases, and the better one, of the float model with and without the
    # rewrite; then the two candidates of the run itself.
    assert len(judged) == 8
    written = found.model.graph
    for model in (judged[2], judged[5]):
        assert list(model.graph.node) == list(written.node)
        assert list(model.graph.initializer) == list(written.initializer)


def test_what_is_no_matter_of_accuracy_is_kept() -> None:
    found = quantize(model(), samples(), config(Unjudged(100.0)))
    assert "stretch: 1" in found.report.notes


def test_with_nothing_to_judge_by_it_is_kept() -> None:
    """Ten samples are too few to hold one out; and weights alone are quantized without data."""
    assert (
        "stretch: 1"
        in quantize(model(), samples(10), config(Stretch(100.0))).report.notes
    )
    assert quantize_weights(model(), config(Stretch(100.0))).graph.node


@pytest.mark.parametrize("alpha", ["auto", 1.0])
def test_smoothquant_never_makes_the_model_worse(alpha: float | str) -> None:
    """All of the range goes into weights that have one scale for each output: with alpha 1 rows of
    w drown.
    """
    plain = quantize(model(30.0), samples(), config())
    found = quantize(model(30.0), samples(), config(SmoothQuant(alpha)))
    assert (
        found.report.worst_sqnr >= plain.report.worst_sqnr - 0.5
    )  # the samples of the report judged it as well
