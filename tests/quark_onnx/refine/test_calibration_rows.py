"""Rows of several samples: all are there once, mixed, and none that holds something that is no
number.
"""

from __future__ import annotations

import numpy as np
import pytest

from quark_onnx.refine.calibration_rows import Mix, Room


def filled(
    shape: tuple[int, int, int], counts: list[int], *, most: int
) -> tuple[Mix, np.ndarray, np.ndarray]:
    """A mix, and what was put into it: the inputs and targets of all samples in turn."""
    random = np.random.default_rng(0)
    groups, outputs, inputs = shape
    mix, given = Mix(shape, len(counts), most, Room()), list[list[np.ndarray]]()
    for at, count in enumerate(counts):
        given.append(
            [
                random.normal(size=(groups, count, size)).astype(np.float32)
                for size in (inputs, outputs)
            ]
        )
        mix.put(at, *[part[None] for part in given[-1]])
    x, y = (np.concatenate(parts, axis=1) for parts in zip(*given, strict=True))
    return mix, x, y


SHAPES = pytest.mark.parametrize(
    "shape", [(1, 4, 5), (3, 2, 5), (6, 1, 9), (1, 1, 3)], ids=str
)


@SHAPES
@pytest.mark.parametrize("counts", [[4, 4, 4], [4, 1, 0, 3], [2]], ids=str)
def test_every_row_of_every_sample_is_there_once(
    shape: tuple[int, int, int], counts: list[int]
) -> None:
    mix, x, y = filled(shape, counts, most=max(counts))
    rows = mix.mixed()
    assert rows.inputs.shape == x.shape and rows.targets.shape == y.shape

    def lines(a: np.ndarray, b: np.ndarray) -> list[bytes]:
        return [
            np.concatenate([a[:, row], b[:, row]], axis=1).tobytes()
            for row in range(a.shape[1])
        ]

    assert sorted(lines(rows.inputs, rows.targets)) == sorted(lines(x, y))


@SHAPES
def test_rows_of_the_samples_take_turns(shape: tuple[int, int, int]) -> None:
    mix, x, _ = filled(shape, [4, 4, 4], most=4)
    turns = x.reshape(shape[0], 3, 4, shape[2]).swapaxes(1, 2).reshape(x.shape)
    np.testing.assert_array_equal(mix.mixed().inputs, turns)


@SHAPES
def test_several_samples_at_once_are_what_they_are_one_by_one(
    shape: tuple[int, int, int],
) -> None:
    mix, x, y = filled(shape, [4, 4, 4, 4], most=4)
    one_by_one = mix.mixed()
    mix = Mix(shape, 4, 4, Room())
    parts = [array.reshape(shape[0], 4, 4, -1).swapaxes(0, 1) for array in (x, y)]
    for at, count in ((1, 3), (0, 1)):
        mix.put(at, *[part[at : at + count] for part in parts])
    rows = mix.mixed()
    np.testing.assert_array_equal(rows.inputs, one_by_one.inputs)
    np.testing.assert_array_equal(rows.targets, one_by_one.targets)


@SHAPES
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_with_something_that_is_no_number_is_left_out(
    shape: tuple[int, int, int], bad: float
) -> None:
    mix, x, y = filled(shape, [3, 3], most=3)
    for part, place in ((x, 1), (y, 2)):
        part[-1, place, 0] = bad
    mix.put(0, x[None, :, :3], y[None, :, :3])
    rows = mix.mixed()
    assert (
        len(rows) == 4
        and np.isfinite(rows.inputs).all()
        and np.isfinite(rows.targets).all()
    )


def test_numbers_whose_sum_is_none_are_numbers() -> None:
    mix, x, y = filled((1, 2, 2), [3], most=3)
    mix.put(0, np.full_like(x, 3e38)[None], y[None])
    assert len(mix.mixed()) == 3


def test_rooms_are_used_again() -> None:
    room = Room()
    first, second = room.empty((2, 3), (4,))
    first[:], second[:] = 1, 2
    assert (first == 1).all() and first.shape == (2, 3) and second.shape == (4,)
    [other] = room.empty((10,))
    assert other.tolist() == [1] * 6 + [2] * 4
    assert [array.shape for array in room.empty((100, 2), (0, 3))] == [(100, 2), (0, 3)]
