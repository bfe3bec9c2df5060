"""Specifications of tensors and layers, with AMD's names and defaults.

The order of parameters is AMD's too.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from calibrators import (
    Calibrator,
    Entropy,
    LayerwisePercentile,
    MinMax,
    MinMSE,
    NonOverflow,
    Percentile,
)
from quark_onnx.common.errors import ConfigError, nearest
from quark_onnx.common.registry import DTYPES
from quark_onnx.config import QuantizationSpec
from quark_onnx.config.checks import require
from quark_onnx.onnx import data_type as types
from quark_onnx.onnx.data_type import DataType, parse_data_type
from quark_onnx.onnxruntime_spelling.request import name_of


class CalibMethod(Enum):
    """Calibration methods for the range of a tensor."""

    MinMax = 0
    MinMSE = 1
    Percentile = 2
    Entropy = 3
    LayerwisePercentile = 4
    Distribution = 5


class ScaleType(Enum):
    """Permitted scales."""

    Float32 = 0
    PowerOf2 = 1
    Int16 = 2


class QuantGranularity(Enum):
    """Granularity of a tensor's scales."""

    Tensor = 0
    Channel = 1
    Group = 2


#: The calibrators for float scales.
_CALIBRATORS: dict[CalibMethod, type[Calibrator]] = {
    CalibMethod.MinMax: MinMax,
    CalibMethod.MinMSE: MinMSE,
    CalibMethod.Percentile: Percentile,
    CalibMethod.Entropy: Entropy,
    CalibMethod.LayerwisePercentile: LayerwisePercentile,
}
_ENUMERATIONS: dict[str, type[Enum]] = {
    "CalibMethod": CalibMethod,
    "ScaleType": ScaleType,
    "QuantGranularity": QuantGranularity,
}


def parse_enum(text: str) -> Any:
    """Return the member from a text of ``to_dict``, such as ``"ScaleType.Float32"``.

    Args:
        text: the text.

    Raises:
        ConfigError: the member does not exist.
    """
    # str() of a member: class and name.
    kind, _, name = text.partition(".")
    # A look-up in a table, as the text comes from a file: getattr on the module would find more.
    members = _ENUMERATIONS[kind].__members__ if kind in _ENUMERATIONS else {}
    if name not in members:
        choices = [
            str(member) for members in _ENUMERATIONS.values() for member in members
        ]
        raise ConfigError(f"unknown value {text!r}{nearest(text, choices)}")
    return members[name]


