"""The front of a search on synthetic timings, whose true latencies are known."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.random import Generator

from quark_onnx.study.record import Record, pareto_front
from quark_onnx.trials.latency import Latency

#: Runs of each model in a measurement, as on a model that is fast enough for all of them.
RUNS = 30


def timed(random: Generator, milliseconds: float, noise: float) -> Latency:
    """Time a model of a known latency, in turns with a float model of 1 ms."""
    before, after = (
        np.quantile(value * random.lognormal(0.0, noise, RUNS), [0.25, 0.5, 0.75])
        for value in (1.0, milliseconds)
    )
    return Latency(
        float(before[1]),
        float(after[1]),
        1,
        RUNS,
        reference_quartiles=(float(before[0]), float(before[2])),
        other_quartiles=(float(after[0]), float(after[2])),
    )


def record(score: float, latency: Latency) -> Record:
    return Record(score, 1.0, 1000, runtime=latency.ratio, scatter=latency.scatter)


@pytest.mark.parametrize("noise", [0.01, 0.05, 0.2, 0.5])
def test_repeated_timings_of_one_model_are_equal(noise: float) -> None:
    """Of models of one size that differ in their score alone, the best is the front."""
    random = np.random.default_rng(0)
    for _ in range(100):
        pair = [record(score, timed(random, 0.5, noise)) for score in (20.0, 21.0)]
        assert pareto_front(pair) == pair[1:], pair


@pytest.mark.parametrize("noise", [0.01, 0.05, 0.2])
def test_a_faster_model_stays_on_the_front(noise: float) -> None:
    random = np.random.default_rng(0)
    for _ in range(100):
        pair = [record(20.0, timed(random, 0.2, noise))]
        pair.append(record(21.0, timed(random, 1.0, noise)))
        assert pareto_front(pair) == pair, pair


def test_a_steady_machine_tells_a_tenth_apart() -> None:
    random = np.random.default_rng(0)
    pair = [record(20.0, timed(random, 0.90, 0.005))]
    pair.append(record(21.0, timed(random, 1.0, 0.005)))
    assert pareto_front(pair) == pair


def test_few_runs_have_no_known_scatter() -> None:
    assert Latency(1.0, 0.5, 1, 3).scatter == 0.0
