"""The table of integer formats against numpy and the ONNX operators."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

from quark_onnx.dtypes import DType
from quark_onnx.registry import DTYPES


@pytest.mark.parametrize("name", list(DTYPES))
def test_codes_are_those_of_numpy(name: str) -> None:
    row: DType = DTYPES[name]
    limits = np.iinfo(row.numpy)
    assert (row.qmin, row.qmax, row.bits, row.signed) == (limits.min, limits.max, limits.bits, limits.min < 0)
    assert helper.tensor_dtype_to_np_dtype(row.onnx) == row.numpy


@pytest.mark.parametrize("name", list(DTYPES))
def test_the_opset_is_the_first_that_knows_the_format(name: str) -> None:
    row: DType = DTYPES[name]

    def known(opset: int) -> bool:
        schema = onnx.defs.get_schema("DequantizeLinear", opset)
        return any(f"tensor({name})" in group.allowed_type_strs for group in schema.type_constraints)

    assert known(row.min_opset)
    assert row.min_opset == 10 or not known(row.min_opset - 1)
