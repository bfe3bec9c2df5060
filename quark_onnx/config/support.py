"""Tabulate the uses of number formats, as testable configurations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
        config: returns the configuration for a format; None if unsupported.
    """

    name: str
    about: str
    config: Callable[[DType], QConfig | None]


#: Weights for tests of activation formats. Not float: onnxruntime 1.31 converts the float weights
#: of a Conv or Gemm between Q/DQ pairs to int8 when it loads a model.
_FINE = QuantizationSpec(INT16, per_channel=True)


def _activations(row: DType) -> QConfig:
    """Configure activations with one scale, or with none for formats without scales."""
    return QConfig(
        QuantizationSpec(row), _FINE if row.scaled else QuantizationSpec(row)
    )


def _channels(row: DType) -> QConfig | None:
    """Configure activations with a scale per channel; None for a format without a scale."""
    if isinstance(row, Scaled):
        return QConfig(QuantizationSpec(row, per_channel=True), _FINE)
    return None


def _asymmetric(row: DType) -> QConfig | None:
    """Configure activations with a free zero point, which only integers have."""
    if isinstance(row, Integer):
        return QConfig(QuantizationSpec(row, symmetric=False), _FINE)
    return None


def _pow2(row: DType) -> QConfig | None:
    """Configure power-of-two scales; None for a format without a scale."""
    if isinstance(row, Scaled):
        return QConfig(
            QuantizationSpec(row, pow2=True), QuantizationSpec(row, pow2=True)
        )
    return None


def _half_scales(row: DType) -> QConfig | None:
    """Configure scales stored in float16; None for formats of more than 16 bits."""
    # The scales of wider codes are too small for float16.
    if not isinstance(row, Scaled) or row.bits > 16:
        return None
    spec = QuantizationSpec(row, scale="float16")
    return QConfig(spec, spec.with_(per_channel=True))


def _per_channel(row: DType) -> QConfig | None:
    """Configure weights with a scale per output channel; None for a format without a scale."""
    if isinstance(row, Scaled):
        return QConfig(None, QuantizationSpec(row, per_channel=True))
    return None


def _blocks(row: DType) -> QConfig | None:
    """Configure weights in blocks; None for formats that define their blocks or have none."""
    # ``QuantizationSpec`` refuses blocks of these formats.
    if not isinstance(row, Scaled) or isinstance(row, Float4) or row.bits >= 32:
        return None
    return QConfig(None, QuantizationSpec(row, block_size=_BLOCK))


def _nbits(row: DType) -> QConfig | None:
    """Configure MatMulNBits, for 2, 4 and 8 bits."""
    if not isinstance(row, Integer) or row.bits not in (2, 4, 8):
        return None
    return QConfig(None, QuantizationSpec(row, block_size=_BLOCK), form="operators")


def _dynamic(row: DType) -> QConfig | None:
    """Configure DynamicQuantizeLinear, for uint8."""
    # DynamicQuantizeLinear of ONNX writes no other type.
    if row.name != "uint8":
        return None
    return QConfig(
        QuantizationSpec(row, symmetric=False, dynamic=True), form="operators"
    )


WAYS = (
    Way(
        "activations", "activations, their scale if any measured on data", _activations
    ),
    Way("channels", "activations with a scale for each channel", _channels),
    Way("zero point", "activations with a free zero point", _asymmetric),
    Way("dynamic", "activations with a scale that each run computes", _dynamic),
    Way(
        "weights",
        "weights, with one scale for a tensor if any",
        lambda row: QConfig(None, QuantizationSpec(row)),
    ),
    Way("per channel", "weights with a scale for each output channel", _per_channel),
    Way("blocks", "weights with a scale for each block along the sum", _blocks),
    Way("MatMulNBits", "weights in blocks that one operator unpacks", _nbits),
    Way("pow2", "both with scales that are powers of two", _pow2),
    Way("half scales", "both with scales stored in float16", _half_scales),
)
