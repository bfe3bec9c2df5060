"""The check of preprocessing: what it says of right and of wrong inputs."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import ModelProto

from quark_onnx import QConfig, compare, quantize
from quark_onnx.common.errors import ConfigError
from quark_onnx.preprocessing import Finding, PreprocessingCheck
from quark_onnx.preprocessing.alternatives import Pictures
from quark_onnx.preprocessing.evidence import Classified, Detected, Labelled, Outputs
from quark_onnx.preprocessing.first_layers import farther, scaled_by_model
from quark_onnx.preprocessing.pixels import (
    SCALINGS,
    Scaling,
    are_alike,
    are_faint,
    as_channels_last,
    picture_axis,
    scaling_of,
    smoothness,
)
from quark_onnx.preprocessing.search import PreprocessingSearch
from quark_onnx.report.verdict.task import find_task
from quark_onnx.running.run import Reference
from tests.models import in_a_branch, in_constant_nodes, normal, parse, weight
from tests.pictures import Images, pictures, trained


def findings(
    model: ModelProto, samples: list[Images], name: str = "x"
) -> list[Finding]:
    """What the check says of samples of one input."""
    session = Reference(model).session
    names = [value.name for value in session.get_outputs()]
    check = PreprocessingCheck(model)
    for sample in samples:
        feeds = {name: sample.astype(np.float32)}
        check.add(feeds, dict(zip(names, session.run(names, feeds), strict=True)))
    return check.findings(session)


@pytest.mark.parametrize("right", SCALINGS, ids=lambda each: each.name)
def test_batch_normalization_tells_the_scaling(right: Scaling) -> None:
    model = trained(right)
    for given in SCALINGS:
        found = findings(model, [given.of_pixels(each) for each in pictures(16)])
        like = {given.scale / given.std[0], right.scale / right.std[0]}
        if given is right:
            assert not found
        elif max(like) / min(like) > 4:
            (finding,) = found
            assert (
                finding.cause == "scaling" and "BatchNormalization" in finding.evidence
            )


def test_wrong_inputs_are_reported_before_layers_are_optimized(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And once; what was found is in the report and in the verdict."""
    model = trained(SCALINGS[1])
    data = [{"x": image.astype(np.float32)} for image in pictures(16)]
    steps = list[str]()

    def progress(name: str, done: float, total: int | None) -> None:
        warned = any("preprocessing looks wrong" in text for text in caplog.messages)
        steps.append(f"{name}, {'warned' if warned else 'not yet'}")

    config = QConfig.of("XINT8").with_(
        optimizers=("adaround:iterations=10",), min_sqnr=None
    )
    with caplog.at_level(logging.WARNING):
        result = quantize(model, data, config, progress=progress)
    names = [step.partition(",")[0] for step in steps]
    assert "calibrating" in names and len(set(names)) > 2
    assert {step for step in steps if "not yet" in step} == {"reading, not yet"}
    logged = [text for text in caplog.messages if "preprocessing looks" in text]
    assert len(logged) == 1 and result.report.warnings == logged
    assert result.report.verdict is not None
    assert "preprocessing of the data looks wrong" in result.report.verdict.sentence


def test_the_advice_names_the_options() -> None:
    model = trained(SCALINGS[1])
    (finding,) = findings(model, pictures(16))
    assert "--mean 0.485 0.456 0.406 --std 0.229 0.224 0.225" in finding.advice
    # Some exporters write weights as Constant nodes.
    assert findings(in_constant_nodes(model), pictures(16)) == [finding]


def test_a_wrong_layout_is_seen_in_the_inputs() -> None:
    images = [each / 255 for each in pictures(16)]
    rows = [each.transpose(0, 2, 3, 1).copy().reshape(each.shape) for each in images]
    (finding,) = findings(trained(SCALINGS[0]), rows)
    assert finding.cause == "layout" and "--input-layout nhwc" in finding.advice


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda each: each.name)
@pytest.mark.parametrize("size", [24, 32, 40])
def test_a_wrong_layout_of_gray_pictures_is_seen(scaling: Scaling, size: int) -> None:
    """Three equal values follow each other, and then those of the next pixel."""
    gray = [np.repeat(each[:, :1], 3, axis=1) for each in pictures(16, size)]
    images = [scaling.of_pixels(each) for each in gray]
    rows = [each.transpose(0, 2, 3, 1).copy().reshape(each.shape) for each in images]
    (finding,) = findings(trained(scaling), rows)
    assert finding.cause == "layout"
    found = findings(trained(scaling), images)
    assert all(finding.cause != "layout" for finding in found)


def test_stripes_are_no_wrong_layout() -> None:
    """Every third row is alike, as if rows were parts of rows; the channels are alike, too."""
    stripes = np.resize([0.0, 120.0, 255.0], 24).reshape(1, 1, 24, 1)
    images = [0.2 * each + 0.8 * stripes for each in pictures(16)]
    given, other = smoothness(images), smoothness(as_channels_last(images))
    assert given.down < 0 and other.natural, "the rows alone would tell a wrong layout"
    assert not given.is_interleaved(other)


def test_noise_is_no_picture() -> None:
    noise = [normal(2, 3, 24, 24, seed=seed) for seed in range(16)]
    assert findings(trained(SCALINGS[0]), noise) == []


