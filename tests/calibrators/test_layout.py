"""Tensors as rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes

from calibrators import layout, rows
from calibrators.layout import parts_of_rows


@given(array_shapes(max_dims=4, min_side=0, max_side=4), st.data())
@settings(deadline=None, derandomize=True)
def test_a_row_is_the_slice_at_its_index(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    array = np.arange(np.prod(shape)).reshape(shape)
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    table = rows(array, axis)
    assert table.ndim == 2 and len(table) == shape[axis]
    for index, row in enumerate(table):
        np.testing.assert_array_equal(row, array.take(index, axis).reshape(-1))


@pytest.mark.parametrize("shape", [(), (1,), (5,), (0,), (2, 0, 3), (2, 3, 4)])
def test_a_tensor_is_one_row(shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    np.testing.assert_array_equal(rows(array), array.reshape(1, -1))


def test_no_channel_has_no_row() -> None:
    assert rows(np.zeros((4, 0, 3)), axis=1).shape == (0, 0)
    assert rows(np.zeros((4, 5, 0)), axis=1).shape == (5, 0)


def test_an_axis_that_is_not_there() -> None:
    with pytest.raises(np.exceptions.AxisError):
        rows(np.zeros((2, 3)), axis=2)


def test_the_element_type_stays() -> None:
    assert rows(np.zeros((2, 3), np.float16), axis=1).dtype == np.float16


@pytest.mark.parametrize("shape", [(7,), (40, 3), (3, 40), (5, 33, 2), (2, 3, 4, 9)])
def test_parts_have_the_rows_of_the_whole(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "PART", 1)
    monkeypatch.setattr(layout, "LEAST_STEP", 2)
    array = np.arange(np.prod(shape)).reshape(shape)
    for axis in range(-array.ndim, array.ndim):
        parts = parts_of_rows(array, axis, 4)
        found = np.concatenate([rows(part, axis, 4) for part in parts])
        np.testing.assert_array_equal(found, rows(array, axis, 4))
