"""Acceptance: codes of optimizers are kept where they lower the output error, and rolled back
otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from quark_onnx import QConfig, QuantizationSpec, compare, quantize
from quark_onnx.common.errors import TimeLimitError
from quark_onnx.graph import Graph
from quark_onnx.optimizers import BiasCorrection
from quark_onnx.optimizers.problem import RoundingProblem, Solution
from quark_onnx.running.run import Reference
from quark_onnx.trials.trial import Trial
from tests import models

WIDE = QuantizationSpec("int4", symmetric=True, per_channel=True)


@dataclass(frozen=True)
class Towards:
    """Moves each bias by as much."""

    name: ClassVar[str] = "towards"
    stage: ClassVar[str] = "layer"
    reads_data: ClassVar[bool] = True
    moves_bias: ClassVar[bool] = True
    reads_mean: ClassVar[bool] = False

    bias: float = 0.0

    def __call__(self, problem: RoundingProblem, present: Solution) -> Solution:
        return Solution(
            present.weight, present.bias + np.float32(self.bias), present.factor
        )


def fool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let layers take whatever is proposed."""
    calls = iter(range(1_000_000, 0, -1))
    monkeypatch.setattr(
        RoundingProblem,
        "loss",
        lambda self, *args: np.full(self.bias.shape, float(next(calls))),
    )


def quantized(
    monkeypatch: pytest.MonkeyPatch, *optimizers: object, fooled: bool = False
) -> tuple[bytes, list[str], int]:
    """The model, the notes, and how many layers the report has.

    ``fooled`` layers take whatever is proposed.
    """
    if fooled:
        fool(monkeypatch)
    model = models.conv_relu()
    config = QConfig.of("A8W8").with_(weight=WIDE, optimizers=optimizers)
    found = quantize(model, models.samples(model, 24), config)
    return (
        found.model.graph.SerializeToString(),  # the metadata names what was asked for
        list(found.report.notes),
        len(found.report.layers),
    )


def test_what_makes_outputs_worse_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers agree to a bias that is far off.

    The graph is that without the optimizer, to the byte.
    """
    plain, notes, _ = quantized(monkeypatch)
    assert not any("left out" in note for note in notes)
    found, notes, layers = quantized(monkeypatch, Towards(bias=3.0), fooled=True)
    (note,) = [note for note in notes if note.startswith("towards: left out")]
    assert "on held-out samples" in note and "with weights rounded to nearest" in note
    assert found == plain and layers == 0


def test_the_result_to_improve_on_has_corrected_biases(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the optimizer, the run would correct them."""
    model = models.residual()
    data = models.samples(model, 30)
    plain = quantize(model, data, "XINT8")
    assert any("biases corrected" in note for note in plain.report.notes)
    fool(monkeypatch)
    config = QConfig.of("XINT8").with_(optimizers=(Towards(bias=3.0),))
    found = quantize(model, data, config)
    assert any("towards: left out" in note for note in found.report.notes)
    assert any("biases corrected" in note for note in found.report.notes)
    assert found.report.worst_sqnr == pytest.approx(plain.report.worst_sqnr, abs=0.5)


@pytest.mark.parametrize(
    "measured",
    ["quark_onnx.trials.local.LocalErrors.measure", "quark_onnx.trials.trial.measure"],
)
def test_the_end_of_the_time_ends_the_run(
    measured: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no measurement that fails: a run that is late would go on without one."""

    def late(*_: object) -> None:
        raise TimeLimitError("its time is over")

    monkeypatch.setattr(measured, late)
    model = models.residual()
    with pytest.raises(TimeLimitError):
        quantize(model, models.samples(model, 24), "XINT8")


def test_without_samples_to_decide_by_no_model_is_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = models.residual()
    monkeypatch.setattr(Trial, "session", None)
    trial = Trial(Graph.of(model), Reference(model))
    assert trial.sqnr_to_decide([]) is None


def test_what_brings_outputs_nearer_is_kept() -> None:
    model = models.conv_relu()
    data, others = models.samples(model, 64), models.samples(model, 64, seed=1)
    plain = QConfig.of("A8W8").with_(weight=WIDE)
    found = quantize(model, data, plain.with_(optimizers=(BiasCorrection(),)))
    assert found.report.layers and not any(
        "left out" in note for note in found.report.notes
    )
    nearest = quantize(model, data, plain)
    assert (
        compare(model, found.model, others).sqnr
        > compare(model, nearest.model, others).sqnr
    )
