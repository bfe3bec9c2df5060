"""The values that a weight may take are those that QuantizeLinear and DequantizeLinear give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from calibrators import QParams, dequantize, quantize
from quark_onnx.common.registry import DTYPES
from quark_onnx.dtypes import Integer, Minifloat
from quark_onnx.kernels.levels import Levels

EXAMPLES = settings(deadline=None, derandomize=True, max_examples=40)
INTEGERS = {name: row for name in DTYPES if isinstance(row := DTYPES[name], Integer)}
FLOATS = {name: row for name in DTYPES if isinstance(row := DTYPES[name], Minifloat)}


def params_of(
    random: np.random.Generator, shape: tuple[int, int], kind: str, row: Any
) -> QParams:
    """Scales, some of them negative, and zero points, for a tensor, each row of it, or blocks of
    four.
    """
    wanted: tuple[int, ...] = {
        "tensor": (),
        "channel": shape[:1],
        "block": (shape[0], shape[1] // 4),
    }[kind]
    scale = np.asarray(
        10 ** random.uniform(-3, 1, wanted) * random.choice([-1, 1], wanted), np.float32
    )
    zero = random.integers(
        max(row.qmin, -100), min(row.qmax, 100), wanted, endpoint=True
    )
    if isinstance(row, Minifloat):
        scale, zero = np.abs(scale), np.zeros_like(zero)
    axis, block = {"tensor": (None, 0), "channel": (0, 0), "block": (1, 4)}[kind]
    return QParams(scale, np.asarray(zero, np.int64), axis, block)


def lattice_of(params: QParams, shape: tuple[int, int], row: Any) -> Levels:
    scale, zero = (
        np.broadcast_to(v, shape).astype(np.float32) for v in params.spread(shape)
    )
    if isinstance(row, Minifloat):
        return Levels(scale, row.levels, zero, zero)
    return Levels(scale, np.zeros(0, np.float32), row.qmin - zero, row.qmax - zero)


def weights(
    random: np.random.Generator, shape: tuple[int, int], scale: NDArray[Any], row: Any
) -> NDArray[np.float64]:
    """Values in reach and beyond it, and exactly between codes."""
    span = min(float(row.qmax) - row.qmin, 300.0)
    units = random.uniform(-span, span, shape)
    units = np.where(random.random(shape) < 0.3, np.rint(units) + 0.5, units)
    return (units * scale).astype(np.float32).astype(np.float64)


@pytest.mark.parametrize("kind", ["tensor", "channel", "block"])
@pytest.mark.parametrize("name", INTEGERS)
@given(seed=st.integers(0, 10**6))
@EXAMPLES
def test_integers(name: str, kind: str, seed: int) -> None:
    random, row, shape = np.random.default_rng(seed), INTEGERS[name], (3, 8)
    params = params_of(random, shape, kind, row)
    lattice = lattice_of(params, shape, row)
    weight = weights(random, shape, lattice.scale, row)
    grid = row.grid(symmetric=False)
    codes = quantize(weight, params, grid)
    found = lattice.nearest(weight)
    np.testing.assert_array_equal(found, dequantize(codes, params))
    below, above = lattice.neighbours(weight)
    if row.bits <= 16:
        for value in (found, below, above):
            again = quantize(value, params, grid)
            np.testing.assert_array_equal(dequantize(again, params), value)
        steps = quantize(above, params, grid) - quantize(below, params, grid)
        assert (steps == 1).all()
        inside = (codes > row.qmin) & (codes < row.qmax)
        low, high = np.minimum(below, above), np.maximum(below, above)
        near = np.abs(lattice.scale) * 1e-4
        assert ((low <= weight + near) & (weight <= high + near))[inside].all()
        assert ((found == below) | (found == above)).all()


@pytest.mark.parametrize("kind", ["tensor", "channel"])
@pytest.mark.parametrize("name", FLOATS)
@given(seed=st.integers(0, 10**6))
@EXAMPLES
def test_floats(name: str, kind: str, seed: int) -> None:
    random, row, shape = np.random.default_rng(seed), FLOATS[name], (3, 8)
    params = params_of(random, shape, kind, row)
    lattice = lattice_of(params, shape, row)
    levels = row.levels
    assert levels[-1] == row.qmax and levels[0] == row.qmin and 0 in levels
    picked = random.integers(0, len(levels) - 1, shape)
    middle = (
        levels[picked] + levels[picked + 1]
    ) / 2  # halfway, where only the rule for ties decides
    units = np.where(
        random.random(shape) < 0.5, middle, random.uniform(-1.2, 1.2, shape) * row.qmax
    )
    weight = (units * lattice.scale).astype(np.float32).astype(np.float64)
    codes = row.encode(weight, params, row.grid(symmetric=True))
    values = codes.astype(np.uint8).view(row.element_dtype) if row.bits == 4 else codes
    np.testing.assert_array_equal(
        lattice.nearest(weight), values.astype(np.float32) * lattice.scale
    )
    below, above = lattice.neighbours(weight)
    found = lattice.nearest(weight)
    assert ((found == below) | (found == above)).all()
    assert (below < above).all()
