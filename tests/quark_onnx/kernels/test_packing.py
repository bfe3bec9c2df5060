"""Packed codes against loops over single bits and against ONNX's own tensors of 2 and 4 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from quark_onnx.common.errors import ConfigError, PlanError
from quark_onnx.kernels.packing import pack, packed_size, unpack

FORMATS = [(bits, signed) for bits in (2, 4, 8) for signed in (False, True)]


@st.composite
def codes(draw: st.DrawFn, bits: int, signed: bool) -> NDArray[Any]:
    least = -(2 ** (bits - 1)) if signed else 0
    kind = draw(
        st.sampled_from(
            ["int8", "int16", "int64"]
            if signed
            else ["uint8", "int16", "uint32", "int64"]
        )
    )
    shape = draw(array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=9))
    return draw(arrays(kind, shape, elements=st.integers(least, least + 2**bits - 1)))


def bit_by_bit(row: list[int], bits: int) -> list[int]:
    stream = [(code >> bit) & 1 for code in row for bit in range(bits)]
    stream += [0] * (-len(stream) % 8)
    return [
        sum(stream[start + bit] << bit for bit in range(8))
        for start in range(0, len(stream), 8)
    ]


@pytest.mark.parametrize(("bits", "signed"), FORMATS)
def test_the_first_code_is_in_the_lowest_bits_and_all_come_back(
    bits: int, signed: bool
) -> None:
    @settings(deadline=None, derandomize=True, max_examples=60)
    @given(codes(bits, signed))
    def check(x: NDArray[Any]) -> None:
        before = x.copy()
        packed = pack(x, bits, signed=signed)
        assert packed.dtype == np.uint8
        assert packed.shape == (*x.shape[:-1], packed_size(x.shape[-1], bits))
        rows = (
            packed.reshape(x[..., 0].size if x.shape[-1] else 0, -1)
            if packed.size
            else packed.reshape(0, 0)
        )
        for row, line in (
            zip(rows, x.reshape(len(rows), -1), strict=True) if packed.size else ()
        ):
            assert row.tolist() == bit_by_bit(line.tolist(), bits)
        back = unpack(packed, bits, x.shape[-1], signed=signed)
        assert back.dtype == (np.int8 if signed else np.uint8)
        np.testing.assert_array_equal(back, x)
        np.testing.assert_array_equal(x, before)

    check()


@pytest.mark.parametrize(
    ("bits", "signed"), [(bits, signed) for bits, signed in FORMATS if bits < 8]
)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 64])
def test_the_bytes_are_those_of_an_onnx_tensor(
    bits: int, signed: bool, count: int
) -> None:
    name = f"{'' if signed else 'U'}INT{bits}"
    if not hasattr(TensorProto, name):
        pytest.skip(f"this onnx has no {name}")
    least = -(2 ** (bits - 1)) if signed else 0
    x = np.random.default_rng(count).integers(least, least + 2**bits, count)
    raw = pack(x, bits, signed=signed).tobytes()
    tensor = helper.make_tensor("x", getattr(TensorProto, name), [count], raw, raw=True)
    np.testing.assert_array_equal(numpy_helper.to_array(tensor).astype(np.int64), x)
    stored = numpy_helper.from_array(numpy_helper.to_array(tensor)).raw_data
    assert stored == raw


@pytest.mark.parametrize(("bits", "signed"), FORMATS)
def test_long_rows_views_and_read_only_arrays(bits: int, signed: bool) -> None:
    least = -(2 ** (bits - 1)) if signed else 0
    x = (
        np.random.default_rng(0)
        .integers(least, least + 2**bits, (3, 400_001))
        .astype(np.int8 if signed else np.uint8)
    )
    x.flags.writeable = False
    packed = pack(x[:, ::-1], bits, signed=signed)
    packed.flags.writeable = False
    np.testing.assert_array_equal(
        unpack(packed, bits, 400_001, signed=signed), x[:, ::-1]
    )
    few = unpack(packed, bits, 5, signed=signed)
    np.testing.assert_array_equal(few, x[:, ::-1][:, :5])
    assert few.flags.writeable and not np.shares_memory(few, packed)
    assert not np.shares_memory(pack(x, 8, signed=signed), x)


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="3 bits"):
        pack(np.array([1]), 3)
    with pytest.raises(ConfigError, match="16 bits"):
        packed_size(1, 16)
    for signed, code in ((False, -1), (False, 16), (True, -9), (True, 8)):
        with pytest.raises(PlanError, match="do not fit 4 bits"):
            pack(np.array([code]), 4, signed=signed)
    with pytest.raises(PlanError, match="float64"):
        pack(np.array([1.0]), 4)
    with pytest.raises(PlanError, match="shape"):
        pack(np.array(1), 4)
    with pytest.raises(PlanError, match="5 codes of 4 bits need 3 bytes"):
        unpack(np.zeros(2, np.uint8), 4, 5)
    with pytest.raises(PlanError, match="int8"):
        unpack(np.zeros(2, np.int8), 4, 4)
