"""Enumerations of AMD Quark's configuration: number formats, scales and modes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from quark_onnx.common.absent import (  # noqa: F401  names of AMD Quark
    BFP16,
    FP4,
    FP6_E2M3,
    FP6_E3M2,
    FP8_E4M3,
    FP8_E5M2,
    FP8_E5M3,
    MX,
    MX6,
    MX9,
    BFloat16,
    Float16,
    Int2,
    Int3,
    Int4,
    Int8,
    Int16,
    Int32,
    TQTThresholdInitMeth,
    UInt2,
    UInt4,
    UInt8,
    UInt16,
    UInt32,
)


class Dtype(Enum):
    """Number formats; uint3 is specific to this package."""

    int8 = "int8"
    uint8 = "uint8"
    int16 = "int16"
    uint16 = "uint16"
    int32 = "int32"
    int4 = "int4"
    uint4 = "uint4"
    int3 = "int3"
    uint3 = "uint3"
    int2 = "int2"
    uint2 = "uint2"
    bfloat16 = "bfloat16"
    float16 = "float16"
    fp8_e5m2 = "fp8_e5m2"
    fp8_e4m3 = "fp8_e4m3"
    fp8_e5m3 = "fp8_e5m3"
    fp6_e3m2 = "fp6_e3m2"
    fp6_e2m3 = "fp6_e2m3"
    fp4 = "fp4"
    mx = "mx"
    mx6 = "mx6"
    mx9 = "mx9"
    bfp16 = "bfp16"


class QSchemeType(Enum):
    """Granularity of scales."""

    per_tensor = "per_tensor"
    per_channel = "per_channel"
    per_group = "per_group"
    per_block = "per_block"


class ScaleType(Enum):
    """Types of scales: ``float`` is the type of the weights, ``pof2`` powers of two."""

    float = "float"
    pof2 = "pof2"
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"
    float8_e5m3 = "float8_e5m3"
    float8_e8m0fnu = "float8_e8m0fnu"


class RoundType(Enum):
    """Rounding modes."""

    # The numbers are AMD's.
    round = 2
    floor = 3
    half_even = 8


class ZeroPointType(Enum):
    """Types of zero points."""

    int32 = "int32"
    float32 = "float32"


class DeviceType(Enum):
    """Target devices of a layer."""

    CPU = "cpu"
    IPU = "ipu"


class QuantizationMode(Enum):
    """Quantization modes: replacing layers of a module, or nodes of a graph."""

    eager_mode = 1
    fx_graph_mode = 2


class QuantFlow(Enum):
    """Quantization flows, by the part of a model that is in memory."""

    standard = 1
    file2file = 2
    per_block = 3


@dataclass(frozen=True)
class RuntimeOptions:
    """Options of AMD's kernels, without effect here.

    Attributes:
        native_linear_mode: "auto", or the name of a kernel.
        use_preshuffle: whether weights are shuffled for a kernel.
        svdquant_overlap_streams: whether to use two GPU streams.
    """

    # Names of GPU kernels; results are the same without them.
    native_linear_mode: str = "auto"
    use_preshuffle: bool = False
    svdquant_overlap_streams: bool = False
