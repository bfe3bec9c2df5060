"""The table of formats against numpy, ml_dtypes and the ONNX operators."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from calibrators import QParams
from quark_onnx.common.registry import DTYPES
from quark_onnx.dtypes import (
    FP8E4M3,
    FP8E5M2,
    INT4,
    DType,
    Float4,
    Half,
    Integer,
    Minifloat,
    Scaled,
)

ROWS: list[DType] = [DTYPES[name] for name in DTYPES]
SCALED = [row for row in ROWS if isinstance(row, Scaled)]


@pytest.mark.parametrize(
    "row", [row for row in ROWS if isinstance(row, Integer)], ids=str
)
def test_integers_use_every_code_of_their_bits(row: Integer) -> None:
    assert row.qmax - row.qmin == 2**row.bits - 1
    assert row.qmin == (-(2 ** (row.bits - 1)) if row.signed else 0)
    assert row.signed == (not row.name.startswith("u"))
    assert helper.tensor_dtype_to_np_dtype(row.onnx) == row.numpy


@pytest.mark.parametrize("row", SCALED, ids=str)
def test_the_opset_is_the_first_that_knows_the_format(row: Scaled) -> None:
    def known(opset: int, operator: str) -> bool:
        schema = onnx.defs.get_schema(operator, opset)
        codes = (
            schema.inputs[0] if operator == "DequantizeLinear" else schema.outputs[0]
        )
        stored = TensorProto.DataType.Name(row.onnx).lower()
        if isinstance(row, Float4):  # its codes are stored as uint4
            stored = row.name
        return f"tensor({stored})" in codes.types

    assert row.read == known(row.min_opset, "DequantizeLinear")
    assert (
        row.min_opset == 10
        or not row.read
        or not known(row.min_opset - 1, "DequantizeLinear")
    )
    assert row.emitted == known(row.min_opset, "QuantizeLinear")


@pytest.mark.parametrize(
    "row", [row for row in ROWS if isinstance(row, Minifloat | Half)], ids=str
)
def test_the_greatest_float(row: Minifloat | Half) -> None:
    import ml_dtypes

    largest = row.qmax if isinstance(row, Minifloat) else row.largest
    kind = ml_dtypes.float4_e2m1fn if isinstance(row, Float4) else row.numpy
    assert float(ml_dtypes.finfo(kind).max) == largest


@pytest.mark.parametrize("row", [FP8E4M3, FP8E5M2], ids=str)
def test_small_floats_saturate_and_round_to_even(row: Minifloat) -> None:
    params = QParams(np.float32(2.0), np.int64(0))
    # the greatest codes are 416 and 448, or 49152 and 57344; half-way between two the even mantissa
    # wins
    tie, even = {FP8E4M3: (432, 448), FP8E5M2: (53248, 49152)}[row]
    x = np.float32([0, 1e30, -1e30, 2 * row.qmax, 2 * tie, -2 * tie, -0.0])
    codes = row.encode(x, params, row.grid(symmetric=True)).astype(np.float32)
    assert codes.tolist() == [0, row.qmax, -row.qmax, row.qmax, even, -even, 0]
    assert np.signbit(codes[-1])


def test_codes_of_less_than_a_byte_come_back() -> None:
    x = np.float32([-8, -3, 0, 3, 7, 9])
    codes = INT4.encode(
        x, QParams(np.float32(1), np.int64(0)), INT4.grid(symmetric=True)
    )
    assert codes.dtype == INT4.numpy
    assert codes.astype(int).tolist() == [-8, -3, 0, 3, 7, 7]
