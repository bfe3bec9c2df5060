"""Helpers that make a QTensorConfig: one class for each number format and granularity, as AMD Quark
has them.

Which of them are symmetric or dynamic by default follows AMD Quark, too, and no rule.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from quark_onnx.errors import ConfigError, nearest
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
    """Base of the helpers: fields are those of the QTensorConfig.

    Keywords of a class are fields that it fixes.
    """

    FIXED: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, **fixed: Any) -> None:
        cls.FIXED = cls.FIXED | fixed

    def to_quantization_spec(self) -> QTensorConfig:
        """The configuration of a tensor.

        Raises:
            ConfigError: a field holds what it cannot.

        >>> Int4PerGroupSpec(ch_axis=-1, group_size=128).to_quantization_spec().symmetric
        True
        """
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        if "block_size" in given:
            given["group_size"] = given.pop("block_size")
        if "observer_method" in given:
            method = given.pop("observer_method")
            if method not in METHODS:
                raise ConfigError(
                    f"observer_method is {method!r}{nearest(method, METHODS)}",
                )
            given["observer_cls"] = METHODS[method]
        return QTensorConfig(**(self.FIXED | given))


@dataclass
class _PerTensor(DataTypeSpec, qscheme="per_tensor"):
    """One scale for a tensor."""

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
    """One scale for a channel of a weight (``ch_axis=0``) or a token of an activation
    (``ch_axis=1``).
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
    """One scale for so many values along an axis; the last one is ``ch_axis=-1``."""

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
    """Floats with one scale for so many values along an axis."""


@dataclass
class _FloatPerGroup(_Floats):
    """Floats with scales of a type of their own."""

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
    """Blocks with a shared exponent, of Microsoft's formats."""

    ch_axis: int
    block_size: int
    scale_calculation_mode: str | None = "even"


class Int4PerTensorSpec(_PerTensor, dtype="int4"):
    """4-bit integers, one scale for a tensor."""


@dataclass
class Uint4PerTensorSpec(_PerTensor, dtype="uint4"):
    """Unsigned 4-bit integers, one scale for a tensor."""

    symmetric: bool | None = False


class Int8PerTensorSpec(_PerTensor, dtype="int8"):
    """8-bit integers, one scale for a tensor."""


@dataclass
class Uint8PerTensorSpec(_PerTensor, dtype="uint8"):
    """Unsigned 8-bit integers, one scale for a tensor."""

    symmetric: bool | None = False


@dataclass
class Int3PerChannelSpec(_PerChannel, dtype="int3"):
    """3-bit integers, one scale for a channel; asymmetric unless told otherwise."""

    symmetric: bool | None = False


class Int4PerChannelSpec(_PerChannel, dtype="int4"):
    """4-bit integers, one scale for a channel."""


@dataclass
class Uint4PerChannelSpec(_PerChannel, dtype="uint4"):
    """Unsigned 4-bit integers, one scale for a channel."""

    symmetric: bool | None = False
    is_dynamic: bool | None = None
    zero_point_type: ZeroPointType | str = "int32"


@dataclass
class Int8PerChannelSpec(_PerChannel, dtype="int8"):
    """8-bit integers, one scale for a channel; asymmetric unless told otherwise."""

    symmetric: bool | None = False


class Uint8PerChannelSpec(_PerChannel, dtype="uint8"):
    """Unsigned 8-bit integers, one scale for a channel; symmetric unless told otherwise."""


class Int2PerGroupSpec(_PerGroup, dtype="int2"):
    """2-bit integers in groups."""


class Int3PerGroupSpec(_PerGroup, dtype="int3"):
    """3-bit integers in groups."""


class Int4PerGroupSpec(_PerGroup, dtype="int4"):
    """4-bit integers in groups."""


@dataclass
class Uint4PerGroupSpec(_PerGroup, dtype="uint4"):
    """Unsigned 4-bit integers in groups."""

    symmetric: bool | None = False


class Int8PerGroupSpec(_PerGroup, dtype="int8"):
    """8-bit integers in groups."""