def test_an_output_that_never_changes() -> None:
    model = parse(
        "g (float[N, 4] x) => (float y) { a = Sub (x, x)  y = Add (a, b) }", b=normal(4)
    )
    samples = [normal(1, 4, seed=seed) for seed in range(10)]
    (finding,) = findings(model, samples)
    assert (
        finding.cause == "outputs" and "the same for all 10 inputs" in finding.evidence
    )
    assert findings(model, samples[:1] * 10) == [], "the inputs do not change either"


def test_without_samples_nothing_is_found() -> None:
    model = trained(SCALINGS[0])
    assert PreprocessingCheck(model).findings(Reference(model).session) == []


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda each: each.name)
def test_a_scaling_is_known_by_its_range(scaling: Scaling) -> None:
    pixels = np.concatenate(pictures(4))
    inputs = scaling.of_pixels(pixels)
    assert scaling_of([inputs]) is scaling
    assert np.allclose(scaling.pixels(inputs), pixels)


def test_a_mean_of_pixels_that_is_subtracted_from_shares() -> None:
    """Mean and standard deviation in units of 0 to 255, and pixels from 0 to 1."""
    shares = [each / 255 for each in pictures(16)]
    (finding,) = findings(trained(IMAGENET), [(each - 120) / 58 for each in shares])
    assert (finding.cause, finding.options) == ("scaling", "--scale 1")
    assert not are_faint(shares)
    assert not are_faint([0.9 + 0.1 * each for each in shares]), "bright pictures"


@pytest.mark.parametrize("operators", ["Sub Div", "Mul Add", "BatchNormalization"])
def test_a_model_that_scales_pixels_itself(operators: str) -> None:
    """Pixels from 0 to 1 hardly change what its first convolution reads."""
    scaling = {
        "Sub Div": "c = Sub (x, mean) s = Div (c, deviation)",
        "Mul Add": "c = Mul (x, factor) s = Add (c, offset)",
        "BatchNormalization": "s = BatchNormalization (x, one, zero, middle, variance)",
    }
    model = parse(
        f"""g (float[N, 3, H, W] x) => (float y) {{
            {scaling[operators]}
            a = Conv (s, w)
            b = Relu (a)
            y = GlobalAveragePool (b)
        }}""",
        mean=np.full((1, 3, 1, 1), 120, np.float32),
        deviation=np.float32(58),
        factor=np.float32(1 / 58),
        offset=np.full((1, 3, 1, 1), -120 / 58, np.float32),
        one=np.ones(3, np.float32),
        zero=np.zeros(3, np.float32),
        middle=np.full(3, 120, np.float32),
        variance=np.full(3, 58**2, np.float32),
        w=weight(8, 3, 3, 3),
    )
    assert not findings(model, pictures(16))
    (finding,) = findings(model, [each / 255 for each in pictures(16)])
    assert (finding.cause, finding.options) == ("scaling", "--scale 1")


@pytest.mark.parametrize("call", ["Mul (x, x)", "Div (one, x)", "Pow (x, one)"])
def test_what_is_no_scaling_is_not_taken_for_one(call: str) -> None:
    model = parse(
        f"g (float[N, 3, H, W] x) => (float y) {{ s = {call} y = Conv (s, w) }}",
        one=np.float32(1),
        w=weight(8, 3, 3, 3),
    )
    assert scaled_by_model(model, "x", [{"x": pictures(1)[0]}]) == []


def test_one_class_that_another_order_of_channels_makes_several() -> None:
    """The last channel says class 0 for sure, and the first one may be bright or dark."""
    model = parse(
        """g (float[N, 3, H, W] x) => (float y) {
            a = GlobalAveragePool (x)  b = Flatten (a)  y = Gemm (b, weight, bias)
        }""",
        weight=np.array([[0] * 4, [0] * 4, [40, 0, 0, 0]], np.float32),
        bias=np.array([-10, 0, 0, 0], np.float32),
    )
    images = []
    for number, each in enumerate(pictures(32)):
        image = each / 255
        image[:, 0] = 0.1 * image[:, 0] + (number % 2) * 0.85
        image[:, 2] = 0.1 * image[:, 2] + 0.45
        image[..., 0, 0], image[..., -1, -1] = 0, 1
        images.append(image)
    session = Reference(model).session
    check = PreprocessingCheck(model, "classifier")
    swapped = Classified("y")
    for image in images:
        feeds = {"x": image.astype(np.float32)}
        outputs = {"y": session.run(None, feeds)[0]}
        check.add(feeds, outputs)
        other = {"x": np.ascontiguousarray(feeds["x"][:, ::-1])}
        swapped.add({"y": session.run(None, other)[0]})
    assert swapped.classes == 2 and swapped.strength > 0.5, "what would speak for it"
    assert check.findings(session) == []


def test_a_range_of_no_scaling() -> None:
    assert scaling_of([np.concatenate(pictures(4)) * 17]) is None


@pytest.mark.parametrize("scaling", SCALINGS[1:4], ids=lambda each: each.name)
def test_dark_pictures_keep_their_scaling(scaling: Scaling) -> None:
    """Stretched to black and white, they would seem to have another one."""
    dark = [scaling.of_pixels(0.4 * each) for each in pictures(4)]
    assert scaling_of(dark) is scaling


