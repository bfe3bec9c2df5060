"""Figures of a run rest on held-out samples: their number, their spread, the clipped values."""

from __future__ import annotations

import re

import numpy as np
import pytest
from onnx import ModelProto

from calibrators.onnx_runtime.session import open_session
from quark_onnx import QConfig, quantize
from quark_onnx.common.errors import AccuracyError
from quark_onnx.measuring.held_out import HoldOut
from quark_onnx.measuring.run_data import RunData
from tests.models import Feeds, normal, parse, weight

#: A classifier with ten classes.
CLASSIFIER = parse(
    """g (float[N, 6] x) => (float[N, 10] y) {
        [first] a = MatMul (x, w1) r = Relu (a) [second] b = MatMul (r, w2) y = Softmax (b)
    }""",
    w1=weight(6, 8),
    w2=weight(8, 10, seed=1),
)
#: The same layers, with a float output.
REGRESSION = parse(
    """g (float[N, 6] x) => (float[N, 10] y) {
        [first] a = MatMul (x, w1) r = Relu (a) [second] y = MatMul (r, w2)
    }""",
    w1=weight(6, 8),
    w2=weight(8, 10, seed=1),
)


def drawn(count: int, seed: int = 0) -> list[Feeds]:
    return [{"x": normal(1, 6, seed=1000 * seed + place)} for place in range(count)]


def sqnr(expected: list[np.ndarray], found: list[np.ndarray]) -> float:
    """The oracle: all samples at once, in float64."""
    before, after = np.float64(expected), np.float64(found)
    noise = np.square(before - after).sum()
    return float(10 * np.log10(np.square(before).sum() / noise))


@pytest.mark.parametrize("count", [1, 4, 10, 11, 25, 64, 100, 221, 256, 1000])
def test_counts_of_a_verdict_are_those_of_the_samples_that_were_run(count: int) -> None:
    """No count is negative, and held-out and calibration samples add up to all that were run."""
    report = quantize(CLASSIFIER, drawn(count), "A8W8").report
    verdict = report.verdict
    assert verdict is not None and verdict.task == "classifier"
    assert not re.search(r"-\d", verdict.measured_on)
    assert verdict.held_out == report.held_out
    assert report.samples + report.held_out == count
    numbers = re.findall(
        r"(\d+) (?:samples?|held-out|calibration)", verdict.measured_on
    )
    assert sum(map(int, numbers)) == verdict.samples
    assert verdict.samples == (report.held_out or count)
    if count >= 64:
        assert verdict.held_out >= max(16, count / 10)


def test_a_verdict_is_of_held_out_samples_if_there_are_any() -> None:
    for count in range(1, 1001, 3):
        data = [{"x": np.float32([place])} for place in range(count)]
        held = HoldOut(data, verdict=True)
        calibrated = list(map(id, held))
        run = RunData(data[0], held)
        found = list(map(id, run.compared))
        if count <= 10:
            assert found == calibrated and not run.further
        else:
            assert found == list(map(id, held.samples))
            further = [id(sample.feeds) for sample in run.further]
            assert set(further) <= set(calibrated)
            assert further == [id(data[place]) for place in held.calibrated_positions]


@pytest.mark.parametrize("model", [CLASSIFIER, REGRESSION])
@pytest.mark.parametrize("count", [1, 10, 11, 20, 21, 31, 62, 63, 100])
def test_calibration_samples_give_no_band(model: ModelProto, count: int) -> None:
    """The figure is shown, with the number of samples that a band takes."""
    verdict = quantize(model, drawn(count), "A8W8").report.verdict
    assert verdict is not None and verdict.figures
    unclear = verdict.band == "unclear"
    if count < 31:
        assert unclear
        assert verdict.sentence.endswith("give at least 63 samples")
    if count >= 63:
        assert verdict.held_out >= 16 and not unclear
    if count <= 10:
        assert "the ranges were made for these samples" in verdict.sentence
        samples = (
            "1 calibration sample" if count == 1 else f"{count} calibration samples"
        )
        assert verdict.measured_on == f"{samples}, which is optimistic"
        assert verdict.samples == count


def test_held_out_samples_do_not_set_the_ranges() -> None:
    """A model of all samples but those of the figures is the same model, byte by byte."""
    data = drawn(64)
    result = quantize(REGRESSION, data, "A8W8")
    held = HoldOut(data)
    others = list(held)
    assert result.report.held_out == 16 and result.report.samples == len(others)
    loud = list(data)
    for place, sample in enumerate(data):
        if any(sample is each for each in held.samples):
            loud[place] = {"x": 100 * sample["x"]}
    louder = quantize(REGRESSION, loud, "A8W8")
    assert louder.model == result.model
    assert louder.report.worst_sqnr < result.report.worst_sqnr - 10


def test_rare_values_are_seen_where_they_are_not_calibrated() -> None:
    """One sample in twelve is ten times as large: four held-out samples had none of them.

    The figures, the gate and the share of clipped values are those of the same samples run by hand.
    """
    data = drawn(256)
    held = HoldOut(data)
    calibrated = list(held)
    rare = held.samples[::3]
    for sample in rare:
        sample["x"] = 10 * sample["x"]
    result = quantize(REGRESSION, data, "A16W8")
    report = result.report
    sessions = [open_session(model) for model in (REGRESSION, result.model)]
    outputs = [
        [session.run(None, sample)[0] for sample in held.samples]
        for session in sessions
    ]
    assert report.worst_sqnr == pytest.approx(sqnr(*outputs), abs=0.01)
    assert report.worst_sqnr < 20
    singles = [sqnr([a], [b]) for a, b in zip(*outputs, strict=True)]
    (output,) = report.outputs
    assert output.spread is not None
    assert output.spread == pytest.approx(
        (min(singles), sorted(singles)[(len(singles) - 1) // 2], max(singles)), abs=0.01
    )
    clipping = report.clipping
    assert clipping is not None and clipping.samples == len(held.samples) == 36
    inputs = np.concatenate([sample["x"] for sample in held.samples])
    known = np.concatenate([sample["x"] for sample in calibrated])
    (clipped,) = [tensor for tensor in clipping.clipped if tensor.name == "x"]
    assert clipped.low == pytest.approx(known.min(), abs=1e-3)
    assert clipped.high == pytest.approx(known.max(), abs=1e-3)
    outside = np.mean((inputs < known.min()) | (inputs > known.max()))
    assert clipped.share == pytest.approx(outside) and outside > 0.1
    text = str(report)
    assert "clipped   " in text and f"on {clipping.samples} held-out samples" in text
    assert "min / median / max of a sample" in text
    assert " / ".join(f"{value:.1f}" for value in output.spread) in text
    with pytest.raises(AccuracyError, match=r"reaches .* the minimum is 20 dB"):
        quantize(REGRESSION, data, QConfig.of("A16W8").with_(min_sqnr=20))


def test_nothing_is_clipped_in_samples_like_those_of_calibration() -> None:
    report = quantize(REGRESSION, drawn(12) * 6, "A16W8").report
    assert report.clipping is not None and report.clipping.clipped == ()
    assert f"nothing in {report.clipping.tensors} tensors on" in str(report)


def test_clipping_is_not_told_without_held_out_samples() -> None:
    assert quantize(REGRESSION, drawn(10), "A8W8").report.clipping is None
