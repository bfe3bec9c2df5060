"""Running a model over data: what is observed, how much is alive, and the same result from any
executor.
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

import calibrators
from calibrators import (
    CALIBRATORS,
    DataError,
    Histogram,
    MinMax,
    NonOverflow,
    Percentile,
    rows,
)
from calibrators.onnx_runtime import runner, session
from calibrators.onnx_runtime.runner import Observation, collect
from calibrators.onnx_runtime.worker import (
    SessionSettings,
    native_session,
    session_options,
)
from tests.cases import loop_over

Array = NDArray[Any]
Sample = dict[str, Array]

NET = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
net (float[batch, n] x, float[n] bias) => (float[batch, n] y) {
    a = Mul (x, x)
    b = Sub (a, bias)
    c = Relu (b)
    y = Neg (c)
}""")
MINMAX, MOVING, PERCENTILE = MinMax(), MinMax(moving_average=True), Percentile()
METHODS = [cls() for cls in CALIBRATORS.values()]
#: Calibrators whose statistics are those of all values, whatever sample they are of.
POOLED = [method for method in METHODS if not getattr(method, "by_sample", False)]
EVERYTHING = [
    *(
        Observation(tensor, method, axis)
        for method in METHODS
        for tensor in ("x", "b", "y")
        for axis in (None, 0)
    ),
    *(Observation(tensor, MinMax(moving_average=True)) for tensor in ("x", "b")),
]


def sample(index: int, batch: int = 3, n: int = 5) -> Sample:
    noise = np.random.default_rng(index)
    return {
        "x": noise.normal(0, 1 + index, (batch, n)).astype("f"),
        "bias": noise.normal(size=n).astype("f"),
    }


def numpys(feeds: Sample) -> Sample:
    """All tensors of NET."""
    a = feeds["x"] * feeds["x"]
    b = a - feeds["bias"]
    return feeds | {"a": a, "b": b, "c": np.maximum(b, 0), "y": -np.maximum(b, 0)}


SHAPES = [(1, 5), (3, 5), (2, 9), (7, 1), (1, 1)]
SAMPLES = [sample(index, *SHAPES[index % len(SHAPES)]) for index in range(10)]
EVEN = [
    sample(index) for index in range(23)
]  # of one shape, as statistics per row of the batch need