def test_frames_of_a_film_are_one_observation() -> None:
    frames = [pictures(1)[0] + normal(1, 3, 24, 24, seed=seed) for seed in range(8)]
    assert are_alike(frames) and are_alike([np.zeros((2, 3, 24, 24))])
    assert not are_alike(pictures(8)) and not are_alike(pictures(1))
    assert not are_alike([*pictures(1), *pictures(1, 32)]), "pictures of two sizes"


def test_more_contrast_in_which_a_detector_finds_more() -> None:
    """Its scores rise with edges of twice the contrast of the pictures, not of a hundred times."""
    grid = np.stack(np.meshgrid(np.arange(6), np.arange(6)), axis=-1).reshape(36, 2)
    model = parse(
        """g (float[N, 3, 24, 24] x) => (float[N, 36, 1] scores, float[N, 36, 4] boxes) {
            a = Conv (x, edges)
            b = Abs (a)
            c = AveragePool <kernel_shape = [4, 3], strides = [4, 4]> (b)
            d = Reshape (c, rows)
            e = Mul (d, d)
            f = Add (d, d)
            g = Sub (f, e)
            h = ReduceMax <keepdims = 0> (x)
            i = Less (h, large)
            j = Cast <to = 1> (i)
            k = Clip (g, nothing, one)
            scores = Mul (k, j)
            moved = Mul (scores, little)
            boxes = Add (moved, places)
        }""",
        edges=np.resize(np.array([-0.3, 0.3], np.float32), (1, 3, 1, 2)),
        rows=np.array([0, 36, 1]),
        large=np.float32(9),
        nothing=np.float32(0),
        little=np.float32(1e-3),
        one=np.float32(1),
        places=np.concatenate([grid, grid + 1], axis=1, dtype=np.float32)[None] / 6,
    )
    given, other = SCALINGS[2], SCALINGS[1]
    session = Reference(model).session
    check = PreprocessingCheck(model, "detector")
    images = [each * 0.5 + 64 for each in pictures(16)]
    task = find_task(model, *_feeds_and_outputs(session, given.of_pixels(images[0])))
    found, more = Detected(task), Detected(task)
    for image in images:
        image[..., 0, 0], image[..., -1, -1] = 0, 255
        feeds, outputs = _feeds_and_outputs(session, given.of_pixels(image))
        check.add(feeds, outputs)
        found.add(outputs)
        more.add(_feeds_and_outputs(session, other.of_pixels(image))[1])
    assert found.beaten_by(more), "what would speak for it"
    assert check.findings(session) == []


def _feeds_and_outputs(
    session: Any, image: Images
) -> tuple[dict[str, Images], dict[str, Images]]:
    feeds = {"x": image.astype(np.float32)}
    names = [value.name for value in session.get_outputs()]
    return feeds, dict(zip(names, session.run(names, feeds), strict=True))


def test_channels_and_smoothness() -> None:
    assert picture_axis((1, 3, 32, 32)) == 1
    assert picture_axis((1, 32, 32, 3)) == 3
    assert picture_axis((1, 64, 32, 32)) is None and picture_axis((1, 3)) is None
    smooth = smoothness(pictures(4))
    assert smooth.natural
    assert not smooth.is_interleaved(smoothness(as_channels_last(pictures(4))))


def test_odd_outputs_are_taken() -> None:
    model = trained(SCALINGS[0])
    session = Reference(model).session
    for task in "auto", "classifier", "detector", "language":
        check = PreprocessingCheck(model, task)
        for value in (np.float32(1), np.zeros((0, 10)), np.zeros((2, 0)), [1], None):
            check.add({"x": pictures(1)[0].astype(np.float32)}, {"y": value})
        assert all(finding.cause != "layout" for finding in check.findings(session))


# The number of runs


def classified(count: int, certainty: float, classes: int = 10) -> Classified:
    """Evidence of a classifier that predicts every class in turn, with a certainty."""
    rows = np.full((count, classes), (1 - certainty) / (classes - 1))
    rows[np.arange(count), np.arange(count) % classes] = certainty
    return Classified("y", list(rows))


@pytest.mark.parametrize("count", [4, 8, 16, 24, 32])
def test_an_alternative_with_more_evidence_is_tried_further(count: int) -> None:
    good, better = classified(count, 0.8), classified(count, 0.9)
    assert not good.hopeless(better)
    assert classified(count, 0.95).hopeless(classified(count, 0.6))


def test_two_rows_drop_an_alternative_that_is_far_weaker_alone() -> None:
    assert classified(2, 0.95).hopeless(classified(2, 0.2))
    assert not classified(2, 0.95).hopeless(classified(2, 0.6))


def test_more_rows_leave_less_room_for_weaker_evidence() -> None:
    dropped = [
        classified(count, 0.8).hopeless(classified(count, 0.78))
        for count in (4, 8, 16, 24)
    ]
    assert dropped == [False, False, True, True]


def test_weak_evidence_needs_a_gain() -> None:
    weak = classified(8, 0.12)
    assert weak.hopeless(classified(8, 0.12))
    assert not weak.hopeless(classified(8, 0.5))


def test_strong_evidence_leaves_no_room_for_weaker_evidence() -> None:
    """An alternative with more evidence would fall short of the greatest by less."""
    sure, unsure = classified(8, 0.99), classified(8, 0.8)
    assert sure.strong and not unsure.strong
    assert sure.hopeless(classified(8, 0.98))
    assert not unsure.hopeless(classified(8, 0.79))


