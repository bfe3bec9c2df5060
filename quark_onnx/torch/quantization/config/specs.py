"""Helpers that build a QTensorConfig: one class per number format and granularity.

The classes, and their defaults of ``symmetric`` and ``is_dynamic``, are those of AMD Quark.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from quark_onnx.config.checks import require_known
from quark_onnx.torch.quantization.config.fields import Fields
from quark_onnx.torch.quantization.config.tensor import QTensorConfig
from quark_onnx.torch.quantization.config.type import (
    RoundType,
    ScaleType,
    ZeroPointType,
)
from quark_onnx.torch.quantization.observer.observer import METHODS

__all__ = [
    "AmdFP4Spec",
    "BFP16Spec",
    "Bfloat16Spec",
    "DataTypeSpec",
    "FP4PerGroupSpec",
    "FP6E2M3PerGroupSpec",
    "FP6E3M2PerGroupSpec",
    "FP8E4M3PerChannelSpec",
    "FP8E4M3PerGroupSpec",
    "FP8E4M3PerTensorSpec",
    "FP8E5M2PerChannelSpec",
    "FP8E5M2PerGroupSpec",
    "FP8E5M2PerTensorSpec",
    "FP8E5M3PerTensorSpec",
    "Float16Spec",
    "Int2PerGroupSpec",
    "Int3PerChannelSpec",
    "Int3PerGroupSpec",
    "Int4PerChannelSpec",
    "Int4PerGroupSpec",
    "Int4PerTensorSpec",
    "Int8PerChannelSpec",
    "Int8PerGroupSpec",
    "Int8PerTensorSpec",
    "MX6Spec",
    "MX9Spec",
    "OCP_MXFP4Spec",
    "OCP_MXFP6E2M3Spec",
    "OCP_MXFP6E3M2Spec",
    "OCP_MXFP8E4M3Spec",
    "OCP_MXFP8E5M2Spec",
    "OCP_MXINT8Spec",
    "OCP_MXSpec",
    "ProgressiveSpec",
    "QATSpec",
    "ScaleQuantSpec",
    "TQTSpec",
    "Uint4PerChannelSpec",
    "Uint4PerGroupSpec",
    "Uint4PerTensorSpec",
    "Uint8PerChannelSpec",
    "Uint8PerGroupSpec",
    "Uint8PerTensorSpec",
]


@dataclass
class DataTypeSpec(Fields):
    """Base of the helpers, with the fields of a QTensorConfig.

    Class keywords fix the values of fields.
    """

    # Values that the name of a class fixes, such as dtype and qscheme: they are no fields.
    FIXED: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, **fixed: Any) -> None:
        # A new dictionary: that of the base class serves other subclasses.
        cls.FIXED = cls.FIXED | fixed

    def to_quantization_spec(self) -> QTensorConfig:
        """Return the configuration of a tensor.

        Raises:
            ConfigError: a field has an unsupported value.

        >>> Int4PerGroupSpec(ch_axis=-1, group_size=128).to_quantization_spec().symmetric
        True
        """
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        # AMD's name for the size in the helpers of Microsoft's formats.
        if "block_size" in given:
            given["group_size"] = given.pop("block_size")
        if "observer_method" in given:
            method = given.pop("observer_method")
            require_known(method, METHODS, "observer_method is")
            given["observer_cls"] = METHODS[method]
        # A field wins over a fixed value of a base class.
        return QTensorConfig(**(self.FIXED | given))


@dataclass
class _PerTensor(DataTypeSpec, qscheme="per_tensor"):
    """Format with per-tensor scales."""

    observer_method: str = "min_max"
    symmetric: bool | None = True
    scale_type: ScaleType | str | None = "float"
    round_method: RoundType | str | None = "half_even"
    is_dynamic: bool | None = False


@dataclass
class _PerChannel(
    DataTypeSpec,
    qscheme="per_channel",
    observer_cls="PerChannelMinMaxObserver",
):
    """Format with per-channel scales of weights, or per-token scales of activations.

    The axis is ``ch_axis=0`` for weights and ``ch_axis=1`` for activations.
    """

    ch_axis: int
    symmetric: bool | None = True
    scale_type: ScaleType | str | None = "float"
    round_method: RoundType | str | None = "half_even"
    is_dynamic: bool | None = False


@dataclass
class _PerGroup(
    DataTypeSpec,
    qscheme="per_group",
    observer_cls="PerGroupMinMaxObserver",
):
    """Format with per-group scales along an axis; the last axis is ``ch_axis=-1``."""

    ch_axis: int
    group_size: int
    symmetric: bool | None = True
    is_dynamic: bool | None = False
    scale_type: ScaleType | str | None = "float"
    round_method: RoundType | str | None = "half_even"


class _Floats(
    DataTypeSpec,
    qscheme="per_group",
    observer_cls="PerBlockMXObserver",
    round_method="half_even",
    scale_type="float",
):
    """Float format with per-group scales along an axis."""


@dataclass
class _FloatPerGroup(_Floats):
    """Float format with per-group scales of a separate type."""

    ch_axis: int
    group_size: int
    scale_format: str | None = "float32"
    scale_calculation_mode: str | None = None
    is_dynamic: bool | None = True


@dataclass
class OCP_MXSpec(_Floats, group_size=32, scale_format="e8m0"):  # noqa: N801
    """Blocks of 32 with a shared exponent (OCP Microscaling Formats)."""

    ch_axis: int
    is_dynamic: bool | None = True
    scale_calculation_mode: str | None = "even"


@dataclass
class _SharedExponent(DataTypeSpec):
    """Blocks with a shared exponent, in Microsoft's formats."""

    ch_axis: int
    block_size: int
    scale_calculation_mode: str | None = "even"


