"""Tabulate the uses of number formats, as testable configurations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quark_onnx.config.checks import instance_of
from quark_onnx.config.qconfig import QConfig
from quark_onnx.config.spec import QuantizationSpec
from quark_onnx.dtypes import INT16, DType, Float4, Integer, Scaled

# The least block size of MatMulNBits.
_BLOCK = 16


@dataclass(frozen=True)
class Way:
    """A use of a number format.

    Attributes:
        name: heading of the column.
        about: its meaning.
        make: returns the configuration for a format.
        takes: returns whether a format is supported.
    """

    name: str
    about: str
    make: Callable[[DType], QConfig]
    takes: Callable[[Any], bool]

    def config(self, row: DType) -> QConfig | None:
        """Return the configuration for a format; None if unsupported."""
        return self.make(row) if self.takes(row) else None


#: Weights for tests of activation formats. Not float: onnxruntime 1.31 converts the float weights
#: of a Conv or Gemm between Q/DQ pairs to int8 when it loads a model.
_FINE = QuantizationSpec(INT16, per_channel=True)
_is_format, _is_scaled, _is_integer = (
    instance_of(kind) for kind in (DType, Scaled, Integer)
)

WAYS = (
    Way(
        "activations",
        "activations, their scale if any measured on data",
        lambda row: QConfig(
            QuantizationSpec(row), _FINE if row.scaled else QuantizationSpec(row)
        ),
        _is_format,
    ),
    Way(
        "channels",
        "activations with a scale for each channel",
        lambda row: QConfig(QuantizationSpec(row, per_channel=True), _FINE),
        _is_scaled,
    ),
    Way(
        "zero point",
        "activations with a free zero point",
        lambda row: QConfig(QuantizationSpec(row, symmetric=False), _FINE),
        _is_integer,
    ),
    Way(
        "dynamic",
        "activations with a scale that each run computes",
        lambda row: QConfig(
            QuantizationSpec(row, symmetric=False, dynamic=True), form="operators"
        ),
        # DynamicQuantizeLinear of ONNX writes no other type.
        lambda row: row.name == "uint8",
    ),
    Way(
        "weights",
        "weights, with one scale for a tensor if any",
        lambda row: QConfig(None, QuantizationSpec(row)),
        _is_format,
    ),
    Way(
        "per channel",
        "weights with a scale for each output channel",
        lambda row: QConfig(None, QuantizationSpec(row, per_channel=True)),
        _is_scaled,
    ),
    Way(
        "blocks",
        "weights with a scale for each block along the sum",
        lambda row: QConfig(None, QuantizationSpec(row, block_size=_BLOCK)),
        # ``QuantizationSpec`` refuses blocks of other formats.
        lambda row: _is_scaled(row) and not isinstance(row, Float4) and row.bits < 32,
    ),
    Way(
        "MatMulNBits",
        "weights in blocks that one operator unpacks",
        lambda row: QConfig(
            None, QuantizationSpec(row, block_size=_BLOCK), form="operators"
        ),
        lambda row: _is_integer(row) and row.bits in (2, 4, 8),
    ),
    Way(
        "pow2",
        "both with scales that are powers of two",
        lambda row: QConfig(
            QuantizationSpec(row, pow2=True), QuantizationSpec(row, pow2=True)
        ),
        _is_scaled,
    ),
    Way(
        "half scales",
        "both with scales stored in float16",
        lambda row: QConfig(
            QuantizationSpec(row, scale="float16"),
            QuantizationSpec(row, scale="float16", per_channel=True),
        ),
        # The scales of wider codes are too small for float16.
        lambda row: _is_scaled(row) and row.bits <= 16,
    ),
)
