"""Operators on integers with power-of-two scales."""

from quark_onnx.npu.integers.call import NodeCall, Operator, Real, Value, exact
from quark_onnx.npu.integers.fixed import Fixed, Rounding, rounded
from quark_onnx.npu.integers.moving import MOVING
from quark_onnx.npu.integers.pointwise import POINTWISE
from quark_onnx.npu.integers.pools import POOLS
from quark_onnx.npu.integers.products import PRODUCTS

__all__ = [
    "OPERATORS",
    "Fixed",
    "NodeCall",
    "Operator",
    "Real",
    "Rounding",
    "Value",
    "exact",
    "rounded",
]

#: Every operator that can be simulated.
OPERATORS: dict[str, Operator] = {**PRODUCTS, **POOLS, **POINTWISE, **MOVING}
