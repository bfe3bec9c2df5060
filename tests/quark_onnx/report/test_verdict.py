"""The verdict: the task that is found, the figures of each, and the bands."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import ModelProto

from quark_onnx.common.errors import ConfigError
from quark_onnx.common.registry import RECIPES
from quark_onnx.report import OutputError
from quark_onnx.report.measure import Total
from quark_onnx.report.verdict import (
    TASKS,
    THRESHOLDS,
    AdvisedSettings,
    Verdict,
    VerdictCollector,
    next_steps,
)
from tests.cases import loop_over
from tests.models import in_a_branch, in_constant_nodes, normal, parse, weight

ROOT = Path(__file__).parents[3]
Arrays = dict[str, NDArray[Any]]

SOFTMAX = parse("g (float[N, 3, 8, 8] x) => (float y) { y = Softmax (x) }")
LINEAR = parse("g (float[N, 3, 8, 8] x) => (float y) { y = Relu (x) }")
IMAGE = {"x": np.zeros((1, 3, 64, 64), np.float32)}
SETTINGS = AdvisedSettings(8, 8, per_channel=True, samples=100)
#: Changes that are proposed for a classifier with these settings.
TRIED = ["--recipe classifier", "--preset A16W8", "--auto-exclude 20"]


def judged(
    model: ModelProto,
    feeds: Arrays,
    before: Arrays,
    after: Arrays,
    *,
    sqnr: float | None = 25.0,
    **options: Any,
) -> Verdict:
    """The verdict on one sample."""
    collector = VerdictCollector(model, options.pop("task", "auto"))
    collector.add(feeds, before, after)
    spread = (sqnr, sqnr, sqnr) if sqnr else None
    errors = [OutputError("y", sqnr, 1.0, 0.1, None if sqnr else 1.0, spread=spread)]
    verdict = collector.verdict(errors, held_out=1, **options)
    assert verdict is not None
    return verdict


def values(verdict: Verdict) -> dict[str, float]:
    return {figure.name: figure.value for figure in verdict.figures}


def probabilities(rows: int, classes: int, seed: int) -> NDArray[np.float32]:
    powers = np.exp(3 * normal(rows, classes, seed=seed))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True), np.float32)


def test_a_classifier_is_judged_by_its_classes() -> None:
    before = probabilities(40, 7, 0)
    after = before.copy()
    after[:3] = np.roll(before[:3], 1, axis=1)
    verdict = judged(
        SOFTMAX, {"x": np.zeros((40, 3, 8, 8))}, {"y": before}, {"y": after}
    )
    assert (verdict.task, verdict.band) == ("classifier", "risky")
    assert values(verdict)["agreement"] == 37 / 40
    assert "37 of 40 predicted classes" in verdict.sentence


@pytest.mark.parametrize(
    ("shape", "task"),
    [
        ((1, 1000, 1, 1), "classifier"),
        ((2, 10), "classifier"),
        ((2, 512), "embedding"),
        ((2, 1), "regression"),
        ((2, 3, 64, 64), "image"),
        ((2, 3, 128, 128), "image"),
        ((2, 21, 64, 64), "segmentation"),
        ((2, 256, 4, 4), "signal"),
        ((5,), "signal"),
    ],
)
def test_the_task_of_an_image_model(shape: tuple[int, ...], task: str) -> None:
    output = normal(*shape)
    assert judged(LINEAR, IMAGE, {"y": output}, {"y": output}).task == task


def test_the_task_of_a_model_of_tokens() -> None:
    table = weight(500, 64)
    model = parse(
        """g (int64[N, T] ids, int64[N, T] attention_mask) => (float y) {
            y = Gather (table, ids)
        }""",
        table=table,
    )
    ids = np.ones((2, 9), np.int64)
    feeds = {"ids": ids, "attention_mask": ids}
    for width, task in (500, "language"), (64, "embedding"), (2, "signal"):
        output = normal(2, 9, width)
        for place in (model, in_a_branch(model)):
            assert judged(place, feeds, {"y": output}, {"y": output}).task == task


def test_probabilities_may_come_from_a_body() -> None:
    """Labels of several classes at once do not sum to 1: they are independent decisions."""
    model = parse("g (float[N, 64] x) => (float y) { y = Sigmoid (x) }")
    output = probabilities(4, 64, 0) + 0.1
    feeds = {"x": normal(4, 64)}
    for place in (model, in_a_branch(model), in_a_branch(in_a_branch(model))):
        verdict = judged(place, feeds, {"y": output}, {"y": output})
        assert verdict.task == "decisions"


def test_decisions_count_one_by_one() -> None:
    """A model of 600 decisions for each sample, of which 3 % change."""
    model = parse("g (float[N, 600, 1] x) => (float y) { y = Sigmoid (x) }")
    before = normal(20, 600, 1) > 0
    after = before.copy()
    after[:, ::33] = ~after[:, ::33]
    outputs = [{"y": np.where(each, 0.9, 0.1)} for each in (before, after)]
    verdict = judged(model, {"x": normal(20, 600, 1)}, *outputs)
    assert (verdict.task, verdict.band) == ("decisions", "good")
    found = values(verdict)
    assert found["agreement"] == 1 - 19 / 600
    both = (before & after).sum() / (before.sum() + after.sum())
    assert found["f1"] == pytest.approx(2 * both)
    assert found["difference"] == pytest.approx(0.8 * 19 / 600)


def test_rare_events_that_are_lost_are_not_outvoted() -> None:
    model = parse("g (float[N, 100] x) => (float y) { y = Sigmoid (x) }")
    before = np.full((20, 100), 0.01, np.float32)
    before[:, 0] = 0.99
    verdict = judged(
        model,
        {"x": normal(20, 100)},
        {"y": before},
        {"y": np.minimum(before, np.float32(0.4))},
    )
    assert values(verdict)["agreement"] == 0.99
    assert (values(verdict)["f1"], verdict.band) == (0, "poor")


def test_masks_of_two_values_are_compared_at_one_half() -> None:
    model = parse("g (float[N, 3, 64, 64] x) => (float y) { y = Sigmoid (x) }")
    before = np.full((16, 1, 64, 64), 0.02, np.float32)
    before[:, :, :32] = 0.98
    after = np.roll(before, 4, axis=2) + np.float32(0.01)
    feeds = {"x": np.zeros((16, 3, 64, 64), np.float32)}
    verdict = judged(model, feeds, {"y": before}, {"y": after})
    assert (verdict.task, verdict.band) == ("mask", "risky")
    assert values(verdict)["iou"] == 28 / 36


def test_masks_of_shares_are_compared_as_they_are() -> None:
    model = parse("g (float[N, 40, 65] x) => (float y) { y = Sigmoid (x) }")
    before = np.abs(normal(16, 40, 65)) % 1
    after = before * np.float32(0.8)
    verdict = judged(model, {"x": normal(16, 40, 65)}, {"y": before}, {"y": after})
    assert verdict.task == "mask"
    assert values(verdict)["iou"] == pytest.approx(0.8)


def test_classes_that_never_change_are_quantities() -> None:
    """The greatest of several means is the same on every sample, and says nothing."""
    before = normal(220, 5) + np.float32([1, 2, 3, 40, 5])
    feeds = {"x": np.zeros((220, 3, 8, 8))}
    verdict = judged(LINEAR, feeds, {"y": before}, {"y": before})
    assert verdict.task == "regression" and "classes" not in verdict.sentence
    before[0] = -before[0]
    verdict = judged(LINEAR, feeds, {"y": before}, {"y": before})
    assert verdict.task == "classifier"


@pytest.mark.parametrize("shape", [(64, 1), (64, 3), (4, 50, 7)])
def test_a_constant_offset_does_not_hide_errors(shape: tuple[int, ...]) -> None:
    """The ratio is that of the deviations, by an oracle of the same samples at once."""
    offset = np.float32(30 if len(shape) == 3 else [30, -7, 2][: shape[1]])
    before = normal(*shape) + offset
    after = before + normal(*shape, seed=1, scale=0.1)
    total = Total()
    for a, b in zip(np.split(before, 4), np.split(after, 4), strict=True):
        total.add(a, b)
    error = total.result("y")
    axis = 0 if len(shape) == 2 else None
    deviations = np.float64(before) - np.float64(before).mean(axis)
    noise = np.square(np.float64(before) - after).sum()
    expected = 10 * np.log10(np.square(deviations).sum() / noise)
    assert error.varying == pytest.approx(expected, abs=0.1)
    assert error.sqnr is not None and error.sqnr > error.varying + 10
    collector = VerdictCollector(
        parse("g (float[N, 3] x) => (float y) { y = Abs (x) }")
    )
    collector.add({"x": normal(shape[0], 3)}, {"y": before}, {"y": after})
    verdict = collector.verdict([error], held_out=0, calibrated=False)
    assert verdict is not None
    assert values(verdict)["sqnr"] == error.varying
    assert f"of what varies ({error.sqnr:.2f} dB with the constant part)" in str(
        verdict
    )


def test_a_constant_output_is_compared_as_a_whole() -> None:
    total = Total()
    for _ in range(20):
        total.add(np.full((1, 2), 5, np.float32), np.full((1, 2), 5.05, np.float32))
    error = total.result("y")
    assert error.varying is None
    assert error.sqnr_of_changes == error.sqnr == pytest.approx(40, abs=0.01)


@pytest.mark.parametrize(
    ("rows", "spread", "band", "reason"),
    [
        (2, (30.0, 30.0, 30.0), "unclear", "2 samples are too few to be sure"),
        (3, (24.0, 30.0, 36.0), "good", ""),
        (3, (14.0, 30.0, 36.0), "unclear", "3 samples are too few to be sure"),
        (15, (14.0, 30.0, 36.0), "unclear", "15 samples are too few to be sure"),
        (16, (14.0, 30.0, 36.0), "good", ""),
    ],
)
def test_few_samples_must_agree(
    rows: int, spread: tuple[float, float, float], band: str, reason: str
) -> None:
    collector = VerdictCollector(LINEAR)
    for _ in range(rows):
        collector.add({"x": normal(1, 6)}, {"y": normal(1, 1)}, {"y": normal(1, 1)})
    error = OutputError("y", 30.0, 1.0, 0.1, None, spread=spread)
    verdict = collector.verdict([error], held_out=0, calibrated=False)
    assert verdict is not None and verdict.band == band
    assert reason in verdict.sentence
    if band == "unclear":
        assert verdict.sentence.endswith("give at least 16 samples")


def test_a_task_that_is_asked_for_is_taken() -> None:
    output = normal(2, 512)
    verdict = judged(LINEAR, IMAGE, {"y": output}, {"y": output}, task="classifier")
    assert verdict.task == "classifier"
    with pytest.raises(ConfigError, match=r"task is 'clasifier'.*classifier"):
        VerdictCollector(LINEAR, "clasifier")


def test_embeddings_are_pooled_under_the_mask() -> None:
    model = parse(
        "g (int64[N, T] ids, int64[N, T] mask) => (float y) { y = Cast (ids) }"
    )
    before, after = normal(6, 5, 64, seed=1), normal(6, 5, 64, seed=1)
    mask = np.ones((6, 5), np.int64)
    mask[:, 3:] = 0
    after[:, 3:] += 100  # positions that do not count
    feeds = {"ids": mask, "mask": mask}
    verdict = judged(model, feeds, {"y": before}, {"y": after})
    assert verdict.task == "embedding"
    assert values(verdict)["cosine"] == pytest.approx(1)
    assert values(verdict)["rank"] == pytest.approx(1)


def test_divergence_of_tokens_against_its_definition() -> None:
    before, after = normal(16, 4, 50, seed=1), normal(16, 4, 50, seed=2)
    ids = {"ids": np.zeros((16, 4), np.int64)}
    verdict = judged(LINEAR, ids, {"y": before}, {"y": after}, task="language")
    p, q = (
        np.exp(each.astype(np.float64))
        / np.exp(each.astype(np.float64)).sum(-1)[..., None]
        for each in (before, after)
    )
    expected = (p * np.log(p / q)).sum(-1).mean()
    assert values(verdict)["divergence"] == pytest.approx(expected)
    assert verdict.band == "poor"


def test_masked_tokens_hide_no_divergence() -> None:
    before, after = normal(2, 4, 50, seed=1), normal(2, 4, 50, seed=2)
    ids = {"ids": np.zeros((2, 4), np.int64)}
    plain = judged(LINEAR, ids, {"y": before}, {"y": after}, task="language")
    mask = np.full((2, 4, 1), -np.inf, np.float32)
    masked = [np.concatenate([mask, each], axis=2) for each in (before, after)]
    verdict = judged(LINEAR, ids, {"y": masked[0]}, {"y": masked[1]}, task="language")
    expected = values(plain)["divergence"]
    assert values(verdict)["divergence"] == pytest.approx(expected)
    lost = np.full_like(before, np.nan)
    verdict = judged(LINEAR, ids, {"y": before}, {"y": lost}, task="language")
    assert math.isnan(values(verdict)["divergence"])


def test_psnr_of_images() -> None:
    before = np.linspace(0, 1, 3 * 64 * 64, dtype=np.float32).reshape(1, 3, 64, 64)
    verdict = judged(LINEAR, IMAGE, {"y": before}, {"y": before + np.float32(0.01)})
    assert values(verdict)["psnr"] == pytest.approx(40, abs=0.01)


@pytest.mark.parametrize(
    ("least", "greatest", "peak"),
    [
        (0.0, 1.1, 1),
        (3.0, 250.0, 255),
        (-5.0, 27.0, 255),
        (-2.1, 2.6, 4.7),  # mean 0 and variance 1, as of ImageNet's pixels
        (-1.0, 1.0, 2),
        (0.0, 1000.0, 1000),
    ],
)
def test_the_peak_of_images_is_that_of_their_values(
    least: float, greatest: float, peak: float
) -> None:
    before = np.linspace(least, greatest, 3 * 64 * 64, dtype=np.float32)
    before = before.reshape(1, 3, 64, 64)
    after = before + np.float32(peak / 100)
    verdict = judged(LINEAR, IMAGE, {"y": before}, {"y": after}, task="image")
    assert values(verdict)["psnr"] == pytest.approx(40, abs=0.01)
    assert f"(peak {peak:g})" in str(verdict)


def test_a_verdict_names_both_figures_that_differ_from_the_table() -> None:
    """40.71 dB in the table of outputs and 40.65 dB in the verdict need two names."""
    before = normal(64, 3)
    before += np.float32(0.16) - before.mean(axis=0)
    after = before + normal(64, 3, seed=1, scale=0.01)
    model = parse("g (float[N, 3] x) => (float y) { y = Abs (x) }")
    total, collector = Total(), VerdictCollector(model, task="regression")
    for a, b in zip(np.split(before, 4), np.split(after, 4), strict=True):
        total.add(a, b)
    collector.add({"x": normal(64, 3)}, {"y": before}, {"y": after})
    error = total.result("y")
    assert error.sqnr is not None and error.varying is not None
    assert 0.01 < error.sqnr - error.varying < 0.1
    verdict = str(collector.verdict([error], held_out=0, calibrated=False))
    assert f"SQNR {error.varying:.2f} dB of what varies" in verdict
    assert f"({error.sqnr:.2f} dB with the constant part)" in verdict


def test_pixels_of_a_segmentation() -> None:
    before = normal(1, 5, 64, 64)
    after = before.copy()
    after[:, :, :32] = np.roll(before[:, :, :32], 1, axis=1)
    verdict = judged(LINEAR, IMAGE, {"y": before}, {"y": after})
    assert values(verdict)["agreement"] == 0.5


def rows_of_boxes(
    boxes: list[tuple[float, ...]], anchors: int = 100
) -> NDArray[np.float32]:
    """A YOLO-like output (1, anchors, 4 + 1 + 3): centre, size, objectness, three classes."""
    output = np.zeros((1, anchors, 8), np.float32)
    output[..., :4] = 40, 40, 10, 10
    for place, (x, y, width, height, score, label) in enumerate(boxes):
        output[0, place, :5] = x, y, width, height, score
        output[0, place, 5 + int(label)] = 1
    return output


def test_detections_are_matched_by_class_and_overlap() -> None:
    before = rows_of_boxes(
        [
            (30, 30, 20, 20, 0.9, 0),
            (80, 80, 20, 20, 0.8, 1),
            (80, 82, 20, 20, 0.7, 1),  # suppressed by the box above
            (150, 30, 20, 20, 0.6, 2),
        ]
    )
    after = rows_of_boxes(
        [
            (32, 30, 20, 20, 0.8, 0),
            (80, 80, 20, 20, 0.8, 2),  # another class
            (150, 30, 20, 20, 0.6, 2),
        ]
    )
    verdict = judged(LINEAR, IMAGE, {"y": before}, {"y": after})
    # One image has poor figures, and tells little of others.
    assert (verdict.task, verdict.band) == ("detector", "unclear")
    found = values(verdict)
    assert found["f1"] == pytest.approx(2 / 3)
    assert found["iou"] == pytest.approx((18 / 22 + 1) / 2)
    assert found["score_change"] == pytest.approx(0.05)
    assert "2 of 3 detections found again" in verdict.sentence


@pytest.mark.parametrize("form", ["columns", "pair", "selected"])
def test_other_layouts_of_detectors(form: str) -> None:
    rows = rows_of_boxes([(30, 30, 20, 20, 0.9, 0), (80, 80, 20, 20, 0.8, 1)])
    scores = rows[..., 4:5] * rows[..., 5:]
    corners = np.concatenate(
        [rows[..., :2] - rows[..., 2:4] / 2, rows[..., :2] + rows[..., 2:4] / 2], axis=2
    )
    outputs = {
        "columns": {
            "y": np.concatenate([rows[..., :4], scores], axis=2).transpose(0, 2, 1)
        },
        "pair": {"boxes": corners / 64, "scores": scores},
        "selected": {
            "y": np.concatenate(
                [corners, scores.max(2)[..., None], scores.argmax(2)[..., None]], axis=2
            )
        },
    }[form]
    verdict = judged(LINEAR, IMAGE, outputs, outputs)
    assert (verdict.task, values(verdict)["f1"]) == ("detector", 1)
    assert "2 of 2 detections" in verdict.sentence


def test_cells_of_a_grid_are_decoded() -> None:
    """The boxes of YOLOX: offsets in cells of 8, 16 and 32 pixels, logarithms of sizes."""
    output = np.zeros((1, 64 + 16 + 4, 8), np.float32)
    output[..., 2:4] = -1
    output[0, 9] = [0.5, 0.5, math.log(2), math.log(3), 0.9, 1, 0, 0]
    moved = output.copy()
    moved[0, 9, 0] = 0.75  # by 2 of 16 pixels
    verdict = judged(LINEAR, IMAGE, {"y": output}, {"y": moved})
    assert values(verdict)["iou"] == pytest.approx(14 / 18)


def test_values_that_are_finite_on_one_side_alone_are_poor() -> None:
    collector = VerdictCollector(LINEAR)
    before = normal(20, 10)
    collector.add({"x": normal(20, 3, 8, 8)}, {"y": before}, {"y": before * np.inf})
    error = OutputError("y", -math.inf, math.nan, math.inf, None, broken=200)
    verdict = collector.verdict([error], held_out=1)
    assert verdict is not None and verdict.band == "poor"


def test_few_rows_do_not_outvote_the_noise() -> None:
    before = probabilities(8, 7, 0)
    feeds = {"x": np.zeros((8, 3, 8, 8))}
    assert judged(SOFTMAX, feeds, {"y": before}, {"y": before}, sqnr=5.0).band == "poor"
    assert (
        judged(SOFTMAX, feeds, {"y": before}, {"y": before}, sqnr=25.0).band == "good"
    )


def agreeing(equal: int, rows: int, sqnr: float) -> Verdict:
    """The verdict on a classifier with a number of equal classes."""
    before = probabilities(rows, 7, 0)
    after = before.copy()
    after[equal:] = np.roll(before[equal:], 1, axis=1)
    feeds = {"x": np.zeros((rows, 3, 8, 8))}
    return judged(SOFTMAX, feeds, {"y": before}, {"y": after}, sqnr=sqnr)


@pytest.mark.parametrize(
    ("equal", "rows", "sqnr", "band", "reason"),
    [
        # the lower bound of 16 of 16 is 80.6 %, below the 85 % of a risky model
        (16, 16, 15.0, "risky", "16 samples are too few to be sure"),
        (16, 16, 20.0, "good", ""),
        (32, 32, 15.0, "good", ""),
        (31, 32, 15.0, "risky", "32 samples are too few to be sure"),
        (98, 100, 15.0, "good", ""),
        (94, 100, 15.0, "risky", ""),
        (80, 100, 30.0, "poor", ""),
        # classes that agree in spite of large errors
        (900, 900, 9.99, "risky", "risky because the SQNR is below 10 dB"),
        (900, 900, 10.0, "good", ""),
    ],
)
def test_an_uncertain_agreement_is_not_good(
    equal: int, rows: int, sqnr: float, band: str, reason: str
) -> None:
    verdict = agreeing(equal, rows, sqnr)
    assert verdict.band == band
    assert reason in verdict.sentence
    assert ("; risky because" in verdict.sentence) is bool(reason)


def test_the_interval_of_an_agreement_is_named() -> None:
    verdict = agreeing(16, 16, 15.0)
    assert "(100 %; 95 % interval 81 % to 100 %)" in verdict.sentence
    assert verdict.figures[0].least == pytest.approx(16 / (16 + 1.959964**2))


def test_a_figure_just_below_its_limit_does_not_look_like_it() -> None:
    verdict = agreeing(947, 1000, 19.9996)
    assert "(94.7 %; 95 % interval" in verdict.sentence
    assert "SQNR 19.9996 dB" in verdict.sentence


def test_the_samples_are_named() -> None:
    before = probabilities(20, 7, 0)
    collector = VerdictCollector(SOFTMAX)
    for _ in range(3):
        collector.add({"x": np.zeros((20, 3, 8, 8))}, {"y": before}, {"y": before})
    texts = {}
    for held_out in 0, 3:
        verdict = collector.verdict([], held_out=held_out)
        assert verdict is not None
        texts[held_out] = verdict.measured_on
        assert (verdict.band == "unclear") is (not held_out)
    assert texts[0] == "3 calibration samples, which is optimistic"
    assert texts[3] == "3 samples held out from calibration"
    random = collector.verdict([], held_out=0, random=True)
    assert random is not None and random.band == "unknown"


def test_without_samples_there_is_no_verdict() -> None:
    assert VerdictCollector(LINEAR).verdict([], held_out=0) is None


def test_every_task_has_thresholds_in_order() -> None:
    for task in TASKS:
        for threshold in THRESHOLDS[task]:
            assert (threshold.good > threshold.risky) is threshold.rising


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        (SETTINGS, TRIED),
        (
            AdvisedSettings(8, 8, per_channel=False, samples=9),
            ["", "--per-channel", "--recipe classifier"],
        ),
        (
            AdvisedSettings(8, 8, per_channel=True, target="npu-cnn"),
            ["--optimize adaround", "--optimize auto_mixed_precision:target=20"],
        ),
        (
            AdvisedSettings(8, 8, per_channel=False, samples=100, powers_of_two=True),
            ["--optimize adaround", "--auto-exclude 20"],
        ),
        (
            AdvisedSettings(
                8, 8, per_channel=False, samples=100, target="phx", powers_of_two=True
            ),
            ["--optimize adaround", "--optimize auto_mixed_precision:target=20,to=float"],
        ),
        (
            replace(SETTINGS, calibrator="minmax", usual_calibrator="best"),
            ["--calibrator best", "--recipe classifier", "--preset A16W8"],
        ),
        (AdvisedSettings(None, 4, per_channel=True), ["--preset W8"]),
        (replace(SETTINGS, reached=19.99), TRIED),
        (replace(SETTINGS, reached=20.0), TRIED[:2]),
        (replace(SETTINGS, reached=20.0, goal=26.0), [*TRIED[:2], "--auto-exclude 26"]),
        (AdvisedSettings(16, 8, per_channel=True, samples=100), []),
    ],
)  # fmt: skip
def test_advice(settings: AdvisedSettings, options: list[str]) -> None:
    model = parse(
        "g (float[N, 3, 8, 8] x) => (float y) { y = Conv (x, w) }", w=weight(4, 3, 3, 3)
    )
    assert [
        step.options for step in next_steps(model, settings, "classifier")
    ] == options
    nodes = in_constant_nodes(model)
    assert next_steps(nodes, settings, "classifier") == next_steps(
        model, settings, "classifier"
    )


@pytest.mark.parametrize("task", ["classifier", "detector"])
def test_advice_keeps_scales_of_powers_of_two(task: str) -> None:
    depthwise = parse(
        "g (float[N, 4, 8, 8] x) => (float y) { y = Conv <group = 4> (x, w) }",
        w=weight(4, 1, 3, 3),
    )
    settings = AdvisedSettings(8, 8, per_channel=False, samples=100, powers_of_two=True)
    options = [step.options for step in next_steps(depthwise, settings, task)]
    assert options[0] == "--optimize cle"
    assert not any("--recipe" in each or "--preset" in each for each in options)


def test_advice_by_structure() -> None:
    depthwise = parse(
        "g (float[N, 4, 8, 8] x) => (float y) { y = Conv <group = 4> (x, w) }",
        w=weight(4, 1, 3, 3),
    )
    attention = parse("g (float[N, 8, 8] x) => (float y) { y = MatMul (x, x) }")
    for model in (depthwise, in_constant_nodes(depthwise), in_a_branch(depthwise)):
        assert next_steps(model, SETTINGS, "classifier")[0].options.startswith(
            "--optimize cle"
        )
    linear = parse(
        "g (float[N, 8] x) => (float y) { y = MatMul (x, w) }", w=weight(8, 8)
    )
    for model in (in_constant_nodes(linear), in_a_branch(linear)):
        assert next_steps(model, SETTINGS, "embedding") == next_steps(
            linear, SETTINGS, "embedding"
        )
    for model in (attention, in_a_branch(attention)):
        steps = next_steps(model, SETTINGS, "embedding")
        assert steps[0].options == "--recipe transformer"


ODD: list[Any] = [
    np.float32(3),
    *(
        np.zeros(shape, np.float32)
        for shape in (
            (0,),
            (0, 10),
            (2, 0),
            (1, 0, 4),
            (1, 60, 6),
            (1, 60, 85),
            (1, 0, 6),
            (2, 1, 1, 1),
            (1, 3, 0, 0),
            (1, 2, 3, 4, 5),
        )
    ),
    np.full((2, 10), np.nan, np.float32),
    np.full((2, 10), np.inf, np.float32),
    np.full((1, 60, 6), np.nan, np.float32),
    np.zeros((2, 3), np.int64),
    np.zeros((2, 3), bool),
    np.array(["a", "b"]),
    np.zeros((1, 5, 64, 64), np.float16),
    [1, 2],
    {"a": 1},
    None,
]


@loop_over("task", ["auto", *TASKS])
@loop_over("first", range(len(ODD)))
def test_odd_outputs_of_any_shape_and_type_are_taken(task: str, first: int) -> None:
    """Also such that change from sample to sample, and differ between the models."""
    collector = VerdictCollector(LINEAR, task)
    for before in (ODD[first], *ODD[:6]):
        for after in (before, ODD[(first + 1) % len(ODD)]):
            collector.add(IMAGE, {"y": before, "z": before}, {"y": after, "z": after})
    assert (
        collector.verdict([OutputError("y", 20.0, 1.0, 0.0, None)], held_out=0)
        is not None
    )


def test_advice_does_not_repeat_the_recipe_of_the_run() -> None:
    model = parse("g (float[N, 3, 8, 8] x) => (float y) { y = Relu (x) }")
    for task, recipe, optimizer in (
        ("classifier", "classifier", "bias_correction"),
        ("detector", "detector", "cle"),
        ("image", "superres", "cle"),
    ):
        steps = next_steps(model, SETTINGS, task)
        assert steps[0].options == f"--recipe {recipe}"
        assert recipe in RECIPES and optimizer in {
            each.name for each in RECIPES[recipe].config.optimizers
        }
        settings = replace(SETTINGS, optimizers=frozenset({optimizer}))
        again = next_steps(model, settings, task)
        assert all("--recipe" not in step.options for step in again)


def test_thresholds_stand_in_the_documentation() -> None:
    text = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    section = text.split("## The verdict")[1].split("\n## ")[0]
    rows = re.findall(
        r"^\| `(\w+)` \|.*\| ([\d.]+)( %)? \| ([\d.]+)(?: %)? \|$", section, re.M
    )
    documented = [
        (
            task,
            float(good) / (100 if share else 1),
            float(risky) / (100 if share else 1),
        )
        for task, good, share, risky in rows
    ]
    assert documented == [
        (task, threshold.good, threshold.risky)
        for task in TASKS
        for threshold in THRESHOLDS[task]
    ]
