"""A sample of vectors that depends on neither order nor split."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from calibrators.sampled import Sampled, Samples


def of(*parts: np.ndarray, limit: int = 16) -> Sampled:
    statistic = Sampled(limit=limit)
    for part in parts:
        statistic.observe(part.T)
    return statistic


@given(seed=st.integers(0, 100), cuts=st.lists(st.integers(0, 60), max_size=4))
def test_order_and_split_do_not_matter(seed: int, cuts: list[int]) -> None:
    random = np.random.default_rng(seed)
    data = random.normal(size=(60, 5)).astype(np.float32)
    whole = of(data)
    shuffled = data[random.permutation(60)]
    merged = of()
    for part in np.split(shuffled, sorted(cuts)):
        merged.merge(of(part))
    assert np.array_equal(whole.vectors, merged.vectors)
    in_turn = of(*np.split(shuffled, sorted(cuts)))
    assert np.array_equal(whole.vectors, in_turn.vectors)
    assert np.array_equal(whole.lo, data.min(axis=0)) and np.array_equal(
        merged.hi, data.max(axis=0)
    )
    assert len(whole.vectors) == 16
    assert {row.tobytes() for row in whole.vectors} <= {row.tobytes() for row in data}


def test_a_vector_counts_once_and_few_are_all_kept() -> None:
    data = np.float32([[1, 2], [3, 4], [1, 2]])
    assert sorted(of(data, data).vectors.tolist()) == [[1, 2], [3, 4]]
    assert Samples(limit=3).statistic().limit == 3


def test_wide_vectors_are_kept_in_bounded_memory() -> None:
    data = np.random.default_rng(0).normal(size=(100, 1 << 14)).astype(np.float32)
    assert of(data, limit=256).vectors.shape == (16, 1 << 14)


def test_the_first_hashes_do_not_stay_in_memory() -> None:
    data = np.random.default_rng(0).normal(size=(10_000, 2)).astype(np.float32)
    marks = of(data).marks
    held = marks if marks.base is None else marks.base
    assert held.nbytes < 1_000