class Int4PerTensorSpec(_PerTensor, dtype="int4"):
    """Signed 4-bit integers with per-tensor scales."""


@dataclass
class Uint4PerTensorSpec(_PerTensor, dtype="uint4"):
    """Unsigned 4-bit integers with per-tensor scales."""

    symmetric: bool | None = False


class Int8PerTensorSpec(_PerTensor, dtype="int8"):
    """Signed 8-bit integers with per-tensor scales."""


@dataclass
class Uint8PerTensorSpec(_PerTensor, dtype="uint8"):
    """Unsigned 8-bit integers with per-tensor scales."""

    # AMD's default, although int8 per tensor is symmetric.
    symmetric: bool | None = False


@dataclass
class Int3PerChannelSpec(_PerChannel, dtype="int3"):
    """Signed 3-bit integers with per-channel scales; asymmetric by default."""

    symmetric: bool | None = False


class Int4PerChannelSpec(_PerChannel, dtype="int4"):
    """Signed 4-bit integers with per-channel scales."""


@dataclass
class Uint4PerChannelSpec(_PerChannel, dtype="uint4"):
    """Unsigned 4-bit integers with per-channel scales."""

    symmetric: bool | None = False
    is_dynamic: bool | None = None
    # The only helper with this field, as in AMD Quark.
    zero_point_type: ZeroPointType | str = "int32"


@dataclass
class Int8PerChannelSpec(_PerChannel, dtype="int8"):
    """Signed 8-bit integers with per-channel scales; asymmetric by default."""

    symmetric: bool | None = False


class Uint8PerChannelSpec(_PerChannel, dtype="uint8"):
    """Unsigned 8-bit integers with per-channel scales; symmetric by default."""


class Int2PerGroupSpec(_PerGroup, dtype="int2"):
    """Signed 2-bit integers with per-group scales."""


class Int3PerGroupSpec(_PerGroup, dtype="int3"):
    """Signed 3-bit integers with per-group scales."""


class Int4PerGroupSpec(_PerGroup, dtype="int4"):
    """Signed 4-bit integers with per-group scales."""


@dataclass
class Uint4PerGroupSpec(_PerGroup, dtype="uint4"):
    """Unsigned 4-bit integers with per-group scales."""

    symmetric: bool | None = False


class Int8PerGroupSpec(_PerGroup, dtype="int8"):
    """Signed 8-bit integers with per-group scales."""


@dataclass
class Uint8PerGroupSpec(_PerGroup, dtype="uint8"):
    """Unsigned 8-bit integers with per-group scales."""

    symmetric: bool | None = False


@dataclass
class FP8E4M3PerTensorSpec(
    DataTypeSpec,
    dtype="fp8_e4m3",
    qscheme="per_tensor",
    symmetric=True,
    round_method="half_even",
):
    """FP8 (E4M3) with per-tensor scales."""

    observer_method: str = "min_max"
    # AMD's default of this helper alone.
    scale_type: ScaleType | str | None = None
    is_dynamic: bool | None = False


class FP8E5M2PerTensorSpec(_PerTensor, dtype="fp8_e5m2"):
    """FP8 (E5M2) with per-tensor scales."""


class FP8E4M3PerChannelSpec(_PerChannel, dtype="fp8_e4m3"):
    """FP8 (E4M3) with per-channel or per-token scales."""


