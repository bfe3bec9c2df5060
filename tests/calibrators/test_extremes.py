"""Least and greatest value against numpy, their moving average against the plain recurrence."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from calibrators import Extremes, MovingExtremes

EXAMPLES = settings(deadline=None, derandomize=True)

Rows = NDArray[np.float32]
reals = st.floats(width=32, allow_nan=False, allow_infinity=False)
moderate = st.floats(-1e6, 1e6, width=32)


def streams(
    elements: st.SearchStrategy[float], least: int = 1
) -> st.SearchStrategy[list[Rows]]:
    """Batches of one to three rows and any number of columns."""
    return st.integers(1, 3).flatmap(
        lambda rows: st.lists(
            arrays(
                np.float32,
                st.tuples(st.just(rows), st.integers(least, 4)),
                elements=elements,
            ),
            min_size=1,
        )
    )


def extremes(*batches: Rows) -> Extremes:
    result = Extremes()
    for batch in batches:
        result.observe(batch)
    return result


def moving(constant: float, *batches: Rows) -> MovingExtremes:
    result = MovingExtremes(constant)
    for batch in batches:
        result.observe(batch)
    return result


def recurrence(constant: float, batches: list[Rows]) -> NDArray[np.float64]:
    """The definition: average = (1 - constant) * average + constant * batch."""
    ends = [
        np.stack([batch.min(axis=1), batch.max(axis=1)]).astype(np.float64)
        for batch in batches
    ]
    average = ends[0]
    for end in ends[1:]:
        average = (1 - constant) * average + constant * end
    return average


@given(streams(reals), st.data())
@EXAMPLES
def test_extremes_are_those_of_all_values(
    batches: list[Rows], data: st.DataObject
) -> None:
    whole = np.concatenate(batches, axis=1)
    result = extremes(*data.draw(st.permutations(batches)))
    np.testing.assert_array_equal(result.lo, whole.min(axis=1))
    np.testing.assert_array_equal(result.hi, whole.max(axis=1))


@given(streams(reals), st.data())
@EXAMPLES
def test_extremes_merge_exactly(batches: list[Rows], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(batches)))
    one, other = extremes(*batches[cut:]), extremes(*batches[:cut])
    one.merge(other)
    whole = extremes(*batches)
    np.testing.assert_array_equal(one.lo, whole.lo)
    np.testing.assert_array_equal(one.hi, whole.hi)


@given(streams(moderate), st.floats(0, 1))
@EXAMPLES
def test_the_moving_average_follows_its_recurrence(
    batches: list[Rows], constant: float
) -> None:
    result = moving(constant, *batches)
    np.testing.assert_allclose(
        [result.lo, result.hi], recurrence(constant, batches), rtol=1e-9, atol=1e-7
    )


@given(streams(moderate), st.floats(0, 1), st.data())
@EXAMPLES
def test_shards_of_a_moving_average_merge_to_the_whole(
    batches: list[Rows], constant: float, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(batches)), max_size=3)))
    total = MovingExtremes(constant)
    for start, end in zip([0, *cuts], [*cuts, len(batches)], strict=True):
        total.merge(moving(constant, *batches[start:end]))
    np.testing.assert_allclose(
        [total.lo, total.hi], recurrence(constant, batches), rtol=1e-9, atol=1e-7
    )


def test_a_moving_average_by_hand() -> None:
    result = moving(
        0.25, np.float32([[0, 4]]), np.float32([[-4, 8]]), np.float32([[2, 4]])
    )
    assert (result.lo.tolist(), result.hi.tolist()) == (
        [-0.25],
        [4.75],
    )  # 0, -1, -0.25 and 4, 5, 4.75


@given(streams(reals))
@EXAMPLES
def test_what_is_no_number_is_left_out_and_counted(batches: list[Rows]) -> None:
    dirty = [
        np.concatenate([batch, np.full_like(batch, odd)], axis=1)
        for batch in batches
        for odd in (np.nan, np.inf)
    ]
    clean = [batch for batch in batches for _ in range(2)]
    for ours, plain in (
        (extremes(*dirty), extremes(*clean)),
        (moving(0.5, *dirty), moving(0.5, *clean)),
    ):
        np.testing.assert_array_equal(ours.lo, plain.lo)
        np.testing.assert_array_equal(ours.hi, plain.hi)
        assert ours.nonfinite == sum(batch.size for batch in clean)


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "empty", [Extremes(), MovingExtremes(0.5)], ids=["all", "moving"]
)
def test_bounds_that_are_no_numbers(
    empty: Extremes | MovingExtremes, odd: float
) -> None:
    """A batch known by its extremes alone may hold NaN."""
    statistic = type(empty)(*vars(empty).values())
    statistic.observe_bounds(np.array([-1.0, -2.0]), np.array([1.0, 2.0]))
    statistic.observe_bounds(np.array([odd, -2.0]), np.array([odd, 2.0]))
    assert statistic.nonfinite == 1
    assert np.isfinite(statistic.lo).all() and np.isfinite(statistic.hi).all()
    assert (statistic.lo[1], statistic.hi[1]) == (-2, 2)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_an_empty_batch_is_no_batch(rows: int) -> None:
    empty, some = np.zeros((rows, 0), np.float32), np.ones((rows, 2), np.float32)
    assert extremes(empty).lo.size == moving(0.5, empty).lo.size == 0
    assert (
        extremes(empty, some, empty).lo.tolist()
        == moving(0.5, empty, some, empty).lo.tolist()
        == [1] * rows
    )


def test_a_first_batch_of_nan_starts_no_average() -> None:
    """Zeros in its place would weigh as much as any batch."""
    nan, some = np.full((1, 2), np.nan, np.float32), np.float32([[-1, 2]])
    result = moving(0.01, nan, some, nan)
    assert (result.lo.tolist(), result.hi.tolist(), result.nonfinite) == ([-1], [2], 4)


def test_merging_leaves_the_other_as_it_was() -> None:
    for make in (Extremes, lambda: MovingExtremes(0.5)):
        one, other = make(), make()
        other.observe(np.float32([[1, 2]]))
        one.merge(other)
        one.observe(np.float32([[-5, 5]]))
        assert (other.lo.tolist(), other.hi.tolist()) == ([1], [2])
