"""Packed codes against loops over single bits and against ONNX's own tensors of 2 and 4 bits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from quark_onnx.common.errors import ConfigError, PlanError
from quark_onnx.kernels.packing import BITS, pack
from tests.nbits import codes_in


@st.composite
def codes(draw: st.DrawFn, bits: int) -> NDArray[Any]:
    kind = draw(st.sampled_from(["uint8", "int16", "uint32", "int64"]))
    shape = draw(array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=9))
    return draw(arrays(kind, shape, elements=st.integers(0, 2**bits - 1)))


def bit_by_bit(row: list[int], bits: int) -> list[int]:
    stream = [(code >> bit) & 1 for code in row for bit in range(bits)]
    stream += [0] * (-len(stream) % 8)
    return [
        sum(stream[start + bit] << bit for bit in range(8))
        for start in range(0, len(stream), 8)
    ]


@pytest.mark.parametrize("bits", BITS)
def test_the_first_code_is_in_the_lowest_bits(bits: int) -> None:
    @settings(deadline=None, derandomize=True, max_examples=60)
    @given(codes(bits))
    def check(x: NDArray[Any]) -> None:
        before = x.copy()
        packed = pack(x, bits)
        assert packed.dtype == np.uint8
        assert packed.shape == (*x.shape[:-1], math.ceil(x.shape[-1] * bits / 8))
        rows = (
            packed.reshape(x[..., 0].size if x.shape[-1] else 0, -1)
            if packed.size
            else packed.reshape(0, 0)
        )
        for row, line in (
            zip(rows, x.reshape(len(rows), -1), strict=True) if packed.size else ()
        ):
            assert row.tolist() == bit_by_bit(line.tolist(), bits)
        np.testing.assert_array_equal(x, before)

    check()


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 64])
def test_the_bytes_are_those_of_an_onnx_tensor(bits: int, count: int) -> None:
    name = f"UINT{bits}"
    if not hasattr(TensorProto, name):
        pytest.skip(f"this onnx has no {name}")
    x = np.random.default_rng(count).integers(0, 2**bits, count)
    raw = pack(x, bits).tobytes()
    tensor = helper.make_tensor("x", getattr(TensorProto, name), [count], raw, raw=True)
    np.testing.assert_array_equal(numpy_helper.to_array(tensor).astype(np.int64), x)
    stored = numpy_helper.from_array(numpy_helper.to_array(tensor)).raw_data
    assert stored == raw


@pytest.mark.parametrize("bits", BITS)
def test_long_rows_views_and_read_only_arrays(bits: int) -> None:
    x = np.random.default_rng(0).integers(0, 2**bits, (3, 400_001)).astype(np.uint8)
    x.flags.writeable = False
    packed = pack(x[:, ::-1], bits)
    np.testing.assert_array_equal(codes_in(packed, bits)[:, :400_001], x[:, ::-1])
    assert packed.flags.writeable
    assert not np.shares_memory(pack(x, 8), x)


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="3 bits"):
        pack(np.array([1]), 3)
    for code in (-1, 16):
        with pytest.raises(PlanError, match="do not fit 4 bits"):
            pack(np.array([code]), 4)
    with pytest.raises(PlanError, match="float64"):
        pack(np.array([1.0]), 4)
    with pytest.raises(PlanError, match="shape"):
        pack(np.array(1), 4)