@pytest.mark.parametrize("count", [2, 4, 8, 16])
def test_less_certain_predictions_tell_against_an_alternative(count: int) -> None:
    certain = classified(count, 0.98)
    assert certain.surer_than(classified(count, 0.6))
    assert not certain.surer_than(classified(count, 0.98))
    assert not certain.surer_than(classified(count, 0.99))


def test_two_rows_tell_against_an_alternative_only_by_a_clear_loss() -> None:
    certain = [classified(count, 0.9) for count in (2, 16)]
    scattered = [Classified("y", [*each.rows]) for each in certain]
    for each in scattered:
        each.rows[::2] = classified(len(each), 0.85).rows[::2]
    assert [
        first.surer_than(second)
        for first, second in zip(certain, scattered, strict=True)
    ] == [False, True]


def runs_of_search(given: float, other: float) -> int:
    """Runs of a search where alternatives predict the same classes less certainly."""
    images = pictures(32)
    feeds = [{"x": each.astype(np.float32)} for each in images]
    alternatives = list(Pictures(feeds, "x", 1, images, SCALINGS[0]).alternatives())
    runs = 0

    class Row(Classified):
        """Evidence that gets the next row of a less certain classifier."""

        def add(self, outputs: Outputs) -> None:
            self.rows.append(classified(32, other).rows[len(self.rows)])

    def run(samples: Iterable[Outputs]) -> Iterator[Outputs]:
        nonlocal runs
        for feeds in samples:
            runs += 1
            yield feeds

    search = PreprocessingSearch(
        classified(32, given), lambda: Row("y"), run, (2, 4, 8, 16), 8, range(17)
    )
    assert search.finding(alternatives) is None
    return runs


def test_a_certain_model_is_run_on_two_rows_of_uncertain_alternatives() -> None:
    # four scalings and the other order of channels, not both at once
    assert runs_of_search(0.98, 0.6) == 5 * 2
    assert runs_of_search(0.75, 0.6) > 5 * 2


def test_a_scaling_farther_from_the_biases_than_fitting_responses() -> None:
    fitting = [0.5, 1.0, 2.0]
    assert farther([8.0, 8.0, 8.0], fitting) and farther([0.1, 0.1, 0.1], fitting)
    assert not farther([0.6, 0.9, 1.7], fitting)
    assert not farther([1.0, 1.0, 1.0], fitting)


def test_a_model_without_evidence_is_run_on_a_few_rows_only() -> None:
    """Random weights: no preprocessing has more evidence than another."""
    model = parse(
        """g (float[N, 3, H, W] x) => (float y) {
            a = Conv (x, w)
            b = GlobalAveragePool (a)
            c = Flatten (b)
            y = Gemm (c, v)
        }""",
        w=0.001 * weight(8, 3, 3, 3),
        v=0.001 * weight(8, 10),
    )
    session = Mock(wraps=Reference(model).session)  # counts its runs
    check = PreprocessingCheck(model)
    for each in pictures(32):
        feeds = {"x": SCALINGS[1].of_pixels(each).astype(np.float32)}
        check.add(feeds, {"y": session.run(None, feeds)[0]})
    session.run.reset_mock()
    assert all(finding.cause == "outputs" for finding in check.findings(session))
    # four scalings and the other order of channels, not both at once
    assert session.run.call_count <= 5 * 2


# Biases of the first layers


def folded(right: Scaling, *, written_out: bool = False) -> ModelProto:
    """Two convolutions whose BatchNormalizations were folded, and quantities as output.

    Args:
        right: the scaling that the statistics are of.
        written_out: whether the bias is added behind the convolution.
    """
    convolution = (
        "a = Conv (x, w)  b = Add (a, column)"
        if written_out
        else "b = Conv (x, w, bias)"
    )
    filters, second = weight(8, 3, 3, 3), weight(8, 8, 3, 3)
    shift = normal(8, seed=3).astype(np.float32)
    samples = [right.of_pixels(each).astype(np.float32) for each in pictures(40)]

    def folding(outputs: list[Images]) -> tuple[Images, Images]:
        """The factor and the bias by channel for a mean of ``shift`` and a variance of 1."""
        values = np.concatenate(outputs)
        factor = 1 / values.std(axis=(0, 2, 3))
        return factor, shift - values.mean(axis=(0, 2, 3)) * factor

    first = parse("g (float[N, 3, H, W] x) => (float y) { y = Conv (x, w) }", w=filters)
    session = Reference(first).session
    factor, bias = folding([session.run(None, {"x": each})[0] for each in samples])
    filters = filters * factor.reshape(-1, 1, 1, 1)
    both = parse(
        """g (float[N, 3, H, W] x) => (float y) {
            b = Conv (x, w, bias)
            c = Relu (b)
            y = Conv (c, v)
        }""",
        w=filters,
        bias=bias,
        v=second,
    )
    session = Reference(both).session
    factor, other = folding([session.run(None, {"x": each})[0] for each in samples])
    return parse(
        f"""g (float[N, 3, H, W] x) => (float[N, 4] pose) {{
            {convolution}
            c = Relu (b)
            d = Conv (c, v, other)
            e = Relu (d)
            f = GlobalAveragePool (e)
            h = Flatten (f)
            pose = Gemm (h, u)
        }}""",
        w=filters,
        bias=bias,
        column=bias.reshape(1, 8, 1, 1),
        v=second * factor.reshape(-1, 1, 1, 1),
        other=other,
        u=weight(8, 4),
    )