def model(body: str, kind: str = "float", out: str = "float") -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> g ({kind}[n] x) => ({out}[m] y) {{'
        f" {body} }}"
    )


def observe(
    body: str,
    tensor: str,
    *values: Any,
    method: Any = MINMAX,
    kind: str = "float",
    out: str = "float",
) -> Any:
    """The statistic of one tensor of a small model, after these values of its input x."""
    feeds = [{"x": np.asarray(value)} for value in values]
    (statistic,) = collect(model(body, kind, out), [Observation(tensor, method)], feeds)
    return statistic


def check_same(one: Any, other: Any, tolerance: float = 0) -> None:
    assert type(one) is type(other) and vars(one).keys() == vars(other).keys()
    for field, value in vars(one).items():
        if isinstance(value, np.ndarray) and value.dtype == object:  # exact sums
            np.testing.assert_array_equal(value, vars(other)[field], err_msg=field)
            continue
        if not isinstance(value, list):
            np.testing.assert_allclose(
                value, vars(other)[field], rtol=tolerance, atol=tolerance, err_msg=field
            )
            continue
        for part, twin in zip(
            value, vars(other)[field], strict=True
        ):  # None for a group without samples
            assert (part is None) == (twin is None)
            if part is not None:
                np.testing.assert_array_equal(part, twin, err_msg=field)


# What is observed


@loop_over("tensor", ["x", "bias", "a", "b", "c", "y"])
@loop_over("method", [*POOLED, MinMax(moving_average=True)])
def test_a_statistic_is_that_of_numpys_values(tensor: str, method: Any) -> None:
    """Extremes are taken inside the graph, histograms of fetched values.

    Batches have different shapes.
    """
    (found,), want = (
        collect(NET, [Observation(tensor, method)], SAMPLES, threads=1),
        method.statistic(),
    )
    for feeds in SAMPLES:
        want.observe(rows(numpys(feeds)[tensor]))
    check_same(found, want)


@pytest.mark.parametrize("method", POOLED, ids=str)
def test_a_statistic_per_channel(method: Any) -> None:
    samples = [sample(index, batch=index + 1, n=4) for index in range(4)]
    found = collect(
        NET, [Observation(tensor, method, axis=1) for tensor in ("b", "x")], samples
    )
    for statistic, tensor in zip(found, ("b", "x"), strict=True):
        want = method.statistic()
        want.observe(
            np.concatenate(
                [rows(numpys(feeds)[tensor], 1) for feeds in samples], axis=1
            )
        )
        check_same(statistic, want)


def test_statistics_come_in_the_order_asked_for() -> None:
    asked = [
        ("y", Percentile()),
        ("a", MinMax()),
        ("y", MinMax()),
        ("x", MinMax()),
        ("a", NonOverflow()),
    ]
    found = collect(
        NET, [Observation(tensor, method) for tensor, method in asked], EVEN
    )
    assert [statistic.hi.item() > 0 for statistic in found] == [
        False,
        True,
        False,
        True,
        True,
    ]
    assert [type(statistic) for statistic in found] == [
        type(method.statistic()) for _, method in asked
    ]
    assert found[1].hi == found[4].hi


class Spy:
    """A session that remembers what was fetched from it."""

    def __init__(self, real: Any) -> None:
        self.real, self.fetched = real, dict[str, Array]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def run(self, names: list[str], feeds: Sample) -> list[Array]:
        values: list[Array] = self.real.run(names, feeds)
        self.fetched.update(zip(names, values, strict=True))
        return values


@pytest.fixture
def spies(monkeypatch: pytest.MonkeyPatch) -> list[Spy]:
    made: list[Spy] = []

    def spied(*args: Any, **options: Any) -> Spy:
        made.append(Spy(session.open_session(*args, **options)))
        return made[-1]

    monkeypatch.setattr(runner, "open_session", spied)
    return made


def test_only_what_is_observed_is_fetched(spies: list[Spy]) -> None:
    collect(
        NET, [Observation("b", Percentile()), Observation("x", Percentile())], EVEN[:1]
    )
    assert list(spies[0].fetched) == ["b"]


def test_arrays_that_the_model_does_not_take_are_passed_over() -> None:
    (found,) = collect(
        NET, [Observation("y", MinMax())], [EVEN[0] | {"label": np.array([3])}]
    )
    assert found.lo == numpys(EVEN[0])["y"].min()


@pytest.mark.parametrize("tensor", ["i", "x"])
@pytest.mark.parametrize("method", [PERCENTILE, MINMAX])
def test_integers_leave_a_statistic_empty(tensor: str, method: Any) -> None:
    found = observe(
        "i = Mul (x, x) y = Cast <to = 1> (i)",
        tensor,
        [1, 2, 3],
        method=method,
        kind="int64",
    )
    assert found.lo.size == 0


@pytest.mark.parametrize("method", [PERCENTILE, MINMAX, MOVING])
def test_a_batch_in_which_a_tensor_has_no_element_leaves_no_trace(method: Any) -> None:
    """As the boxes of an image without objects."""
    none, some = np.zeros(0, np.float32), np.float32([1, 2])
    found = observe("h = Sqrt (x) y = Neg (h)", "h", none, some, none, method=method)
    assert (found.lo, found.nonfinite) == (1, 0)
    assert observe("h = Sqrt (x) y = Neg (h)", "h", none, method=method).lo.size == 0


@pytest.mark.parametrize("place", [0, 5, 99])
@pytest.mark.parametrize("method", [PERCENTILE, MINMAX, MOVING])
def test_nan_inside_the_graph_is_counted(method: Any, place: int) -> None:
    values = np.linspace(1, 4, 100, dtype=np.float32)
    values[place] = -1
    found = observe(
        "h = Sqrt (x) y = Neg (h)", "h", values, np.float32([1, 9]), method=method
    )
    assert found.nonfinite > 0
    assert np.isfinite(found.lo).all() and np.isfinite(found.hi).all()


def test_infinity_inside_the_graph_is_counted() -> None:
    for method in (MinMax(), Percentile()):
        found = observe(
            "h = Exp (x) y = Neg (h)", "h", np.float32([0, 1000]), method=method
        )
        assert found.nonfinite == 1 and np.isfinite(found.hi).all()


def test_no_sample_leaves_statistics_empty() -> None:
    assert [statistic.lo.size for statistic in collect(NET, EVERYTHING, [])] == [
        0
    ] * len(EVERYTHING)


def test_the_model_is_not_changed() -> None:
    before = NET.SerializeToString(deterministic=True)
    collect(NET, EVERYTHING, EVEN[:2])
    assert NET.SerializeToString(deterministic=True) == before


def test_a_model_may_be_made_when_it_is_needed() -> None:
    made = collect(lambda: NET, EVERYTHING, EVEN[:2])
    for found, expected in zip(made, collect(NET, EVERYTHING, EVEN[:2]), strict=True):
        np.testing.assert_array_equal([found.lo, found.hi], [expected.lo, expected.hi])


def test_a_session_does_not_keep_the_bytes_of_its_model() -> None:
    data = NET.SerializeToString()
    before = sys.getrefcount(data)
    session = native_session(data, session_options(SessionSettings()))
    assert sys.getrefcount(data) == before
    assert session.run(None, EVEN[0])


def test_the_samples_are_not_changed() -> None:
    frozen = sample(0)
    for array in frozen.values():
        array.setflags(write=False)
    collect(NET, EVERYTHING, [frozen])


def test_a_model_too_large_for_protobuf(monkeypatch: pytest.MonkeyPatch) -> None:
    net = model(
        "k = Constant <value = float[3] {1, 2, 3}> () h = Mul (x, w) y = Neg (h)"
    )
    net.graph.initializer.append(
        onnx.numpy_helper.from_array(np.full(3, 2, np.float32), "w")
    )
    feeds, watched = (
        [{"x": np.float32([1, 2, 3])}],
        [Observation("h", MinMax()), Observation("h", Percentile())],
    )
    small = collect(net, watched, feeds)
    for module in (runner, session):
        monkeypatch.setattr(module, "PROTOBUF_LIMIT", 1)
    before = net.SerializeToString(deterministic=True)
    for one, other in zip(small, collect(net, watched, feeds), strict=True):
        check_same(one, other)
    assert net.SerializeToString(deterministic=True) == before


# What is alive


def watched_samples(count: int, others: int) -> Iterator[Sample]:
    """Samples, each made when at most so many others are still alive."""
    alive: list[weakref.ref[Array]] = []
    for index in range(count):
        patience = time.monotonic() + 60  # a worker may be about to let go
        while (
            held := sum(one() is not None for one in alive)
        ) > others and time.monotonic() < patience:
            time.sleep(0.001)
        assert held <= others, (
            f"{held} other samples are alive when sample {index} is made"
        )
        made = sample(index)
        alive.append(weakref.ref(made["x"]))
        yield made
        del made


@pytest.mark.parametrize(("threads", "others"), [(1, 0), (2, 1), (4, 1)])
def test_one_batch_and_one_that_is_prefetched_are_alive(
    threads: int, others: int
) -> None:
    watch = [
        Observation("x", Percentile()),
        Observation("b", Percentile()),
        Observation("y", MinMax()),
    ]
    collect(NET, watch, watched_samples(30, others), threads=threads)


def test_an_executor_holds_a_bounded_number_of_batches() -> None:
    with ThreadPoolExecutor(2) as pool:
        collect(
            NET,
            [Observation("b", Percentile())],
            watched_samples(200, 40),
            executor=pool,
        )


def test_the_data_is_read_once() -> None:
    pulled: list[int] = []
    collect(
        NET,
        EVERYTHING,
        (pulled.append(index) or feeds for index, feeds in enumerate(EVEN)),
    )  # type: ignore[func-returns-value]
    assert pulled == list(range(len(EVEN)))


# Executors


@pytest.fixture(scope="module")
def processes() -> Iterator[Executor]:
    with ProcessPoolExecutor(
        2, mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        yield pool


@pytest.fixture(scope="module")
def threads() -> Iterator[Executor]:
    with ThreadPoolExecutor(3) as pool:
        yield pool


@pytest.fixture(scope="module")
def cluster() -> Iterator[Executor]:
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None
        ) as here,
        distributed.Client(here) as client,
        client.get_executor() as executor,
    ):
        yield executor


