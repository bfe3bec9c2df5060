"""QuantizationConfig, the older configuration of AMD Quark for ONNX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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
from quark_onnx.config import QuantizationSpec
from quark_onnx.onnx.algorithm import (
    AdaRoundConfig,
    AlgoConfig,
    AutoMixprecisionConfig,
    CLEConfig,
    QuarotConfig,
    SmoothQuantConfig,
    without_rivals,
)
from quark_onnx.onnx.draft import Draft
from quark_onnx.onnx.options import apply_options
from quark_onnx.onnx.translation import dtype_of, listed, narrowed
from quark_onnx.onnxruntime_spelling.request import name_of

#: Calibrators, with True for power-of-two scales.
METHODS: dict[str, tuple[type[Calibrator], bool]] = {
    "MinMax": (MinMax, False),
    "Entropy": (Entropy, False),
    "Percentile": (Percentile, False),
    "LayerWisePercentile": (LayerwisePercentile, False),
    "NonOverflow": (NonOverflow, True),
    "MinMSE": (MinMSE, True),
}


@dataclass
class QuantizationConfig:
    """Older form of a configuration, with AMD's field names and defaults."""

    calibrate_method: Any = "MinMax"
    quant_format: Any = "QDQ"
    activation_type: Any = "QInt8"
    weight_type: Any = "QInt8"
    input_nodes: list[str] = field(default_factory=list)
    output_nodes: list[str] = field(default_factory=list)
    op_types_to_quantize: list[str] = field(default_factory=list)
    nodes_to_quantize: list[str] = field(default_factory=list)
    extra_op_types_to_quantize: list[str] = field(default_factory=list)
    nodes_to_exclude: list[str] = field(default_factory=list)
    subgraphs_to_exclude: list[Any] = field(default_factory=list)
    specific_tensor_precision: bool = False
    execution_providers: list[str] = field(
        default_factory=lambda: ["CPUExecutionProvider"],
    )
    per_channel: bool = False
    reduce_range: bool = False
    optimize_model: bool = True
    use_dynamic_quant: bool = False
    use_external_data_format: bool = False
    convert_fp16_to_fp32: bool = False
    convert_nchw_to_nhwc: bool = False
    include_sq: bool = False
    include_rotation: bool = False
    include_cle: bool = True
    include_auto_mp: bool = False
    include_fast_ft: bool = False
    enable_npu_cnn: bool = False
    enable_npu_transformer: bool = False
    debug_mode: bool = False
    crypto_mode: bool = False
    print_summary: bool = True
    ignore_warnings: bool = True
    log_severity_level: int = 1
    extra_options: dict[str, Any] = field(default_factory=dict)

    def draft(self, algorithms: Sequence[AlgoConfig] = ()) -> Draft:
        """Translate the configuration into a draft.

        Args:
            algorithms: further algorithms, from ``ModelQuantizer.quantize_model``.

        Raises:
            ConfigError: a setting has no counterpart.
        """
        # Refused before any work: AMD Quark accepts the format and writes no FixNeuron node.
        if name_of(self.quant_format) == "FixNeuron":
            raise ConfigError(
                "quant_format is FixNeuron, which no released provider runs; use QDQ",
            )
        draft = Draft(
            None if self.use_dynamic_quant else _activation(self),
            _weight(self),
            dynamic=self.use_dynamic_quant,
            form="operators" if name_of(self.quant_format) == "QOperator" else "qdq",
            target="npu" if self.enable_npu_cnn else "",
            op_types=tuple(listed(self.op_types_to_quantize, "op_types_to_quantize")),
            nodes=tuple(listed(self.nodes_to_quantize, "nodes_to_quantize")),
            exclude=[
                *listed(self.nodes_to_exclude, "nodes_to_exclude"),
                *listed(self.subgraphs_to_exclude, "subgraphs_to_exclude"),
            ],
            input_nodes=tuple(listed(self.input_nodes, "input_nodes")),
            output_nodes=tuple(listed(self.output_nodes, "output_nodes")),
            algorithms=without_rivals([*self._included(), *algorithms]),
            external=self.use_external_data_format,
        )
        if self.enable_npu_transformer:
            # AMD's transformer mode quantizes products with a constant matrix alone.
            draft.op_types = draft.op_types or ("MatMul", "Gemm")
            draft.constant_matmul = True
        # These fields have options of the same meaning; an option overrides its field.
        fields_as_options = {
            "ConvertFP16ToFP32": self.convert_fp16_to_fp32,
            "ConvertNCHWToNHWC": self.convert_nchw_to_nhwc,
            "CryptoMode": self.crypto_mode,
            "ExecutionProviders": list(self.execution_providers),
            "ExtraOpTypesToQuantize": list(self.extra_op_types_to_quantize),
        }
        apply_options(draft, {**fields_as_options, **self.extra_options})
        return draft

    def _included(self) -> list[AlgoConfig]:
        """Return the algorithms of the flags, in AMD Quark's order."""
        # The flags are those of static quantization; include_cle is on by default.
        if self.use_dynamic_quant or self.extra_options.get("UseMatMulNBits"):
            return []
        wanted: list[tuple[bool, AlgoConfig]] = [
            (self.include_cle, CLEConfig()),
            (self.include_sq, SmoothQuantConfig()),
            (self.include_rotation, QuarotConfig()),
            (self.include_fast_ft, AdaRoundConfig()),
            (self.include_auto_mp, AutoMixprecisionConfig()),
        ]
        return [algorithm for flag, algorithm in wanted if flag]


def _activation(config: QuantizationConfig) -> QuantizationSpec:
    """Return the specification of activations.

    Raises:
        ConfigError: the type or the method is unknown.
    """
    calibrator, pow2 = _method(config.calibrate_method)
    # The symmetry of other activations comes later, from the option ActivationSymmetric.
    dtype = dtype_of(config.activation_type, config.extra_options)
    if dtype == "uint8" and config.enable_npu_cnn:
        # the integer engine has signed codes; symmetric uint8 is the same values moved by 128
        dtype = "int8"
    return _spec(
        dtype,
        symmetric=config.enable_npu_cnn,
        pow2=pow2,
        calibrator=calibrator(),
    )


def _weight(config: QuantizationConfig) -> QuantizationSpec:
    """Return the specification of weights; MatMulNBits has its own.

    Raises:
        ConfigError: the type or the method is unknown.
    """
    calibrator, pow2 = _method(config.calibrate_method)
    spec = _spec(
        dtype_of(config.weight_type, config.extra_options),
        symmetric=True,
        pow2=pow2,
        # AMD Quark calibrates weights with float scales by min-max, whatever the method is.
        calibrator=calibrator() if pow2 else MinMax(),
    )
    # Casts and block formats have neither channels nor a reduced range.
    if not spec.dtype.scaled:
        return spec
    return narrowed(
        spec.with_(per_channel=config.per_channel, reduce_range=config.reduce_range),
    )


def _spec(
    dtype: str,
    *,
    symmetric: bool,
    pow2: bool,
    calibrator: Calibrator,
) -> QuantizationSpec:
    # ``with_`` refuses settings of scales for a format that has none.
    spec = QuantizationSpec(dtype)
    if not spec.dtype.scaled:
        return spec
    return spec.with_(symmetric=symmetric, pow2=pow2, calibrator=calibrator)


def _method(method: object) -> tuple[type[Calibrator], bool]:
    name = name_of(method)
    if name not in METHODS:
        raise ConfigError(
            f"calibrate_method is {name!r}, which is not"
            f" offered{nearest(name, METHODS)}",
        )
    return METHODS[name]