@pytest.mark.parametrize("written_out", [False, True], ids=["bias", "added"])
@pytest.mark.parametrize("right", SCALINGS, ids=lambda each: each.name)
def test_biases_tell_inputs_that_are_too_small(
    right: Scaling, written_out: bool
) -> None:
    """Also where no output tells what is right: quantities have no confidence.

    Inputs that are too large may be right for a model whose biases were small from the beginning.
    """
    model = folded(right, written_out=written_out)
    for given in SCALINGS:
        found = findings(model, [given.of_pixels(each) for each in pictures(16)])
        if given.scale == 1 or right.scale < 1:
            assert not found
            continue
        # With tiny inputs negative biases make the outputs constant, which is said, too.
        finding = found[-1]
        assert finding.cause == "scaling" and "biases" in finding.evidence
        named = next(each for each in SCALINGS if each.options == finding.options)
        assert named.scale == right.scale


def test_small_biases_do_not_call_for_small_inputs() -> None:
    """Biases of a model without BatchNormalization may be as small as they like."""
    model = parse(
        """g (float[N, 3, H, W] x) => (float[N, 4] pose) {
            b = Conv (x, w, bias)
            c = Relu (b)
            d = Conv (c, v, bias)
            e = Relu (d)
            f = GlobalAveragePool (e)
            h = Flatten (f)
            pose = Gemm (h, u)
        }""",
        w=weight(8, 3, 3, 3),
        v=0.2 * weight(8, 8, 3, 3),
        bias=0.3 * normal(8, seed=3),
        u=weight(8, 4),
    )
    assert findings(model, pictures(16)) == []


NORMALIZED = {
    "channels": "{n} = InstanceNormalization ({c}, gain, shift)",
    "groups": """{n}1 = Reshape ({c}, groups)
        {n}2 = InstanceNormalization ({n}1, ones, zeros)
        {n}3 = Shape ({c})
        {n} = Reshape ({n}2, {n}3)""",
    "positions": """{n}1 = Transpose <perm = [0, 2, 3, 1]> ({c})
        {n}2 = LayerNormalization ({n}1, gain, shift)
        {n} = Transpose <perm = [0, 3, 1, 2]> ({n}2)""",
}


@pytest.mark.parametrize("norm", [*NORMALIZED, "none"])
def test_biases_that_no_training_gave_a_size_tell_nothing(norm: str) -> None:
    """Zeros, and biases before a normalization, which makes up for inputs of any size."""
    first, second = (
        NORMALIZED.get(norm, "{n} = Identity ({c})").format(n=name, c=name + "0")
        for name in "ad"
    )
    model = parse(
        f"""g (float[N, 3, H, W] x) => (float y) {{
            a0 = Conv (x, w, bias)
            {first}
            b = Relu (a)
            d0 = Conv (b, v, bias)
            {second}
            e = Relu (d)
            f = GlobalAveragePool (e)
            g0 = Flatten (f)
            h = LpNormalization <axis = 1> (g0)
            y = Gemm (h, u)
        }}""",
        w=weight(8, 3, 3, 3),
        v=weight(8, 8, 3, 3),
        bias=0.1 * normal(8, seed=3) if norm in NORMALIZED else np.zeros(8, np.float32),
        gain=np.ones(8, np.float32),
        shift=0.3 * normal(8, seed=4),
        groups=np.array([0, 2, -1]),
        ones=np.ones(2, np.float32),
        zeros=np.zeros(2, np.float32),
        u=30 * weight(8, 10),
    )
    assert not any("biases" in each.evidence for each in findings(model, pictures(16)))


def test_a_factor_of_all_logits_changes_no_prediction_less() -> None:
    """Larger inputs make a classifier more certain, and no steadier against shifts."""
    logits, shifted = normal(16, 10), normal(16, 10) + 0.3 * normal(16, 10, seed=1)
    changes, strengths = [], []
    for factor in (1, 255):
        evidence, other = Classified("y"), Classified("y")
        evidence.add({"y": factor * logits})
        other.add({"y": factor * shifted})
        changes.append(evidence.change(other))
        strengths.append(evidence.strength)
    assert strengths[1] > strengths[0]
    assert changes[1] == pytest.approx(changes[0])
    # The definition, in float64.
    rows = logits.astype(np.float64)
    moved = shifted.astype(np.float64)
    rows -= rows.mean(axis=1, keepdims=True)
    moved -= moved.mean(axis=1, keepdims=True)
    within = np.mean([np.linalg.norm(a - b) for a, b in zip(rows, moved, strict=True)])
    pairs = [np.linalg.norm(a - b) for a, b in combinations(rows, 2)]
    assert changes[0] == pytest.approx(within / np.mean(pairs))


def test_more_evidence_that_fails_a_further_test_is_no_finding() -> None:
    feeds = [{"x": each.astype(np.float32)} for each in pictures(16)]
    alternatives = list(
        Pictures(feeds, "x", 1, pictures(16), SCALINGS[0]).alternatives()
    )

    class Row(Classified):
        """Evidence that gets the next row of a certain classifier of ten classes."""

        def add(self, outputs: Outputs) -> None:
            self.rows.append(classified(16, 0.99).rows[len(self.rows)])

    def finding(*, accepted: bool) -> Finding | None:
        search = PreprocessingSearch(
            classified(16, 0.5),
            lambda: Row("y"),
            iter,
            (2, 4, 8, 16),
            8,
            range(17),
            lambda alternative, evidence: accepted,
        )
        return search.finding(alternatives)

    assert finding(accepted=True) is not None
    assert finding(accepted=False) is None


