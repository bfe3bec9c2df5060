"""The error of a model's outputs, against formulas written out in float64."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrators.onnx_runtime.remembering import RememberingSession
from quark_onnx.report import measure
from quark_onnx.report.measure import decibels


class Session:
    """As much of an onnxruntime session as is used: the outputs of each sample in turn."""

    def __init__(self, **outputs: list[Any]) -> None:
        self._outputs = outputs

    def get_inputs(self) -> list[Any]:
        return [SimpleNamespace(name="n")]

    def get_outputs(self) -> list[Any]:
        return [SimpleNamespace(name=name) for name in self._outputs]

    def run(self, names: list[str], feeds: dict[str, int]) -> list[Any]:
        return [self._outputs[name][feeds["n"]] for name in names]


class RandomSession(Session):
    """Has an output that is another one in every run."""

    random = np.random.default_rng(0)

    def run(self, names: list[str], feeds: dict[str, int]) -> list[Any]:
        return [
            self.random.normal(size=9).astype(np.float32),
            *super().run(names[1:], feeds),
        ]


ONE: Any = [{"n": 0}]
TWO: Any = [{"n": 0}, {"n": 1}]


def test_sqnr_cosine_and_largest_error_run_over_all_samples() -> None:
    a = [np.float32([1, 2, 3]), np.float32([4, 5, 6])]
    b = [np.float32([1, 2, 3.5]), np.float32([4, 4, 6])]
    (found,) = measure(Session(y=a), Session(y=b), TWO)
    signal, other = (np.concatenate(v).astype(np.float64) for v in (a, b))
    assert found.sqnr == pytest.approx(
        10 * math.log10((signal**2).sum() / ((signal - other) ** 2).sum())
    )
    assert found.cosine == pytest.approx(
        signal @ other / np.sqrt((signal @ signal) * (other @ other))
    )
    assert (found.max_error, found.agreement) == (1.0, None)


def test_equal_outputs_have_no_error() -> None:
    y = [np.float32([1, np.inf, np.nan])]
    (found,) = measure(Session(y=y), Session(y=y), ONE)
    assert (found.sqnr, found.cosine, found.max_error) == (math.inf, 1.0, 0.0)


@pytest.mark.parametrize(
    "other", [np.float32([1, 2]), np.float32([1, np.inf, 3]), np.float32([[1, 2, 3]])]
)
def test_another_shape_or_infinity_is_the_worst_error(other: Any) -> None:
    (found,) = measure(Session(y=[np.float32([1, 2, 3])]), Session(y=[other]), ONE)
    assert found.sqnr == -math.inf


def test_integers_agree_or_do_not() -> None:
    (found,) = measure(
        Session(y=[np.int64([1, 2, 3, 4])]), Session(y=[np.int64([1, 2, 3, 0])]), ONE
    )
    assert (found.sqnr, found.agreement) == (None, 0.75)


def test_sequences_count_as_their_arrays() -> None:
    (found,) = measure(
        Session(y=[[np.float32([3]), np.float32([4])]]),
        Session(y=[[np.float32([3]), np.float32([3])]]),
        ONE,
    )
    assert found.sqnr == pytest.approx(10 * math.log10(25))


def test_a_random_output_is_called_one() -> None:
    steady = [np.float32([1, 2])] * 2
    found = measure(RandomSession(r=[], y=steady), RandomSession(r=[], y=steady), TWO)
    assert (
        [o.random for o in found] == [True, False]
        and found[0].sqnr is None
        and found[1].sqnr == math.inf
    )


@pytest.mark.parametrize(("random", "runs"), [(True, 3), (False, 1)])
def test_a_poor_output_repeats_the_runs_of_a_model_that_may_be_random(
    random: bool, runs: int
) -> None:
    float_session = Mock(wraps=Session(y=[np.float32([1, 2])] * 3))
    reference = RememberingSession(float_session, may_be_random=random)
    sample = [{"n": np.array(0)}]
    (found,) = measure(reference, Session(y=[np.float32([2, 1])]), sample)
    assert not found.random
    assert float_session.run.call_count == runs


@given(st.floats(1e-30, 1e30), st.floats(1e-30, 1e30))
def test_decibels(signal: float, noise: float) -> None:
    assert decibels(signal, noise) == pytest.approx(
        10 * (math.log10(signal) - math.log10(noise)), abs=1e-9
    )


def test_decibels_at_the_ends() -> None:
    assert (decibels(1, 0), decibels(0, 0), decibels(0, 1), decibels(1, math.inf)) == (
        math.inf,
        math.inf,
        -math.inf,
        -math.inf,
    )