class FP8E5M2PerChannelSpec(_PerChannel, dtype="fp8_e5m2"):
    """FP8 (E5M2) with per-channel or per-token scales."""


class FP8E4M3PerGroupSpec(_FloatPerGroup, dtype="fp8_e4m3"):
    """FP8 (E4M3) with per-group scales."""


class FP8E5M2PerGroupSpec(_FloatPerGroup, dtype="fp8_e5m2"):
    """FP8 (E5M2) with per-group scales."""


class FP6E2M3PerGroupSpec(_FloatPerGroup, dtype="fp6_e2m3"):
    """FP6 (E2M3) with per-group scales."""


class FP6E3M2PerGroupSpec(_FloatPerGroup, dtype="fp6_e3m2"):
    """FP6 (E3M2) with per-group scales."""


@dataclass
class FP4PerGroupSpec(_FloatPerGroup, dtype="fp4"):
    """FP4 (E2M1) with per-group scales; with groups of 16, the first stage of NVFP4."""

    scale_type: ScaleType | str | None = "float"


class OCP_MXFP8E4M3Spec(OCP_MXSpec, dtype="fp8_e4m3"):  # noqa: N801
    """MXFP8 with elements E4M3."""


class OCP_MXFP8E5M2Spec(OCP_MXSpec, dtype="fp8_e5m2"):  # noqa: N801
    """MXFP8 with elements E5M2."""


class OCP_MXFP6E3M2Spec(OCP_MXSpec, dtype="fp6_e3m2"):  # noqa: N801
    """MXFP6 with elements E3M2."""


class OCP_MXFP6E2M3Spec(OCP_MXSpec, dtype="fp6_e2m3"):  # noqa: N801
    """MXFP6 with elements E2M3."""


class OCP_MXFP4Spec(OCP_MXSpec, dtype="fp4"):  # noqa: N801
    """MXFP4."""


class OCP_MXINT8Spec(OCP_MXSpec, dtype="mx", mx_element_dtype="int8"):  # noqa: N801
    """MXINT8."""


class MX6Spec(_SharedExponent, dtype="mx6"):
    """MX6: blocks of 16, with 6 bits per value on average."""


class MX9Spec(_SharedExponent, dtype="mx9"):
    """MX9: blocks of 16, with 9 bits per value on average."""


@dataclass
class BFP16Spec(DataTypeSpec, dtype="bfp16", group_size=8):
    """Block floating point: blocks of 8."""

    ch_axis: int
    scale_calculation_mode: str | None = "even"


class Float16Spec(DataTypeSpec, dtype="float16", observer_cls="PlaceholderObserver"):
    """Cast to float16."""


class Bfloat16Spec(DataTypeSpec, dtype="bfloat16", observer_cls="PlaceholderObserver"):
    """Cast to bfloat16."""


class FP8E5M3PerTensorSpec(FP8E4M3PerTensorSpec, dtype="fp8_e5m3"):
    """FP8 (E5M3) with per-tensor scales; not supported."""


@dataclass
class AmdFP4Spec(_Floats, dtype="fp4", scale_format="e5m3", scale_type="float8_e5m3"):
    """FP4 with an unsigned E5M3 scale (8 bits) per 16 or 32 values."""

    ch_axis: int
    group_size: int
    is_dynamic: bool | None = True


@dataclass
class QATSpec(Fields):
    """Settings of quantization-aware training; not supported."""


@dataclass
class TQTSpec(QATSpec):
    """Settings of trained thresholds; not supported."""

    threshold_init_meth: Any = None


@dataclass
class ProgressiveSpec(Fields):
    """Two stages, of which the second quantizes the codes of the first.

    Supported is per-tensor FP8 followed by per-channel int4 (the scheme int4_fp8).
    """

    first_stage: DataTypeSpec
    second_stage: DataTypeSpec

    def to_quantization_spec(self) -> list[QTensorConfig]:
        """Return the configurations of both stages."""
        return [
            self.first_stage.to_quantization_spec(),
            self.second_stage.to_quantization_spec(),
        ]


@dataclass
class ScaleQuantSpec(ProgressiveSpec):
    """Two stages, of which the second quantizes the scales of the first (NVFP4)."""

    def to_quantization_spec(self) -> list[QTensorConfig]:
        """Return the configurations of both stages."""
        first, second = super().to_quantization_spec()
        # Marks the stage whose values are the scales of the first one.
        second.is_scale_quant = True
        return [first, second]
