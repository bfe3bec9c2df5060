"""What every registered calibrator promises, on every grid, per tensor and per row."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from calibrators import (
    CALIBRATORS,
    CalibrationError,
    Grid,
    MinMax,
    Percentile,
    Range,
    create,
    params_for,
)
from tests.cases import loop_over

EXAMPLES = settings(deadline=None, derandomize=True)

Rows = NDArray[np.float32]
GRIDS = {
    f"{name}{'' if symmetric else ' free'}{' pow2' if pow2 else ''}": Grid(
        *codes, symmetric=symmetric, pow2=pow2
    )
    for name, codes in {
        "int8": (-128, 127),
        "uint8": (0, 255),
        "int16": (-32768, 32767),
        "uint16": (0, 65535),
    }.items()
    for symmetric in (True, False)
    for pow2 in (False, True)
}
METHODS = {name: cls() for name, cls in CALIBRATORS.items()} | {
    "percentile 90": Percentile(90.0)
}
AVERAGES = {"moving average": MinMax(moving_average=True)}

TINY, HUGE = np.float32(1e-45), np.float32(3e38)
DATA: dict[str, Rows] = {
    "zeros": np.zeros((3, 7)),
    "constants": np.repeat([[3.0], [-0.25], [1e-3]], 50, axis=1),
    "one value": np.array([[5.0], [-7.0], [0.0]]),
    "denormal": np.array([[TINY, -TINY, 1e-40], [TINY, 0, 0], [-1e-39, 0, -TINY]]),
    "least normal": np.full((3, 4), np.finfo(np.float32).tiny),
    "huge": np.array([[HUGE, -HUGE, 1], [HUGE, HUGE, HUGE], [-HUGE, 0, -1]]),
    "tiny to huge": np.array([[TINY, 1e-20, 1, 1e20, HUGE]] * 3),
    "both signs": np.random.default_rng(0).standard_normal((3, 500)),
    "one sign": np.random.default_rng(1).exponential(size=(3, 500))
    * [[1], [-100], [1e-9]],
    "mostly zero": np.pad(
        np.random.default_rng(2).standard_normal((3, 20)), ((0, 0), (0, 500))
    ),
    "integers": np.random.default_rng(3).integers(-3, 200, (3, 300)),
}
DATA = {name: rows.astype(np.float32) for name, rows in DATA.items()}

every_method = pytest.mark.parametrize(
    "method", (METHODS | AVERAGES).values(), ids=METHODS | AVERAGES
)
mergeable_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
#: What counts values alone, and not in which sample they came.
POOLED = {
    name: method
    for name, method in METHODS.items()
    if not getattr(method, "by_sample", False)
}
pooling_method = pytest.mark.parametrize("method", POOLED.values(), ids=POOLED)
every_grid = loop_over("grid", GRIDS)
#: For properties of statistics, which know no grid: each type, zero point and kind of scale once.
some_grids = loop_over(
    "grid",
    {
        name: GRIDS[name]
        for name in ("int8", "uint8 free pow2", "int16 free", "uint16 pow2")
    },
)
grids = st.sampled_from(list(GRIDS.values()))
numbers = st.floats(-1e6, 1e6, width=32) | st.integers(-9, 9).map(float)
tables = arrays(
    np.float32, st.tuples(st.integers(1, 3), st.integers(1, 30)), elements=numbers
)


def statistic(method: Any, *batches: Rows) -> Any:
    result = method.statistic()
    for batch in batches:
        result.observe(batch)
    return result


def found(method: Any, grid: Grid, *batches: Rows) -> Range:
    result: Range = method.range(statistic(method, *batches), grid)
    return result


def check_equal(one: Range, other: Range) -> None:
    np.testing.assert_array_equal(one.lo, other.lo)
    np.testing.assert_array_equal(one.hi, other.hi)


# Ranges and scales


@every_grid
@every_method
def test_ranges_are_finite_and_scales_normal(method: Any, grid: Grid) -> None:
    for rows in DATA.values():
        for values in (rows, rows[1:2], rows.reshape(1, -1)):
            range_ = found(method, grid, values)
            assert range_.lo.shape == range_.hi.shape == (len(values),)
            assert range_.lo.dtype == range_.hi.dtype == np.float64
            assert np.isfinite([range_.lo, range_.hi]).all()
            assert (range_.lo <= 0).all() and (range_.hi >= 0).all()
            scale = params_for(range_, grid, axis=0).scale
            assert (np.isfinite(scale) & (scale >= np.finfo(np.float32).tiny)).all()


@every_grid
@every_method
def test_all_zeros_have_scale_one_and_all_else_an_extent(
    method: Any, grid: Grid
) -> None:
    for name, rows in DATA.items():
        range_ = found(method, grid, rows)
        dead = ~rows.any(axis=1)
        assert (params_for(range_, grid, axis=0).scale[dead] == 1).all(), name
        if method != Percentile(90.0):  # it may cut all that is not zero
            assert (range_.lo < range_.hi)[~dead].all(), name


@some_grids
@every_method
def test_rows_are_independent(method: Any, grid: Grid) -> None:
    for rows in DATA.values():
        alone = [found(method, grid, row[None]) for row in rows]
        lo, hi = (
            np.concatenate(ends)
            for ends in zip(*((one.lo, one.hi) for one in alone), strict=True)
        )
        check_equal(found(method, grid, rows), Range(lo, hi))


@some_grids
@every_method
def test_values_that_are_no_numbers_are_left_out_and_counted(
    method: Any, grid: Grid
) -> None:
    odd = np.tile(np.float32([np.nan, np.inf, -np.inf]), (3, 1))
    for rows in DATA.values():
        dirty = statistic(method, np.concatenate([odd, rows, odd], axis=1))
        assert dirty.nonfinite == 18
        check_equal(method.range(dirty, grid), found(method, grid, rows))


@some_grids
@every_method
def test_a_row_without_numbers_is_a_row_of_zeros(method: Any, grid: Grid) -> None:
    rows = DATA["both signs"].copy()
    rows[1] = np.nan
    zeros = np.nan_to_num(rows)
    check_equal(found(method, grid, rows), found(method, grid, zeros))


@every_grid
@every_method
def test_nothing_seen(method: Any, grid: Grid) -> None:
    empty, some = np.zeros((3, 0), np.float32), DATA["both signs"]
    nothing = statistic(method, empty, empty)
    assert nothing.lo.size == nothing.nonfinite == 0
    assert (
        method.range(nothing, grid).lo.shape
        == method.range(nothing, grid).hi.shape
        == (0,)
    )
    check_equal(found(method, grid, empty, some, empty), found(method, grid, some))


# Streams


@pooling_method
@given(grid=grids, rows=tables, data=st.data())
@EXAMPLES
def test_batches_are_one_batch_in_any_split(
    method: Any, grid: Grid, rows: Rows, data: st.DataObject
) -> None:
    columns = data.draw(st.permutations(range(rows.shape[1])))
    cuts = sorted(data.draw(st.lists(st.integers(0, rows.shape[1]), max_size=4)))
    check_equal(
        found(method, grid, *np.split(rows[:, columns], cuts, axis=1)),
        found(method, grid, rows),
    )


@mergeable_method
@given(grid=grids, rows=tables, data=st.data())
@EXAMPLES
def test_samples_may_come_in_any_order_and_merge(
    method: Any, grid: Grid, rows: Rows, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, rows.shape[1]), max_size=4)))
    batches = np.split(rows, cuts, axis=1)
    whole = found(method, grid, *batches)
    batches = data.draw(st.permutations(batches))
    check_equal(found(method, grid, *batches), whole)

    shards = [statistic(method, *batches[start::3]) for start in range(3)]
    total = method.statistic()
    for shard in shards:
        total.merge(pickle.loads(pickle.dumps(shard)))  # as it comes back from a worker
    check_equal(method.range(total, grid), whole)


@some_grids
@mergeable_method
def test_merging_is_symmetric(method: Any, grid: Grid) -> None:
    for rows in DATA.values():
        halves = rows[:, : rows.shape[1] // 2], rows[:, rows.shape[1] // 2 :]
        for one, other in (halves, halves[::-1]):
            total = statistic(method, one)
            total.merge(statistic(method, other))
            check_equal(method.range(total, grid), found(method, grid, *halves))


@every_method
@given(grid=grids, rows=tables, exponent=st.integers(-40, 40))
@EXAMPLES
def test_a_power_of_two_scales_the_range(
    method: Any, grid: Grid, rows: Rows, exponent: int
) -> None:
    rows = np.float32(
        np.round(rows * 2.0**10) / 2.0**10
    )  # normal numbers, also when scaled
    rows = rows[rows.any(axis=1)]
    once, scaled = (
        found(method, grid, rows),
        found(method, grid, np.ldexp(rows, exponent)),
    )
    check_equal(scaled, Range(np.ldexp(once.lo, exponent), np.ldexp(once.hi, exponent)))


@some_grids
@every_method
def test_reading_a_range_changes_nothing(method: Any, grid: Grid) -> None:
    for rows in DATA.values():
        seen = statistic(method, rows)
        before = pickle.dumps(seen)
        check_equal(method.range(seen, grid), method.range(seen, grid))
        assert pickle.dumps(seen) == before


@every_method
def test_the_memory_does_not_grow(method: Any) -> None:
    noise, seen = np.random.default_rng(4), method.statistic()
    magnitudes = 10.0 ** np.arange(-6, 7)
    batches = [
        np.float32(magnitude * noise.standard_normal((3, 1000)))
        for magnitude in magnitudes
    ]
    for batch in batches[
        ::-1
    ]:  # what tells samples apart by how far they reach has all its groups by then
        seen.observe(batch)
    sizes = []
    for batch in batches:
        seen.observe(batch)
        sizes.append(len(pickle.dumps(seen)))
    assert max(sizes) - min(sizes) < 500


# Values


@every_method
def test_a_calibrator_is_a_frozen_value(method: Any) -> None:
    assert dataclasses.is_dataclass(method)
    assert pickle.loads(pickle.dumps(method)) == method == dataclasses.replace(method)
    assert hash(pickle.loads(pickle.dumps(method))) == hash(method)
    for field in dataclasses.fields(method):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(method, field.name, getattr(method, field.name))


@pytest.mark.parametrize("name", CALIBRATORS)
def test_its_name_and_its_settings_make_it(name: str) -> None:
    method = create(name.upper())
    assert type(method) is CALIBRATORS[name] and method.name == name
    assert create(name, **dataclasses.asdict(method)) == method
    assert type(method).__doc__


def test_an_unknown_name_or_setting_finds_the_nearest() -> None:
    with pytest.raises(
        CalibrationError, match=r"unknown calibrator 'minmx'; did you mean 'minmax'\?"
    ):
        create("minmx")
    with pytest.raises(
        CalibrationError,
        match="unknown calibrator 'x'; known: best, entropy, layerwise_percentile, mean_minmax",
    ):
        create("x")
    with pytest.raises(
        CalibrationError,
        match=r"'percentile' has no setting 'percent'; did you mean 'percentile'\?",
    ):
        create("percentile", percent=99)
    with pytest.raises(
        CalibrationError, match="'nonoverflow' has no setting 'bins'; known: none"
    ):
        create("nonoverflow", bins=1)
