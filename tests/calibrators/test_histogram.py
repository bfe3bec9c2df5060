"""The streaming histogram against numpy's at the same edges, and against itself fed otherwise."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from numpy.typing import NDArray

from calibrators import Histogram
from calibrators.histogram import BINS

EXAMPLES = settings(deadline=None, derandomize=True)

Rows = NDArray[np.float32]
reals = st.floats(width=32, allow_nan=False, allow_infinity=False)
near = st.floats(-10, 10, width=32) | st.integers(-8, 8).map(float)
tables = arrays(
    np.float32, array_shapes(min_dims=2, max_dims=2, max_side=6), elements=reals | near
)
streams = st.integers(1, 3).flatmap(
    lambda count: st.lists(
        arrays(
            np.float32,
            st.tuples(st.just(count), st.integers(0, 5)),
            elements=reals | near,
        )
    )
)


def histogram(*batches: Rows) -> Histogram:
    result = Histogram()
    for batch in batches:
        result.observe(batch)
    return result


def check_same(one: Histogram, other: Histogram) -> None:
    for field in ("lo", "hi", "width", "positive", "negative", "nonfinite"):
        np.testing.assert_array_equal(
            getattr(one, field), getattr(other, field), err_msg=field
        )


def check_counts(result: Histogram, rows: Rows) -> None:
    """Bins that are closed towards zero, but for the one around zero, which is open on both sides."""  # noqa: E501
    for row, values in enumerate(rows.astype(np.float64)):
        edges = np.arange(BINS + 1) * result.width[row]
        above, below = (
            np.histogram(side, edges)[0]
            for side in (values[values >= 0], -values[values < 0])
        )
        above[0], below[0] = above[0] + below[0], 0
        np.testing.assert_array_equal(result.positive[row], above)
        np.testing.assert_array_equal(result.negative[row], below)
        assert (result.lo[row], result.hi[row]) == (values.min(), values.max())


@given(tables)
@example(
    np.float32([[1, 2, 4, 8, 16, 2048], [-1, -2, -4, -8, -16, -2048]])
)  # on the edges
@example(np.float32([[-1e-45, 1e-45, 0, -0.0], [3.4e38, -3.4e38, 1e-38, 1]]))
@EXAMPLES
def test_counts_as_numpy(rows: Rows) -> None:
    check_counts(histogram(rows), rows)


@pytest.mark.parametrize(
    "shape", [(1, 200_001), (3, 70_000), (5, 4096), (300, 1000), (2000, 9)]
)
def test_counts_as_numpy_whatever_the_shape(shape: tuple[int, int]) -> None:
    rows = np.random.default_rng(0).laplace(size=shape).astype(np.float32)
    result = histogram(rows)
    assert result.magnitude().sum() == rows.size
    some = [0, len(rows) // 2, len(rows) - 1]
    part = Histogram(
        *(
            getattr(result, field)[some]
            for field in ("lo", "hi", "exponent", "positive", "negative")
        )
    )
    check_counts(part, rows[some])


@pytest.mark.parametrize("count", [1, 4097, 65_536, 200_003])
def test_what_has_one_sign_is_counted_as_numpy_does(count: int) -> None:
    """After a ReLU, with a range that grows from part to part, and one that stays within that of
    the first.
    """
    grows = np.maximum(
        np.random.default_rng(0).normal(size=(1, count)), 0
    ) * np.linspace(1, 9, count)
    for rows in (
        grows,
        grows[:, ::-1],
        -grows,
        np.where(np.arange(count) % 3, grows, -grows),
    ):
        check_counts(histogram(rows.astype(np.float32)), rows.astype(np.float32))


@given(tables)
@EXAMPLES
def test_half_of_the_bins_are_in_use(rows: Rows) -> None:
    """The width is the least power of two with which all values fit."""
    result, largest = histogram(rows), np.abs(rows).max(axis=1).astype(np.float64)
    assert (np.frexp(result.width)[0] == 0.5).all()
    assert (largest < BINS * result.width).all()
    assert ((largest >= BINS // 2 * result.width) | (result.width == 2.0**-120)).all()


@given(streams, st.data())
@EXAMPLES
def test_batches_are_one_batch_in_any_order(
    batches: list[Rows], data: st.DataObject
) -> None:
    whole = histogram(np.concatenate(batches, axis=1)) if batches else histogram()
    check_same(histogram(*data.draw(st.permutations(batches))), whole)


@given(streams, st.data())
@EXAMPLES
def test_shards_merge_to_the_whole(batches: list[Rows], data: st.DataObject) -> None:
    owner = data.draw(
        st.lists(st.integers(0, 3), min_size=len(batches), max_size=len(batches))
    )
    total = Histogram()
    for shard in data.draw(st.permutations(range(4))):
        total.merge(
            histogram(
                *(
                    batch
                    for batch, mine in zip(batches, owner, strict=True)
                    if mine == shard
                )
            )
        )
    check_same(total, histogram(*batches))


@given(streams, streams)
@EXAMPLES
def test_merging_leaves_the_other_as_it_was(
    mine: list[Rows], theirs: list[Rows]
) -> None:
    ours, other = (
        histogram(*(rows[:1] for rows in mine)),
        histogram(*(rows[:1] for rows in theirs)),
    )
    before = pickle.dumps(other)
    ours.merge(other)
    ours.observe(np.float32([[1e30, -1]]))
    assert pickle.dumps(other) == before


@given(tables, st.integers(-60, 60))
@EXAMPLES
def test_a_power_of_two_moves_only_the_edges(rows: Rows, exponent: int) -> None:
    rows = np.float32(
        np.round(rows.clip(-1e9, 1e9) * 2.0**10) / 2.0**10
    )  # normal numbers, also when scaled
    small, large = histogram(rows), histogram(np.ldexp(rows, exponent))
    np.testing.assert_array_equal(large.positive, small.positive)
    np.testing.assert_array_equal(large.negative, small.negative)
    moved = np.ldexp(small.width, exponent)
    np.testing.assert_array_equal(
        large.width, np.where(rows.any(axis=1), moved, small.width)
    )


def test_the_range_grows_and_the_memory_does_not() -> None:
    noise, result = (
        np.random.default_rng(1).standard_normal(1000).astype(np.float32)[None],
        Histogram(),
    )
    sizes = []
    for magnitude in 10.0 ** np.arange(-6, 7):
        result.observe(np.float32(noise * magnitude))
        sizes.append(len(pickle.dumps(result)))
    assert max(sizes) - min(sizes) < 200
    assert result.positive.shape == result.negative.shape == (1, BINS)
    assert result.magnitude().sum() == 13_000
    check_counts(
        result,
        np.concatenate(
            [np.float32(noise * m) for m in 10.0 ** np.arange(-6, 7)], axis=1
        ),
    )


@pytest.mark.parametrize("columns", [8, 5000, 200_000])
@pytest.mark.parametrize("rows", [1, 3])
def test_what_is_no_number_is_left_out_and_counted(rows: int, columns: int) -> None:
    clean = np.random.default_rng(2).standard_normal((rows, columns)).astype(np.float32)
    odd = np.tile(np.float32([np.nan, np.inf, -np.inf]), (rows, 2))
    result = histogram(np.concatenate([clean[:, :3], odd, clean[:, 3:]], axis=1))
    assert result.nonfinite == 6 * rows
    check_counts(result, clean)


def test_nothing_but_nan() -> None:
    result = histogram(np.full((2, 3), np.nan, np.float32))
    assert result.nonfinite == 6 and not result.magnitude().any()
    assert result.lo.tolist() == result.hi.tolist() == [0, 0]
    result.observe(np.float32([[1, 2], [-3, 4]]))
    assert result.hi.tolist() == [2, 4] and result.magnitude().sum() == 4


@pytest.mark.parametrize(
    "empty", [np.zeros((0, 0)), np.zeros((1, 0)), np.zeros((4, 0))], ids=str
)
def test_nothing_leaves_no_trace(empty: Rows) -> None:
    assert histogram(np.float32(empty)).lo.size == 0


@given(tables)
@EXAMPLES
def test_signed_bins(rows: Rows) -> None:
    """Each value is counted at a centre not more than a bin away from it; the centres rise."""
    result = histogram(rows)
    for row, values in enumerate(np.sort(rows.astype(np.float64), axis=1)):
        centres, counts = result.signed(row)
        assert (np.diff(centres) >= 0).all() and (counts > 0).all()
        spread = np.repeat(centres, counts.astype(int))
        assert (np.abs(spread - values) <= result.width[row]).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_floats(dtype: type) -> None:
    values = np.random.default_rng(3).standard_normal((2, 500)).astype(np.float16)
    check_same(histogram(values.astype(dtype)), histogram(values.astype(np.float32)))


def test_the_values_are_not_changed() -> None:
    rows = np.float32([[1, np.nan, -3]])
    rows.setflags(write=False)
    histogram(rows)
    assert rows[0, 0] == 1 and rows[0, 2] == -3