def test_data_of_another_contrast_are_no_wrong_scaling() -> None:
    """Faint pictures have a variance of a fifth, and no scaling is clearly nearer by its mean."""
    model = trained(SCALINGS[1])
    faint = [255 * 0.25 + 0.5 * each for each in pictures(16)]
    for each in faint:
        each[..., 0, 0], each[..., -1, -1] = 0, 255
    assert findings(model, [SCALINGS[1].of_pixels(each) for each in faint]) == []


# Rows of outputs

TILES = """g (float[N, 3, H, W] x) => (float y) {
    a = Conv (x, w)
    b = Relu (a)
    c = MaxPool <kernel_shape = [11, 11], strides = [11, 11]> (b)
    d = Reshape (c, shape)
    e = Transpose <perm = [0, 2, 1]> (d)
"""
WEIGHTS = {
    "w": weight(16, 3, 3, 3),
    "v": weight(16, 10),
    "shape": np.array([0, 16, 4]),
}


def four_rows() -> ModelProto:
    """A classifier of four tiles of a picture."""
    return parse(TILES + "f = MatMul (e, v) y = Softmax (f) }", **WEIGHTS)


def some_rows() -> ModelProto:
    """A classifier of those tiles that respond strongly, whose number depends on the values."""
    return parse(
        TILES
        + """
        f = Reshape (e, rows)
        h = ReduceMean <axes = [1], keepdims = 0> (f)
        i = Greater (h, least)
        j = Compress <axis = 0> (f, i)
        k = MatMul (j, v)
        y = Softmax (k)
        }""",
        rows=np.array([-1, 16]),
        least=np.float32(1),
        **WEIGHTS,
    )


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("given", SCALINGS, ids=lambda each: each.name)
@pytest.mark.parametrize("model", [four_rows(), some_rows()], ids=["four", "some"])
def test_outputs_with_other_numbers_of_rows(
    model: ModelProto, given: Scaling, batch: int
) -> None:
    images = [given.of_pixels(each).astype(np.float32) for each in pictures(48)]
    batches = [
        np.concatenate(images[place : place + batch]) for place in range(0, 48, batch)
    ]
    session = Reference(model).session
    check = PreprocessingCheck(model, "classifier")
    for sample in batches:
        check.add({"x": sample}, {"y": session.run(None, {"x": sample})[0]})
    found = check.findings(session)
    # The weights are random: that the rows of every alternative are compared with those of the
    # given preprocessing is what counts, not the finding.
    assert all(finding.cause != "layout" for finding in found)


def plain() -> ModelProto:
    """A classifier of whole pictures, without a BatchNormalization."""
    return parse(
        """g (float[N, 3, H, W] x) => (float y) {
            a = Conv (x, w)
            b = Relu (a)
            c = GlobalAveragePool (b)
            d = Flatten (c)
            e = Gemm (d, v)
            y = Softmax (e)
        }""",
        w=WEIGHTS["w"],
        v=WEIGHTS["v"],
    )


def test_rows_of_a_second_input_are_no_pictures() -> None:
    """A hundred anchors are no hundred pictures."""
    model = plain()
    other = parse(
        """g (float[N, 3, H, W] x, float[100, 4] anchors) => (float y) {
            a = Conv (x, w)
            b = Relu (a)
            c = GlobalAveragePool (b)
            d = Flatten (c)
            h = ReduceSum <keepdims = 0> (anchors)
            i = Add (d, h)
            e = Gemm (i, v)
            y = Softmax (e)
        }""",
        w=WEIGHTS["w"],
        v=WEIGHTS["v"],
    )
    images = [IMAGENET.of_pixels(each).astype(np.float32) for each in pictures(32)]
    session = Reference(other).session
    check = PreprocessingCheck(other)
    for each in images:
        feeds = {"x": each, "anchors": np.zeros((100, 4), np.float32)}
        check.add(feeds, {"y": session.run(None, feeds)[0]})
    found = check.findings(session)
    assert found and found == findings(model, images)


@pytest.mark.parametrize("batch", [2, 4, 16])
@pytest.mark.parametrize(
    "model", [trained(SCALINGS[1]), plain()], ids=["trained", "plain"]
)
def test_the_size_of_batches_does_not_matter(model: ModelProto, batch: int) -> None:
    for given in SCALINGS:
        images = [given.of_pixels(each).astype(np.float32) for each in pictures(32)]
        batches = [
            np.concatenate(images[place : place + batch])
            for place in range(0, 32, batch)
        ]
        assert [(each.cause, each.options) for each in findings(model, batches)] == [
            (each.cause, each.options) for each in findings(model, images)
        ]


# Labels


def caffe_samples(
    scaling: Scaling, *, swapped: bool, count: int = 64
) -> tuple[list[Images], list[int]]:
    """Pictures in a scaling, and the classes of a model for Caffe's scaling in BGR."""
    session = Reference(trained(CAFFE)).session
    samples, labels = [], []
    for each in pictures(count):
        right = CAFFE.of_pixels(each).astype(np.float32)
        labels.append(int(session.run(None, {"x": right})[0].argmax()))
        given = each[:, ::-1] if swapped else each
        samples.append(scaling.of_pixels(given).astype(np.float32))
    return samples, labels