@dataclass(eq=False, repr=False)
class QTensorConfig:
    """Configuration of a tensor's quantization.

    Args:
        symmetric: True for a fixed zero point.
        scale_type: permitted scales.
        calibration_method: method for the range.
        quant_granularity: granularity of the scales; only weights can be per-channel.
        data_type: the number format.
    """

    symmetric: bool = True
    scale_type: ScaleType = ScaleType.Float32
    calibration_method: CalibMethod = CalibMethod.MinMax
    quant_granularity: QuantGranularity = QuantGranularity.Tensor
    data_type: DataType = types.Int8

    def set_symmetric(self, symmetric: bool) -> None:
        """Set a fixed or a variable zero point.

        Args:
            symmetric: True for a fixed zero point.
        """
        self.symmetric = symmetric

    def set_scale_type(self, scale_type: ScaleType) -> None:
        """Set the permitted scales.

        Args:
            scale_type: the permitted scales.
        """
        self.scale_type = scale_type

    def set_calibration_method(self, calibration_method: CalibMethod) -> None:
        """Set the calibration method.

        Args:
            calibration_method: method for the range.
        """
        self.calibration_method = calibration_method

    def set_quant_granularity(self, quant_granularity: QuantGranularity) -> None:
        """Set the granularity of the scales.

        Args:
            quant_granularity: the granularity.
        """
        self.quant_granularity = quant_granularity

    def set_data_type(self, data_type: DataType) -> None:
        """Set the number format.

        Args:
            data_type: the number format.
        """
        self.data_type = data_type

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values, for ``from_dict``."""
        return {
            "symmetric": self.symmetric,
            "scale_type": str(self.scale_type),
            "calibration_method": str(self.calibration_method),
            "quant_granularity": str(self.quant_granularity),
            "data_type": self.data_type.name,
        }

    @staticmethod
    def from_dict(d: dict[str, Any]) -> QTensorConfig:
        """Return the configuration from the values of ``to_dict``.

        Args:
            d: the values.

        Raises:
            ConfigError: a value is unknown.
        """
        return QTensorConfig(
            symmetric=d["symmetric"],
            scale_type=parse_enum(d["scale_type"]),
            calibration_method=parse_enum(d["calibration_method"]),
            quant_granularity=parse_enum(d["quant_granularity"]),
            data_type=parse_data_type(d["data_type"]),
        )

    def native(self, *, weight: bool) -> QuantizationSpec:
        """Translate the configuration into a specification of this package.

        Args:
            weight: True for a weight, which AMD calibrates by min-max unless MinMSE is set.

        Raises:
            ConfigError: this package does not support the combination.
        """
        # A format without a scale ignores symmetry, scale type and calibration method.
        dtype = DTYPES[self.data_type.dtype]
        if not dtype.scaled:
            return QuantizationSpec(dtype)
        pow2 = self.scale_type is ScaleType.PowerOf2
        return QuantizationSpec(
            dtype,
            symmetric=self.symmetric,
            pow2=pow2,
            per_channel=self._per_channel(weight),
            calibrator=self._calibrator(pow2, weight),
        )

    def _per_channel(self, weight: bool) -> bool:
        if self.quant_granularity is QuantGranularity.Group:
            raise ConfigError(
                "quant_granularity is Group, which AMD Quark ignores; for weights in"
                " groups take MATMUL_NBITS, or a QConfig of this package with"
                " QuantizationSpec(block_size=...)",
            )
        # Kernels multiply activations of all channels by one scale: per-channel is for weights.
        return weight and self.quant_granularity is QuantGranularity.Channel

    def _calibrator(self, pow2: bool, weight: bool) -> Calibrator:
        if self.scale_type is ScaleType.Int16:
            raise ConfigError(
                "scale_type is Int16; scales of the form M / 2^N are not written, take"
                " Float32",
            )
        method = self.calibration_method
        if method not in _CALIBRATORS:
            raise ConfigError(
                f"calibration_method is {name_of(method)}; it must be one of: "
                f"{', '.join(choice.name for choice in _CALIBRATORS)}",
            )
        # The power of two that clips nothing is the min-max of these scales; AMD calls it
        # NonOverflow.
        if pow2 and method is CalibMethod.MinMax:
            return NonOverflow()
        # AMD Quark uses min-max for weights with float scales unless the method is MinMSE.
        if weight and not pow2 and method is not CalibMethod.MinMSE:
            return MinMax()
        return _CALIBRATORS[method]()


class _Preset(QTensorConfig):
    """Specification with the defaults of a number format, which are class keywords."""

    _defaults: ClassVar[dict[str, Any]] = {
        "symmetric": True,
        "scale_type": ScaleType.Float32,
        "calibration_method": CalibMethod.MinMax,
    }

    def __init_subclass__(cls, **defaults: Any) -> None:
        # A new dictionary: that of the base class serves other subclasses.
        cls._defaults = cls._defaults | defaults

    def __init__(
        self,
        symmetric: bool | None = None,
        scale_type: ScaleType | None = None,
        calibration_method: CalibMethod | None = None,
        quant_granularity: QuantGranularity = QuantGranularity.Tensor,
        data_type: DataType | None = None,
    ) -> None:
        # None means the default of the format; False for ``symmetric`` is a value.
        super().__init__(
            self._defaults["symmetric"] if symmetric is None else symmetric,
            scale_type or self._defaults["scale_type"],
            calibration_method or self._defaults["calibration_method"],
            quant_granularity,
            data_type or self._defaults["data_type"],
        )


class _Integers(_Preset, calibration_method=CalibMethod.Percentile):
    """Integers of 8 bits or more."""


class Int4Spec(_Preset, data_type=types.Int4):
    """Signed 4-bit integers."""


class UInt4Spec(_Preset, data_type=types.UInt4, symmetric=False):
    """Unsigned 4-bit integers."""


class Int8Spec(_Integers, data_type=types.Int8):
    """Signed 8-bit integers."""


class XInt8Spec(
    Int8Spec, scale_type=ScaleType.PowerOf2, calibration_method=CalibMethod.MinMSE
):
    """Signed 8-bit integers with power-of-two scales."""


class UInt8Spec(_Integers, data_type=types.UInt8, symmetric=False):
    """Unsigned 8-bit integers."""


class Int16Spec(_Integers, data_type=types.Int16):
    """Signed 16-bit integers."""


class UInt16Spec(_Integers, data_type=types.UInt16, symmetric=False):
    """Unsigned 16-bit integers."""


class Int32Spec(_Integers, data_type=types.Int32):
    """Signed 32-bit integers."""


class UInt32Spec(_Integers, data_type=types.UInt32, symmetric=False):
    """Unsigned 32-bit integers."""


class Float16Spec(_Preset, data_type=types.Float16):
    """IEEE half precision."""


class BFloat16Spec(_Preset, data_type=types.BFloat16):
    """bfloat16."""


class BFP16Spec(_Preset, data_type=types.BFP16):
    """Block floating point with 8-bit mantissas and a shared exponent for 8 values."""


class MX4Spec(_Preset, data_type=types.MX4):
    """Microexponents of 4 bits."""


class MX6Spec(_Preset, data_type=types.MX6):
    """Microexponents of 6 bits."""


class MX9Spec(_Preset, data_type=types.MX9):
    """Microexponents of 9 bits."""


class MXFP8E5M2Spec(_Preset, data_type=types.MXFP8E5M2):
    """OCP microscaling with FP8 E5M2 elements."""


class MXFP8E4M3Spec(_Preset, data_type=types.MXFP8E4M3):
    """OCP microscaling with FP8 E4M3 elements."""


class MXFP6E3M2Spec(_Preset, data_type=types.MXFP6E3M2):
    """OCP microscaling with FP6 E3M2 elements."""


class MXFP6E2M3Spec(_Preset, data_type=types.MXFP6E2M3):
    """OCP microscaling with FP6 E2M3 elements."""


class MXFP4E2M1Spec(_Preset, data_type=types.MXFP4E2M1):
    """OCP microscaling with FP4 E2M1 elements."""


class MXInt8Spec(_Preset, data_type=types.MXInt8):
    """OCP microscaling with 8-bit integer elements."""


class QLayerConfig:
    """Configuration of the tensors of a layer.

    Args:
        input_tensors: activations that the layer reads.
        activation: older name of ``input_tensors``.
        weight: weights of the layer.
        bias: biases of the layer.
        output_tensors: activations that the layer computes.

    Raises:
        ConfigError: both ``activation`` and ``input_tensors`` are given, or a part is no
            ``QTensorConfig``.
    """

    def __init__(
        self,
        input_tensors: QTensorConfig | None = None,
        activation: QTensorConfig | None = None,
        weight: QTensorConfig | None = None,
        bias: QTensorConfig | None = None,
        output_tensors: QTensorConfig | None = None,
    ) -> None:
        if activation is not None and input_tensors is not None:
            raise ConfigError(
                "a QLayerConfig has both activation and input_tensors; give"
                " input_tensors alone",
            )
        # The older name stays readable as a property, and is never written.
        self.input_tensors = activation if input_tensors is None else input_tensors
        self.weight = weight
        self.bias = bias
        self.output_tensors = output_tensors
        for name, spec in vars(self).items():
            require(
                isinstance(spec, QTensorConfig | None),
                f"{name} of a QLayerConfig",
                spec,
                "a QTensorConfig, such as Int8Spec()",
            )

    @property
    def activation(self) -> QTensorConfig | None:
        """Return ``input_tensors``, by its older name."""
        return self.input_tensors

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values, for ``from_dict``."""
        parts = {
            name: getattr(self, name)
            for name in ("input_tensors", "weight", "bias", "output_tensors")
        }
        return {
            name: None if spec is None else spec.to_dict()
            for name, spec in parts.items()
        }

    @staticmethod
    def from_dict(d: dict[str, Any]) -> QLayerConfig:
        """Return the configuration from the values of ``to_dict``.

        Args:
            d: the values.
        """
        return QLayerConfig(
            **{
                name: None if spec is None else QTensorConfig.from_dict(spec)
                for name, spec in d.items()
            },
        )

    def native_activation(self) -> QuantizationSpec | None:
        """Translate the activations' specification; return None for float activations.

        Raises:
            ConfigError: inputs and outputs have different specifications; a plan has a single
                decision for each tensor.
        """
        # Of a layer's inputs and outputs, those that have a specification.
        specs = [
            spec.native(weight=False)
            for spec in (self.input_tensors, self.output_tensors)
            if spec is not None
        ]
        if len(specs) == 2 and specs[0] != specs[1]:
            raise ConfigError(
                f"input_tensors ({specs[0]}) and output_tensors ({specs[1]}) differ;"
                " configure the layers around apart",
            )
        return specs[0] if specs else None

    def native_weight(self) -> QuantizationSpec | None:
        """Translate the weights' specification; return None for float weights."""
        if self.weight is None:
            return None
        return self.weight.native(weight=True)
