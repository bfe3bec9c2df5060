"""Hadamard matrices and rotations: orthogonal, even, reproducible."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quark_onnx.kernels.hadamard import Rotation, balanced, hadamard, random_hadamard

#: Sylvester; Paley's first construction (12, 20, 24, 28, 44, 108, 140), his second (36, 76, 148),
#: Williamson (52, 172).
ORDERS = (1, 2, 4, 8, 64, 12, 20, 24, 28, 44, 108, 140, 36, 76, 148, 52, 172, 96, 160)


@pytest.mark.parametrize("order", ORDERS)
def test_the_rows_of_a_hadamard_matrix_are_signs_and_orthogonal(order: int) -> None:
    matrix = hadamard(order)
    np.testing.assert_allclose(np.abs(matrix), order**-0.5, rtol=1e-12)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(order), atol=1e-12)
    assert (matrix[0] > 0).all()


@pytest.mark.parametrize("order", [0, 3, 6, 10, 18])
def test_there_is_none_of_other_orders(order: int) -> None:
    with pytest.raises(ValueError, match=f"order {order}"):
        hadamard(order)


@pytest.mark.parametrize("make", [random_hadamard, balanced])
@given(size=st.integers(1, 200), seed=st.integers(0, 5))
def test_a_rotation_is_orthogonal_and_turns_as_its_matrix_does(
    make: type[Rotation], size: int, seed: int
) -> None:
    rotation = make(size, seed)
    matrix = rotation.matrix()
    assert rotation.size == size
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=1e-10)
    x = np.random.default_rng(1).normal(size=(2, size, 3))
    np.testing.assert_allclose(
        rotation.turn(x, axis=1), np.einsum("aib,ij->ajb", x, matrix), atol=1e-10
    )
    twice = np.concatenate([x, x], axis=1)
    turned = rotation.turn(x, axis=1)
    np.testing.assert_allclose(
        rotation.turn(twice, axis=1), np.concatenate([turned, turned], axis=1)
    )
    if make is balanced:
        np.testing.assert_allclose(matrix.sum(axis=1), 1, atol=1e-10)
        np.testing.assert_allclose(matrix.sum(axis=0), 1, atol=1e-10)


@pytest.mark.parametrize("size", [64, 256, 384, 768, 1024, 4096, 5120, 11008])
def test_an_outlier_is_spread_over_all_channels(size: int) -> None:
    outlier = np.zeros(size)
    outlier[size // 3] = 1
    np.testing.assert_allclose(
        np.abs(random_hadamard(size, 0).turn(outlier)), size**-0.5
    )
    assert np.abs(balanced(size, 0).turn(outlier)).max() < 3.5 * size**-0.5


@pytest.mark.parametrize("size", [16, 64, 256, 1024, 4096])
def test_where_there_are_bent_functions_a_balanced_rotation_is_a_hadamard_matrix(
    size: int,
) -> None:
    unit = np.eye(size)[5]
    np.testing.assert_allclose(np.abs(balanced(size, 0).turn(unit)), size**-0.5)


def test_the_seed_decides() -> None:
    one, same, other = (random_hadamard(96, seed).matrix() for seed in (1, 1, 2))
    assert np.array_equal(one, same) and not np.array_equal(one, other)
    one, same, other = (balanced(96, seed).matrix() for seed in (1, 1, 2))
    assert np.array_equal(one, same) and not np.array_equal(one, other)
