"""GPTQ: never worse than rounding to nearest, and what the paper's algorithm gives, column by
column.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from quark_onnx.common.registry import DTYPES
from quark_onnx.kernels.gptq import Compensation, error_of, gptq
from quark_onnx.kernels.levels import Levels

Doubles = NDArray[np.float64]
EXAMPLES = settings(deadline=None, derandomize=True, max_examples=40)


def grid(shape: tuple[int, ...], step: float = 0.2, codes: int = 7) -> Levels:
    scale = np.full(shape, step, np.float32)
    return Levels(
        scale,
        np.zeros(0, np.float32),
        np.full_like(scale, -codes),
        np.full_like(scale, codes),
    )


def published(
    weight: Doubles,
    gram: Doubles,
    lattice: Levels,
    damping: float,
    order: NDArray[np.int64],
) -> Doubles:
    """Frantar et al. 2023, section 3, as Optimal Brain Quantization writes it: one column at a
    time, and the inverse of what is left of the matrix after each.
    """
    count = gram.shape[0]
    left = weight.astype(np.float64).copy()
    damped = gram + np.eye(count) * (damping * np.diagonal(gram).mean())
    damped[np.diagonal(gram) == 0, np.diagonal(gram) == 0] += np.diagonal(gram).mean()
    found = np.empty_like(left)
    for done, column in enumerate(order):
        rest = order[done:]
        inverse = np.linalg.inv(damped[np.ix_(rest, rest)])
        scale, least, greatest = (
            v[0, :, column] for v in (lattice.scale, lattice.least, lattice.greatest)
        )
        found[:, column] = (
            np.clip(np.rint(left[:, column] / scale), least, greatest) * scale
        )
        error = (left[:, column] - found[:, column]) / inverse[0, 0]
        left[:, rest] -= error[:, None] * inverse[0]
    return found


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("inputs", [3, 12, 150], ids=lambda n: f"{n} inputs")
def test_it_is_the_published_algorithm(inputs: int, act_order: bool) -> None:
    random = np.random.default_rng(inputs)
    rows = (
        random.normal(size=(4 * inputs, inputs))
        @ random.normal(size=(inputs, inputs))
        * random.uniform(0.1, 3, inputs)
    )
    gram = rows.T @ rows
    weight = random.normal(size=(1, 5, inputs)) * 0.5
    lattice = grid(weight.shape)
    order = (
        np.argsort(-np.diagonal(gram), kind="stable")
        if act_order
        else np.arange(inputs)
    )
    expected = published(weight[0], gram, lattice, 0.01, order)
    nearest = lattice.nearest(weight)[0]

    def loss(found: Doubles) -> Doubles:
        return np.square(rows @ (found - weight[0]).T).sum(axis=0)

    best = np.where((loss(expected) < loss(nearest))[:, None], expected, nearest)
    found = gptq(weight, gram[None], lattice, damping=0.01, act_order=act_order)[0]
    np.testing.assert_allclose(
        loss(found), loss(best), rtol=1e-5 if inputs < 100 else 0.05
    )
    if inputs < 100:
        np.testing.assert_allclose(found, best, atol=1e-6)
    assert loss(found).sum() < 0.8 * loss(nearest).sum() or inputs == 3


KINDS = [
    "full",
    "deficient",
    "dead columns",
    "one sample",
    "zero",
    "one alive",
    "huge values",
    "tiny values",
    "twins",
]


def rows_of(kind: str, random: np.random.Generator, count: int, inputs: int) -> Doubles:
    rows = random.normal(size=(count, inputs))
    if kind == "deficient":
        rows = rows[:, :1] @ rows[:1]
    if kind == "dead columns":
        rows[:, ::2] = 0
    if kind == "one sample":
        rows = rows[:1]
    if kind == "one alive":
        rows[:, 1:] = 0
    if kind == "twins":
        rows[:, 1::2] = rows[:, : inputs // 2 * 2 : 2]
    return rows * {"zero": 0, "huge values": 1e15, "tiny values": 1e-18}.get(kind, 1)


@pytest.mark.parametrize("kind", KINDS)
@given(
    seed=st.integers(0, 10**6),
    inputs=st.integers(1, 20),
    damping=st.sampled_from([0.0, 1e-8, 0.01, 1.0]),
    act_order=st.booleans(),
    groups=st.integers(1, 3),
)
@EXAMPLES
def test_it_is_never_worse_than_the_nearest(
    kind: str, seed: int, inputs: int, damping: float, act_order: bool, groups: int
) -> None:
    random = np.random.default_rng(seed)
    rows = np.stack([rows_of(kind, random, 30, inputs) for _ in range(groups)])
    gram = rows.swapaxes(1, 2) @ rows
    weight = random.normal(size=(groups, 4, inputs))
    lattice = grid(weight.shape, 0.3, 3)
    found, nearest = (
        gptq(weight, gram, lattice, damping=damping, act_order=act_order),
        lattice.nearest(weight),
    )
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found, lattice.nearest(found.astype(np.float64)))
    loss, least = (
        np.square(rows @ (v - weight).swapaxes(1, 2)).sum(axis=1)
        for v in (found, nearest)
    )
    assert (loss <= least * (1 + 1e-9) + np.abs(rows).max(initial=0) ** 2 * 1e-12).all()
    untouched = ~rows.any(axis=1)
    np.testing.assert_array_equal(
        found[..., untouched.all(axis=0)], nearest[..., untouched.all(axis=0)]
    )


@pytest.mark.parametrize("name", ["fp8e4m3", "fp4e2m1"])
def test_levels_of_uneven_steps(name: str) -> None:
    random = np.random.default_rng(0)
    rows = random.normal(size=(200, 16)) @ random.normal(size=(16, 16))
    gram, weight = (rows.T @ rows)[None], random.normal(size=(1, 6, 16))
    scale, zero = (
        np.full(weight.shape, 0.4, np.float32),
        np.zeros(weight.shape, np.float32),
    )
    levels = DTYPES[name].levels  # type: ignore[attr-defined]
    lattice = Levels(scale, levels, zero, zero)
    found = gptq(weight, gram, lattice)
    assert np.isin(found, (levels * np.float32(0.4)).astype(np.float32)).all()
    assert (
        error_of(weight, found, gram).sum()
        < 0.9 * error_of(weight, lattice.nearest(weight), gram).sum()
    )


def test_a_wide_layer_takes_its_batches_of_columns_together() -> None:
    """Columns behind a batch are moved once for all of it.

    The result is that of one column at a time.
    """
    random = np.random.default_rng(1)
    inputs = 700
    rows = random.normal(size=(2 * inputs, inputs)) * random.uniform(0.1, 2, inputs)
    gram, weight = (rows.T @ rows)[None], random.normal(size=(1, 3, inputs))
    lattice = grid(weight.shape, 0.5, 3)
    found = gptq(weight, gram, lattice)
    assert (
        error_of(weight, found, gram)
        < 0.9 * error_of(weight, lattice.nearest(weight), gram)
    ).all()


def test_one_matrix_serves_many_lattices() -> None:
    random = np.random.default_rng(5)
    x = random.normal(size=(200, 12))
    gram, weight = (x.T @ x)[None], random.normal(size=(1, 6, 12))
    compensation = Compensation(gram)
    for step in (0.1, 0.2, 0.5):
        lattice = grid(weight.shape, step)
        found, error = compensation.rounded(weight, lattice)
        np.testing.assert_array_equal(found, gptq(weight, gram, lattice))
        np.testing.assert_allclose(
            error, np.square(x @ (found[0] - weight[0]).T).sum(axis=0)[None], rtol=1e-9
        )