pools = pytest.mark.parametrize("pool", ["processes", "threads", "cluster"])


@pools
@pytest.mark.parametrize("count", [0, 1, 4, 23])
def test_an_executor_gives_the_serial_result(
    pool: str, count: int, request: pytest.FixtureRequest
) -> None:
    serial = collect(NET, EVERYTHING, EVEN[:count], threads=1)
    found = collect(
        NET,
        EVERYTHING,
        iter(EVEN[:count]),
        executor=request.getfixturevalue(pool),
        threads=1,
    )
    for one, other, observation in zip(found, serial, EVERYTHING, strict=True):
        averaged = (
            isinstance(observation.calibrator, MinMax)
            and observation.calibrator.moving_average
        )
        check_same(one, other, tolerance=1e-13 if averaged else 0)


@pytest.mark.parametrize("cores", [2, 3, 8])
def test_any_number_of_cores_gives_the_same_result(cores: int) -> None:
    for one, other in zip(
        collect(NET, EVERYTHING, EVEN, threads=cores),
        collect(NET, EVERYTHING, EVEN, threads=1),
        strict=True,
    ):
        check_same(one, other)


def test_threads_of_one_pool_do_not_share_statistics() -> None:
    """Samples that take a while, so that they overlap."""
    net = model("h = Sin (x) g = Cos (h) y = Neg (g)")
    samples = [
        {"x": np.random.default_rng(index).standard_normal(100_000).astype("f")}
        for index in range(32)
    ]
    watched = [
        Observation(tensor, method)
        for tensor in ("h", "g", "y")
        for method in (Percentile(), MinMax())
    ]
    with ThreadPoolExecutor(4) as pool:
        for one, other in zip(
            collect(net, watched, samples, executor=pool),
            collect(net, watched, samples, threads=1),
            strict=True,
        ):
            check_same(one, other)