CAFFE = SCALINGS[4]
IMAGENET = SCALINGS[1]


def labelled(samples: list[Images], labels: list[int]) -> list[Finding]:
    """What the check says of labelled samples for a model of Caffe's scaling."""
    model = trained(CAFFE)
    session = Reference(model).session
    check = PreprocessingCheck(model)
    for sample, label in zip(samples, labels, strict=True):
        feeds = {"x": sample}
        check.add(feeds, {"y": session.run(None, feeds)[0]}, [label])
    return check.findings(session)


@pytest.mark.parametrize("swapped", [False, True])
def test_labels_tell_scaling_and_order_of_channels(swapped: bool) -> None:
    """Even where the statistics are those of the right order of channels."""
    (finding,) = labelled(*caffe_samples(IMAGENET, swapped=swapped))
    swap = " --color swapped" if swapped else ""
    assert finding.options == f"--scale 1 --mean 103.939 116.779 123.68{swap}"
    assert finding.cause == ("scaling and color" if swapped else "scaling")
    assert "the right class of 100 % of 64 labelled inputs" in finding.evidence


def test_labels_tell_the_order_of_channels_alone() -> None:
    """The class is the brightest channel; the statistics of the outputs do not change."""
    model = parse(
        "g (float[N, 3, H, W] x) => (float y) { a = GlobalAveragePool (x)  y = Flatten (a) }"
    )
    samples = [(each / 255).astype(np.float32) for each in pictures(40)]
    labels = [int(2 - each.mean(axis=(0, 2, 3)).argmax()) for each in samples]
    session = Reference(model).session
    check = PreprocessingCheck(model, "classifier")
    for sample, label in zip(samples, labels, strict=True):
        check.add({"x": sample}, {"y": session.run(None, {"x": sample})[0]}, [label])
    (finding,) = check.findings(session)
    assert (finding.cause, finding.options) == ("color", "--color swapped")


def test_right_data_with_labels_raise_no_doubt() -> None:
    assert labelled(*caffe_samples(CAFFE, swapped=False)) == []


def test_labels_of_another_numbering_leave_the_statistics_to_judge() -> None:
    samples, labels = caffe_samples(IMAGENET, swapped=False)
    (finding,) = labelled(samples, [label + 100 for label in labels])
    assert "BatchNormalization" in finding.evidence


def test_labels_of_some_rows_and_of_some_samples() -> None:
    hits = Labelled("y", [[None, 1], [0, None]])
    for scores in ([[9.0, 0], [0, 9]], [[9.0, 0], [0, 9]]):
        hits.add({"y": np.array(scores, np.float32)})
    assert hits.hits == [True, True] and len(hits) == 2
    assert not hits.beaten_by(hits), "equal evidence"


@pytest.mark.parametrize(
    ("won", "lost", "beaten"),
    [(7, 0, True), (6, 0, False), (20, 3, True), (20, 12, False)],
)
def test_a_higher_top1_must_be_significant(won: int, lost: int, beaten: bool) -> None:
    """McNemar's z is (won - lost) / sqrt(won + lost); the limit is 2.5."""
    rows = 64
    given = Labelled("y", [], [False] * won + [True] * (rows - won))
    hits = [True] * (rows - lost) + [False] * lost
    assert given.beaten_by(Labelled("y", [], hits)) is beaten


@pytest.mark.parametrize(
    ("classes", "right", "by_chance"),
    [
        (10, 0.16, True),
        (10, 0.3, False),
        (1000, 0.0, True),
        (2, 0.55, True),
        (2, 0.7, False),
    ],
)
def test_a_top1_by_chance(classes: int, right: float, by_chance: bool) -> None:
    hits = [row < 100 * right for row in range(100)]
    assert Labelled("y", [], hits, classes=classes).is_by_chance is by_chance


@pytest.mark.parametrize(
    ("classes", "hits", "rows", "by_chance"),
    [
        # 80 % right, of two classes: 6 % of all samples of 8 have four hits or fewer.
        (2, 4, 8, False),
        (2, 2, 8, True),
        (2, 9, 16, False),
        (2, 8, 16, True),
        (3, 3, 8, False),
        (10, 1, 8, True),
    ],
)
def test_few_rows_show_little(
    classes: int, hits: int, rows: int, by_chance: bool
) -> None:
    found = [row < hits for row in range(rows)]
    assert Labelled("y", [], found, classes=classes).is_by_chance is by_chance


def test_wrong_labels_raise_doubt_where_no_picture_is_read() -> None:
    """Nothing names the cause, and the float model is right on no sample."""
    model = parse(
        "g (float[N, 6] x) => (float[N, 4] y) { y = MatMul (x, w) }", w=weight(6, 4)
    )
    session = Reference(model).session
    samples = [{"x": normal(1, 6, seed=seed)} for seed in range(40)]
    classes = [int(session.run(None, each)[0].argmax()) for each in samples]
    for shift, doubted in (0, False), (1, True):
        labels = [(label + shift) % 4 for label in classes]
        pairs = [
            (each["x"], label) for each, label in zip(samples, labels, strict=True)
        ]
        report = quantize(model, pairs, task="classifier").report
        assert bool(report.warnings) is doubted
        assert report.verdict is not None
        if doubted:
            assert report.verdict.band != "good"
            assert "the right class of 0 % of" in report.warnings[0]
            assert report.warnings[0].startswith("labels or preprocessing")
            assert report.verdict.sentence.startswith("the labels or the preprocessing")