@dataclass
class Uint8PerGroupSpec(_PerGroup, dtype="uint8"):
    """Unsigned 8-bit integers in groups."""

    symmetric: bool | None = False


@dataclass
class FP8E4M3PerTensorSpec(
    DataTypeSpec,
    dtype="fp8_e4m3",
    qscheme="per_tensor",
    symmetric=True,
    round_method="half_even",
):
    """FP8 (E4M3), one scale for a tensor."""

    observer_method: str = "min_max"
    scale_type: ScaleType | str | None = None
    is_dynamic: bool | None = False


class FP8E5M2PerTensorSpec(_PerTensor, dtype="fp8_e5m2"):
    """FP8 (E5M2), one scale for a tensor."""


class FP8E4M3PerChannelSpec(_PerChannel, dtype="fp8_e4m3"):
    """FP8 (E4M3), one scale for a channel or a token."""


class FP8E5M2PerChannelSpec(_PerChannel, dtype="fp8_e5m2"):
    """FP8 (E5M2), one scale for a channel or a token."""


class FP8E4M3PerGroupSpec(_FloatPerGroup, dtype="fp8_e4m3"):
    """FP8 (E4M3) in groups."""


class FP8E5M2PerGroupSpec(_FloatPerGroup, dtype="fp8_e5m2"):
    """FP8 (E5M2) in groups."""


class FP6E2M3PerGroupSpec(_FloatPerGroup, dtype="fp6_e2m3"):
    """FP6 (E2M3) in groups."""


class FP6E3M2PerGroupSpec(_FloatPerGroup, dtype="fp6_e3m2"):
    """FP6 (E3M2) in groups."""


@dataclass
class FP4PerGroupSpec(_FloatPerGroup, dtype="fp4"):
    """FP4 (E2M1) in groups; the first stage of NVFP4, with a group of 16."""

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
    """MX6: blocks of 16, and 6 bits for a value on average."""


class MX9Spec(_SharedExponent, dtype="mx9"):
    """MX9: blocks of 16, and 9 bits for a value on average."""


@dataclass
class BFP16Spec(DataTypeSpec, dtype="bfp16", group_size=8):
    """Block floating point: blocks of 8."""

    ch_axis: int
    scale_calculation_mode: str | None = "even"


class Float16Spec(DataTypeSpec, dtype="float16", observer_cls="PlaceholderObserver"):
    """A cast to float16."""


class Bfloat16Spec(DataTypeSpec, dtype="bfloat16", observer_cls="PlaceholderObserver"):
    """A cast to bfloat16."""


class FP8E5M3PerTensorSpec(FP8E4M3PerTensorSpec, dtype="fp8_e5m3"):
    """FP8 (E5M3). It is an error to quantize by it."""


@dataclass
class AmdFP4Spec(_Floats, dtype="fp4", scale_format="e5m3", scale_type="float8_e5m3"):
    """FP4 with a scale in E5M3 (8 bits, no sign) for 16 or 32 values."""

    ch_axis: int
    group_size: int
    is_dynamic: bool | None = True


class QATSpec(Fields):
    """How a quantized model is trained. It is an error to ask for it."""


@dataclass
class TQTSpec(QATSpec):
    """Thresholds are trained. It is an error to ask for it."""

    threshold_init_meth: Any = None


@dataclass
class ProgressiveSpec(Fields):
    """Two stages: the second one quantizes the codes of the first.

    FP8 for a tensor and then int4 for a channel is what can be quantized (the scheme int4_fp8).
    """

    first_stage: DataTypeSpec
    second_stage: DataTypeSpec

    def to_quantization_spec(self) -> list[QTensorConfig]:
        """The configurations of both stages."""
        return [
            self.first_stage.to_quantization_spec(),
            self.second_stage.to_quantization_spec(),
        ]


@dataclass
class ScaleQuantSpec(ProgressiveSpec):
    """Two stages: the second one quantizes the scales of the first (NVFP4)."""

    def to_quantization_spec(self) -> list[QTensorConfig]:
        """The configurations of both stages."""
        first, second = super().to_quantization_spec()
        second.is_scale_quant = True
        return [first, second]
