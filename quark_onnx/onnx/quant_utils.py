"""Enumerations of AMD Quark for ONNX, with AMD's names and numbers.

onnxruntime's enumerations are accepted too: members are compared by name.
"""

from __future__ import annotations

from enum import Enum

from quark_onnx.onnxruntime_spelling.names import NamedEnum

#: Domain and version of AMD's custom operators.
COP_DOMAIN = "com.amd.quark"
COP_VERSION = 1


class QuantizationMode(NamedEnum):
    """Kinds of operators that onnxruntime writes."""

    IntegerOps = 0
    QLinearOps = 1


class ExtendedQuantType(NamedEnum):
    """Number formats beyond those of onnxruntime's ``QuantType``."""

    QInt8 = 1
    QUInt8 = 2
    QInt16 = 3
    QUInt16 = 4
    QInt32 = 5
    QUInt32 = 6
    QFloat16 = 7
    QBFloat16 = 8
    # Block floating point and microexponents; the extra option BFPAttributes says which.
    QBFP = 9
    # OCP microscaling; the extra option MXAttributes says the element type.
    QMX = 10


#: The name before release 0.9.
VitisQuantType = ExtendedQuantType


class ExtendedQuantFormat(NamedEnum):
    """Output formats with AMD's own Q/DQ operators."""

    QOperator = 0
    QDQ = 1


class VitisQuantFormat(NamedEnum):
    """Output formats before release 0.9."""

    QDQ = 2
    FixNeuron = 3


class PowerOfTwoMethod(Enum):
    """Calibration methods for power-of-two scales."""

    NonOverflow = 0
    MinMSE = 1


class Int16Method(Enum):
    """Calibration methods for scales of the form M / 2^N."""

    MinMax = 0


class LayerWiseMethod(Enum):
    """Calibration methods with a percentile for each tensor."""

    LayerWisePercentile = 0


class ExtendedCalibrationMethod(Enum):
    """Calibration methods for weights with float scales."""

    MinMSE = 0
