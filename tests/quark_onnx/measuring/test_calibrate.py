"""calibrate: which tensors are watched, what is held out, and what is left float when the data
tells nothing.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

from calibrators import Calibrator, MinMax, MovingExtremes, Percentile
from calibrators.onnx_runtime.control_flow import Observation
from calibrators.onnx_runtime.runner import collect
from quark_onnx import Override, QConfig
from quark_onnx.common.errors import DataError
from quark_onnx.graph import Graph, tensor_keys
from quark_onnx.measuring.calibrate import calibrate
from quark_onnx.measuring.calibration import Calibration, GraphCalibration
from quark_onnx.measuring.held_out import HoldOut, held_out_of
from quark_onnx.plan import Keep, Plan, Quantize, Use
from quark_onnx.planning.make_plan import make_plan
from tests.models import Feeds, parse, residual, run, samples
from tests.pipeline import Stages
from tests.settings import CHANNEL, TENSOR


def test_only_what_must_be_measured_is_watched() -> None:
    stages = Stages.of(residual())
    # not: what passes through (m, f), what is fused (a, s), constants, the result that nobody reads
    # quantized
    assert sorted(use.tensor for use in stages.ranges) == ["c", "p", "r", "t", "x"]


def test_the_range_is_that_of_the_float_model() -> None:
    model = residual()
    data = samples(model)
    outputs = parse("""g (float[N,4,8,8] x) => (float[N,4,8,8] r) {
            a = Conv <pads = [1,1,1,1]> (x, w1, b1)
            r = Relu (a)
        }""")
    outputs.graph.initializer.extend(model.graph.initializer)
    values = np.stack([run(outputs, feeds)[0] for feeds in data])
    found = Stages.of(model, TENSOR, data).ranges[Use("r")]
    np.testing.assert_allclose(
        [found.lo[0], found.hi[0]], [values.min(), values.max()], rtol=1e-6
    )


def test_a_tensor_with_two_calibrators_is_watched_twice() -> None:
    own = TENSOR.activation.with_(dtype="uint16", calibrator="entropy")
    text = (
        "g (float[N,4] x) => (float[N,4] y, float[N,4] z) { [a] y = Add (x, x) [b] z ="
        " Mul (x, x) }"
    )
    stages = Stages.of(
        parse(text), TENSOR.with_(overrides=(Override("b", activation=own),))
    )
    assert type(stages.ranges[Use("x")]) is not type(stages.ranges[Use("x", "b")])


JOINS = parse("""g (float[N,2] x, float[N,3] u) => (float[N,10] y) {
        a = Exp (x)
        b = Neg (u)
        c = Concat <axis = 1> (a, b)
        d = Concat <axis = 1> (c, c)
        y = Sqrt (d)
    }""")


@pytest.mark.parametrize(
    "calibrator", [MinMax(), Percentile(), MinMax(moving_average=True)], ids=str
)
def test_a_join_has_the_statistic_of_what_it_joins(
    calibrator: Calibrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    random, graph = np.random.default_rng(0), Graph.of(JOINS)
    data = [
        {"x": random.normal(size=(3, 2)), "u": random.normal(size=(3, 3)) * 4}
        for _ in range(5)
    ]
    data = [
        {name: value.astype(np.float32) for name, value in feeds.items()}
        for feeds in data
    ]
    entry = Quantize(TENSOR.activation.with_(calibrator=calibrator))
    plan = Plan(graph, {}, entries={Use(tensor): entry for tensor in "abcd"})
    watched = list[str]()

    def collected(
        model: ModelProto,
        observations: Sequence[Observation],
        *rest: Any,
        **options: Any,
    ) -> Any:
        watched.extend(each.tensor for each in observations)
        return collect(model, observations, *rest, **options)

    monkeypatch.setattr(sys.modules[calibrate.__module__], "collect", collected)
    ranges = calibrate(graph, plan, data).ranges
    in_order = isinstance(
        calibrator.statistic(), MovingExtremes
    )  # which does not merge to that of all values
    assert watched == list("abcd" if in_order else "ab")
    direct = collect(
        JOINS, [Observation(tensor, calibrator) for tensor in "abcd"], data
    )
    for tensor, expected in zip("abcd", direct, strict=True):
        for field in fields(expected):
            found = getattr(ranges[Use(tensor)], field.name)
            np.testing.assert_array_equal(
                found, getattr(expected, field.name), err_msg=f"{tensor}.{field.name}"
            )


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (0.0, "it was zero throughout calibration: there is no range to measure"),
        (-1.0, "it held NaN or infinite values during calibration"),
    ],
)
def test_a_tensor_without_a_range_stays_float(x: float, reason: str) -> None:
    model = parse("g (float[2] x) => (float[2] y) { r = Sqrt (x) y = Add (r, r) }")
    stages = Stages.of(model, TENSOR, [{"x": np.float32([x, x])}] * 2)
    assert stages.plan.entry(Use("r")) == Keep(reason)
    np.testing.assert_array_equal(
        run(stages.model, {"x": np.float32([4, 9])})[0], [4, 6]
    )


def test_a_sample_that_cannot_be_run_is_an_error_with_its_index() -> None:
    graph = Graph.of(residual())
    plan = make_plan(graph, CHANNEL)
    good = samples(residual(), 2)
    with pytest.raises(DataError, match="sample 2"):
        calibrate(graph, plan, [*good, {"x": np.zeros((1, 3, 8, 8), np.float32)}])


@pytest.mark.parametrize(
    "calibrator",
    [
        "minmax",
        "percentile",
        "layerwise_percentile",
        "entropy",
        "minmse",
        "nonoverflow",
    ],
)
def test_batches_may_be_split_as_one_likes(calibrator: str) -> None:
    config: QConfig = TENSOR.with_(calibrator=calibrator)
    one_by_one = samples(residual(), 8)
    together = [{"x": np.concatenate([feeds["x"] for feeds in one_by_one])}]
    found = [
        Stages.of(residual(), config, data).params.table
        for data in (one_by_one, together, one_by_one[::-1])
    ]
    for use, params in found[0].items():
        for other in found[1:]:
            np.testing.assert_allclose(
                other[use].scale, params.scale, rtol=0.02, err_msg=str(use)
            )


# Held out


TWINS = """g (float[N,4] x) => (float[N,4] y, float[N,4] z) {
        a = Exp (x) b = Exp (x) y = Mul (a, x) z = Mul (b, x)
    }"""


@pytest.mark.parametrize("total", [3, 8])
@pytest.mark.parametrize("model", [residual(), parse(TWINS)], ids=["residual", "twins"])
def test_first_samples_with_known_statistics_are_not_run_again(
    model: ModelProto, total: int
) -> None:
    graph, data = Graph.of(model), samples(model, total)
    plan = make_plan(graph, TENSOR.with_(calibrator=Percentile()))
    partial = GraphCalibration(Calibration(""), tensor_keys(graph), rich=False)
    calibrate(graph, plan, data[:3], keyed=partial)
    received = list[int]()
    counts = list[int]()
    rest = calibrate(
        graph,
        plan,
        data,
        partial=partial,
        progress=counts.append,
        receive=lambda position, _: received.append(position),
    )
    whole = calibrate(graph, plan, data)
    assert sorted(received) == list(range(3, total)) and counts[-1] == total
    assert rest.ranges.keys() == whole.ranges.keys()
    for use, statistic in whole.ranges.items():
        for field in fields(statistic):
            found = getattr(rest.ranges[use], field.name)
            np.testing.assert_array_equal(found, getattr(statistic, field.name))


def test_all_samples_are_run_where_a_statistic_of_the_first_is_missing() -> None:
    model = residual()
    graph, data = Graph.of(model), samples(model, 4)
    partial = GraphCalibration(Calibration(""), tensor_keys(graph), rich=False)
    calibrate(graph, make_plan(graph, TENSOR), data[:3], keyed=partial)
    moving = TENSOR.with_(calibrator=MinMax(moving_average=True))
    received = list[int]()
    calibrate(
        graph,
        make_plan(graph, moving),
        data,
        partial=partial,
        receive=lambda position, _: received.append(position),
    )
    assert sorted(received) == [0, 1, 2, 3]


def numbered(count: int) -> Iterator[dict[str, np.ndarray]]:
    return ({"x": np.float32([number])} for number in range(count))


@pytest.mark.parametrize("count", [1, 10, 11, 12, 32, 63, 64, 65, 100, 160, 256, 1000])
def test_a_tenth_of_the_samples_is_held_out_and_sixteen_of_64(count: int) -> None:
    """Figures rest on samples that no range was measured on, and on enough of them.

    At least a tenth and, from 64 samples on, 16. Fewer samples are held out of fewer, at most a
    quarter, and none of ten. The position decides, so that the same data are split alike.
    """
    held = HoldOut(numbered(count), verdict=True)
    passed = [int(sample["x"][0]) for sample in held]
    held_out = [int(sample["x"][0]) for sample in held.samples]
    assert sorted([*passed, *held_out]) == list(range(count))
    assert len(passed) == held.count and passed[:10] == list(range(min(10, count)))
    assert len(held_out) == held_out_of(count)
    if count > 10:
        assert count / 12 <= len(held_out) <= count / 4 + 1
    if count >= 64:
        assert len(held_out) >= max(16, count / 10)
    if count <= 10:
        assert held_out == []


def test_held_out_samples_come_from_all_of_the_data() -> None:
    """Each hundred of a thousand has its share: data are often sorted by class."""
    held = HoldOut(range(1000))
    list(held)
    shares = np.histogram(held.samples, 10, (0, 1000))[0]
    assert list(shares) == [20, *[10] * 9]
    assert held.deciding_samples == [10, 175, 445, 715]
    assert set(held.deciding_samples) <= set(held.samples)


@pytest.mark.parametrize(("most", "count"), [(None, 20), (7, 7), (0, 4)])
def test_few_samples_are_held_out_for_large_models(
    most: int | None, count: int
) -> None:
    """The work for figures stays bounded; what is not held out calibrates."""
    held = HoldOut(range(100), most=most)
    passed = list(held)
    assert len(held.samples) == count and len(passed) == 100 - count


def test_calibration_samples_for_the_verdict_are_drawn_from_all() -> None:
    for count, kept in ((10, 10), (20, 19), (60, 18), (126, 9), (400, 0)):
        held = HoldOut(numbered(count), verdict=True)
        passed = [int(sample["x"][0]) for sample in held]
        drawn = [int(sample["x"][0]) for sample in held.calibrated]
        assert len(drawn) == kept
        assert drawn == sorted(set(drawn)) and set(drawn) <= set(passed)
        if count == 126:
            assert max(drawn) > 60 > 20 > min(drawn)


def test_samples_for_the_verdict_stay_within_their_memory() -> None:
    size = 1 << 24
    held = HoldOut(({"x": np.empty(size, np.uint8)} for _ in range(130)), verdict=True)
    count = sum(1 for _ in held)
    assert (len(held.samples), len(held.calibrated), count) == (8, 4, 122)


def test_the_first_samples_are_remembered_on_request() -> None:
    held = HoldOut(range(40), remember=12)
    list(held)
    assert held.first == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12]


def test_one_sample_is_alive_at_a_time() -> None:
    references: list[weakref.ref[Feeds]] = []

    class Sample(dict):
        """A dictionary that can be referred to weakly."""

    def reader() -> Iterator[Sample]:
        for feeds in samples(residual(), 30):
            assert sum(reference() is not None for reference in references) <= 8, (
                "seven held out and the current one"
            )
            sample = Sample(feeds)
            references.append(weakref.ref(sample))
            yield sample
            del sample

    graph = Graph.of(residual())
    calibrate(graph, make_plan(graph, TENSOR), HoldOut(reader()))
    assert len(references) == 30