def test_a_pool_serves_one_model_after_another(processes: Executor) -> None:
    for factor in (2, 3, 2):
        net = model(
            f"k = Constant <value = float {{{factor}}}> () h = Mul (x, k) y = Neg (h)"
        )
        samples = [{"x": np.float32([1, index])} for index in range(9)]
        (found,) = collect(
            net, [Observation("h", MinMax())], samples, executor=processes
        )
        assert found.hi == 8 * factor


# Errors and progress


@pytest.mark.parametrize("pool", ["", "processes", "threads", "cluster"])
@pytest.mark.parametrize("bad", [0, 6, 9])
def test_an_error_names_its_sample(
    pool: str, bad: int, request: pytest.FixtureRequest
) -> None:
    samples = [sample(index) for index in range(10)]
    samples[bad]["bias"] = np.zeros(4, np.float32)
    executor = request.getfixturevalue(pool) if pool else None
    with pytest.raises(DataError, match=rf"^sample {bad}: .*Sub"):
        collect(NET, [Observation("y", MinMax())], samples, executor=executor)


def test_a_missing_input_names_its_sample() -> None:
    with pytest.raises(DataError, match=r"^sample 1: .*bias"):
        collect(NET, [Observation("y", MINMAX)], [EVEN[0], {"x": EVEN[0]["x"]}])


@pytest.mark.parametrize("pool", ["", "processes", "threads", "cluster"])
def test_an_error_in_the_data_comes_through(
    pool: str, request: pytest.FixtureRequest
) -> None:
    def broken() -> Iterator[Sample]:
        yield from EVEN[:6]
        raise DataError("sample 6, input 'x': NaN")

    executor = request.getfixturevalue(pool) if pool else None
    with pytest.raises(DataError, match="sample 6, input 'x': NaN"):
        collect(NET, [Observation("y", MinMax())], broken(), executor=executor)


@pytest.mark.parametrize("pool", ["", "processes", "threads", "cluster"])
def test_progress_rises_to_the_number_of_samples(
    pool: str, request: pytest.FixtureRequest
) -> None:
    counts: list[int] = []
    executor = request.getfixturevalue(pool) if pool else None
    collect(
        NET,
        [Observation("y", MinMax())],
        iter(EVEN),
        executor=executor,
        progress=counts.append,
    )
    assert counts == sorted(set(counts)) and counts[0] > 0 and counts[-1] == len(EVEN)


# The package


def test_the_arithmetic_needs_numpy_alone() -> None:
    heavy = {"onnx", "onnxruntime", "onnxruntime_extensions", "torch", "quark_onnx"}
    script = (
        f"import sys, calibrators; print({heavy} & {{name.partition('.')[0] for name in"
        " sys.modules})"
    )
    found = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(calibrators.__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == "set()"


def test_all_public_names_are_there() -> None:
    assert len(calibrators.__all__) == len(set(calibrators.__all__))
    assert Histogram is calibrators.Histogram and all(
        hasattr(calibrators, name) for name in calibrators.__all__
    )


def test_outputs_are_passed_on_with_the_position_of_the_sample() -> None:
    samples = [
        {"x": np.full((1, 2), value, np.float32), "bias": np.zeros(2, np.float32)}
        for value in range(5)
    ]
    received: dict[int, Array] = {}

    def receive(position: int, outputs: Mapping[str, Any]) -> None:
        received[position] = outputs["y"]

    observed = [Observation("b", MINMAX)]
    found = collect(NET, observed, samples, receive=receive)
    assert found == collect(NET, observed, samples)
    squares = {place: -float(value.max()) for place, value in received.items()}
    assert squares == {0: 0, 1: 1, 2: 4, 3: 9, 4: 16}