def test_labels_in_another_order_fit_no_preprocessing() -> None:
    """A tenth of the classes right, where none was, is chance."""
    given = Labelled("y", [], [False] * 100, classes=10)
    other = Labelled("y", [], [True] * 12 + [False] * 88, classes=10)
    assert not given.beaten_by(other)


def test_labels_of_quantize_and_compare(tmp_path: Path) -> None:
    samples, labels = caffe_samples(IMAGENET, swapped=True)
    data = [{"x": sample} for sample in samples]
    file = tmp_path / "labels.csv"
    rows = [f"{place},{label}" for place, label in enumerate(labels)]
    file.write_text("\n".join(["name,label", *rows]), encoding="utf-8")
    model = trained(CAFFE)
    result = quantize(model, data, labels=file)
    (warning,) = result.report.warnings
    assert "(scaling and color)" in warning and "labelled inputs" in warning
    assert compare(model, result.model, data, labels=file).warnings == [warning]
    with pytest.raises(ConfigError, match="can be read once"):
        quantize(model, iter(data), labels=file)


# Tokens

BERT = """g (int64[N, T] ids, int64[N, T] mask, int64[N, T] types) => (float y) {
    y = Gather (table, ids)
}"""


@pytest.fixture(scope="module")
def bert() -> ModelProto:
    """A table of 2,000 rows, of which the first hundred were never trained."""
    table = normal(2000, 64).astype(np.float32)
    table[:100] *= 0.1
    return parse(BERT, table=table)


def token_findings(
    model: ModelProto, ids: list[NDArray[Any]], mask: int = 1
) -> list[Finding]:
    session = Reference(model).session
    check = PreprocessingCheck(model)
    for row in ids:
        row = row.astype(np.int64)
        feeds = {
            "ids": row,
            "mask": np.full_like(row, mask),
            "types": np.zeros_like(row),
        }
        check.add(feeds, {"y": session.run(None, feeds)[0]})
    return check.findings(session)


def sentences(count: int = 12) -> list[NDArray[Any]]:
    generator = np.random.default_rng(1)
    rows = [generator.integers(200, 2000, (1, 12 + place)) for place in range(count)]
    for row in rows:
        row[0, 0], row[0, -1] = 101, 102
    return rows


def test_right_tokens(bert: ModelProto) -> None:
    assert token_findings(bert, sentences()) == []


@pytest.mark.parametrize(
    ("change", "mask", "cause", "text"),
    [
        (lambda row: row, 0, "mask", "'mask' is 0 throughout"),
        (lambda row: np.pad(row, ((0, 0), (0, 60))), 1, "tokens", "of all tokens that count are 0"),
        (lambda row: row[:, 1:-1], 1, "tokens", "begin with 12 different tokens"),
        (lambda row: row % 90, 1, "tokens", "looks untrained"),
    ],
)  # fmt: skip
def test_wrong_tokens(
    bert: ModelProto, change: Any, mask: int, cause: str, text: str
) -> None:
    found = token_findings(bert, [change(row) for row in sentences()], mask)
    assert found[0].cause == cause
    rows = [change(row) for row in sentences()]
    assert token_findings(in_constant_nodes(bert), rows, mask) == found
    assert token_findings(in_a_branch(bert), rows, mask) == found
    assert text in " ".join(finding.evidence for finding in found)


# In the reports


def test_reports_and_verdicts_say_it(caplog: pytest.LogCaptureFixture) -> None:
    model = trained(SCALINGS[1])
    samples = [{"x": each.astype(np.float32)} for each in pictures(40)]
    with caplog.at_level(logging.WARNING):
        result = quantize(model, samples)
    (warning,) = result.report.warnings
    assert warning in caplog.text and warning in str(result.report)
    verdict = result.report.verdict
    assert verdict is not None and verdict.band in ("risky", "poor")
    assert verdict.sentence.startswith("the preprocessing of the data looks wrong")
    found = compare(model, result.model, samples)
    assert found.warnings == [warning] or "scaling" in found.warnings[0]
    unchecked = compare(model, result.model, samples, preprocessing=False)
    assert unchecked.warnings == [] and unchecked.outputs == found.outputs


def test_right_data_raise_no_warning() -> None:
    scaling = SCALINGS[1]
    samples = [
        {"x": scaling.of_pixels(each).astype(np.float32)} for each in pictures(40)
    ]
    report = quantize(trained(scaling), samples).report
    assert report.warnings == [] and report.verdict is not None


def test_samples_without_outputs_are_run_when_they_are_needed() -> None:
    model = trained(SCALINGS[1])
    samples = [each.astype(np.float32) for each in pictures(16)]
    session = Reference(model).session
    check = PreprocessingCheck(model)
    check.add({"x": samples[0]}, {"y": session.run(None, {"x": samples[0]})[0]})
    for sample in samples[1:]:
        check.remember({"x": sample})
    assert check.findings(session) == findings(model, samples)
