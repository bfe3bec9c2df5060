"""Modules that only pass names on: an import makes them from a table, without a file.

AMD Quark and onnxruntime have the same names under many module paths. A path that defines nothing
of its own is a row of ``ALIASES``; names without a counterpart come from
``quark_onnx.common.absent``. ``quark_onnx.onnx`` has a file, which reads its row. Type
checkers read stubs (.pyi), which ``scripts/stubs.py`` writes from the rows.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader

_MIRROR = "quark_onnx.compat_onnxruntime"

#: Module path -> module that defines the names -> the names. All other names of a module below
#: ``compat_onnxruntime`` are those of the same module of onnxruntime.
ALIASES: dict[str, dict[str, str]] = {
    "quark_onnx.onnx": {
        "quark_onnx.onnx.auto_search": (
            "AutoSearch AutoSearchConfig AutoSearchPro SearchSpace"
            " generate_all_configs get_auto_search_config"
        ),
        "quark_onnx.onnx.calibration.calibrators": (
            "CalibraterBase MinMaxCalibrater create_calibrator_float_scale"
            " create_calibrator_power_of_two write_calibration_table"
        ),
        "quark_onnx.onnx.calibration.data_readers": (
            "CachedDataReader PathDataReader RandomDataReader"
        ),
        "quark_onnx.onnx.deploy_utils": "dump_model",
        "quark_onnx.onnx.operators.custom_ops": (
            "_COP_DOMAIN _COP_VERSION get_library_path"
        ),
        "quark_onnx.onnx.quant_utils": (
            "ExtendedCalibrationMethod ExtendedQuantFormat ExtendedQuantType"
            " Int16Method LayerWiseMethod PowerOfTwoMethod QuantizationMode"
            " VitisQuantFormat VitisQuantType"
        ),
        "quark_onnx.onnx.quantization.api": "ModelQuantizer",
        "quark_onnx.onnx.algorithm": (
            "AdaQuantConfig AdaRoundConfig AlgoConfig AutoMixprecisionConfig"
            " BiasCorrectionConfig CLEConfig GPTQConfig QuarotConfig"
            " SmoothQuantConfig"
        ),
        "quark_onnx.onnx.quantization.config.config": (
            "Config QConfig QuantizationConfig"
        ),
        "quark_onnx.onnx.quantization.config.custom_config": (
            "A8W8_ADAQUANT_QCONFIG A8W8_ADAROUND_QCONFIG A8W8_QCONFIG"
            " A16W8_ADAQUANT_QCONFIG A16W8_ADAROUND_QCONFIG A16W8_QCONFIG"
            " BF16_QCONFIG BFP16_QCONFIG VINT8_QCONFIG XINT8_ADAQUANT_QCONFIG"
            " XINT8_ADAROUND_QCONFIG XINT8_QCONFIG get_default_config"
        ),
        "quark_onnx.onnx.data_type": (
            "BFP16 BFloat16 DataType Float16 Int8 Int16 Int32 UInt8 UInt16 UInt32"
        ),
        "quark_onnx.onnx.spec": (
            "BFloat16Spec BFP16Spec CalibMethod Float16Spec Int4Spec Int8Spec"
            " Int16Spec Int32Spec MX4Spec MX6Spec MX9Spec MXFP4E2M1Spec"
            " MXFP6E2M3Spec MXFP6E3M2Spec MXFP8E4M3Spec MXFP8E5M2Spec MXInt8Spec"
            " QLayerConfig QTensorConfig QuantGranularity ScaleType UInt4Spec"
            " UInt8Spec UInt16Spec UInt32Spec XInt8Spec"
        ),
        "quark_onnx.onnx.quantize": "quantize_dynamic quantize_static",
        "quark_onnx.onnxruntime_spelling": (
            "CalibrationDataReader CalibrationMethod QuantFormat QuantType"
        ),
    },
    "quark_onnx.onnx.calibration.methods": {
        "quark_onnx.onnx.quant_utils": (
            "ExtendedCalibrationMethod Int16Method LayerWiseMethod PowerOfTwoMethod"
        ),
    },
    "quark_onnx.onnx.quantization.auto_search": {
        "quark_onnx.onnx.auto_search": (
            "AutoSearch AutoSearchConfig AutoSearchPro SearchSpace generate_all_configs"
            " get_auto_search_config"
        ),
    },
    "quark_onnx.onnx.quantization.auto_search.auto_search_pro": {
        "quark_onnx.onnx.auto_search": "AutoSearchPro",
    },
    "quark_onnx.onnx.quantization.auto_search.auto_search_v1": {
        "quark_onnx.onnx.auto_search": "AutoSearch AutoSearchConfig SearchSpace",
    },
    "quark_onnx.onnx.quantization.auto_search.config_generator": {
        "quark_onnx.onnx.auto_search": "generate_all_configs",
    },
    "quark_onnx.onnx.quantization.auto_search.qconfig_mapping": {
        "quark_onnx.onnx.auto_search": "get_auto_search_config",
    },
    "quark_onnx.onnx.quantization.config.algorithm": {
        "quark_onnx.onnx.algorithm": (
            "ALGO_NAME_TO_CLASS AdaQuantConfig AdaRoundConfig AlgoConfig"
            " AutoMixprecisionConfig BiasCorrectionConfig CLEConfig GPTQConfig"
            " QuarotConfig SmoothQuantConfig _algo_flag from_dict"
        ),
    },
    "quark_onnx.onnx.quantization.config.data_type": {
        "quark_onnx.onnx.data_type": (
            "BFP16 BFloat16 DATA_TYPES DataType Float16 Int4 Int8 Int16 Int32 MX4 MX6 MX9"
            " MXFP4E2M1 MXFP6E2M3 MXFP6E3M2 MXFP8E4M3 MXFP8E5M2 MXInt8 UInt4 UInt8"
            " UInt16 UInt32 parse_data_type"
        ),
    },
    "quark_onnx.onnx.quantization.config.legacy": {
        "quark_onnx.onnx.legacy": "QuantizationConfig",
    },
    "quark_onnx.onnx.quantization.config.spec": {
        "quark_onnx.onnx.spec": (
            "BFloat16Spec BFP16Spec CalibMethod Float16Spec Int4Spec Int8Spec"
            " Int16Spec Int32Spec MX4Spec MX6Spec MX9Spec MXFP4E2M1Spec"
            " MXFP6E2M3Spec MXFP6E3M2Spec MXFP8E4M3Spec MXFP8E5M2Spec MXInt8Spec parse_enum"
            " QLayerConfig QTensorConfig QuantGranularity ScaleType UInt4Spec"
            " UInt8Spec UInt16Spec UInt32Spec XInt8Spec"
        ),
    },
    "quark_onnx.onnx.quantization.quant_utils": {
        "quark_onnx.onnx.quant_utils": (
            "ExtendedQuantFormat ExtendedQuantType VitisQuantFormat VitisQuantType"
        ),
        "quark_onnx.common.absent": (
            "add_or_update_opset_import calculate_mse check_hard_sigmoid_condition "
            "check_model_is_fp16 check_model_quantizable "
            "check_reduce_mean_condition check_relu_like_node compute_minmse "
            "compute_scale_zp compute_scale_zp_fp convert_fp16_scale_to_fp32 "
            "convert_nparray convert_to_bf16 create_range_dict dequantize_data "
            "dpu_leaky_relu_alpha extract_sub_model find_int16_scale fp32_nodes "
            "get_all_target_nodes get_all_tensor_names get_annotate_tensors "
            "get_batch_size get_clip_min_max get_datatype_shape get_eltwise_op "
            "get_exclude_nodes get_matmul_nodes_without_weights "
            "get_model_node_name_dict get_model_node_output_node_name_dict "
            "get_model_weight_name_dict get_node_from_node_name "
            "get_node_input_node_name get_node_input_var get_opset_version "
            "get_output_nodes_of_node get_pre_defined_preprocess_config "
            "get_qdq_to_remove get_qmin_qmax_for_qType get_qrange_for_qType "
            "get_shape_from_tensor get_tensor_to_consumer "
            "get_tensor_type_from_qType get_weight_from_weight_name "
            "get_weights_node_of_node infer_custom_op_shape infer_shape "
            "inference_sub_model_with_data insert_quant_nodes_at_boundaries "
            "is_approximately_equal is_clip_with_min_max is_fp8_qtype "
            "is_leaky_relu_with_alpha is_node_needs_annotated is_version_below "
            "load_model_with_shape_infer make_batch_size_dynamic "
            "make_batch_size_fixed match_subgraphs model_size_exceeds "
            "modified_annotate_input pos2scale quantize_data quantize_nparray "
            "recursive_update remove_initializer_from_input remove_initializers "
            "remove_nodes save_and_reload_model_with_shape_infer scale2pos "
            "skip_node_with_inf_tensor"
        ),
    },
    "quark_onnx.onnx.quantization.quantize": {
        "quark_onnx.onnx.quantize": "quantize_dynamic quantize_static",
        "quark_onnx.common.absent": (
            "apply_align_eltwise_quant_type prune_stale_tensor_quant_overrides"
        ),
    },
    "quark_onnx.onnx.calibration.calibrate": {
        "quark_onnx.onnx.calibration.calibrators": "calibrate_model",
    },
    "quark_onnx.onnx.calibration.interface": {
        "quark_onnx.onnx.calibration.calibrators": "fake_calibration run_calibration",
    },
    "quark_onnx.onnx.utils": {
        "quark_onnx.onnx.deploy_utils": "dump_model",
    },
    "quark_onnx.onnx.utils.deploy_utils": {
        "quark_onnx.onnx.deploy_utils": "dump_model",
    },
    "quark_onnx.onnx.utils.file_utils": {
        "quark_onnx.common.absent": (
            "load_model_layers_to_finetune save_and_restore_func "
            "save_model_layers_to_finetune save_quantized_info update_crypto_mode"
        ),
    },
    "quark_onnx.onnx.utils.print_utils": {
        "quark_onnx.common.absent": (
            "check_weights_in_node print_effective_quantization_summary "
            "print_fp32_nodes print_quantize_dynamic_info "
            "print_quantize_static_info print_quantized_info "
            "print_user_supplied_configuration"
        ),
    },
    "quark_onnx.onnx.utils.shapeshifter_utils": {
        "quark_onnx.common.absent": (
            "ShapeShifterPreprocessResult apply_shapeshifter_preprocess "
            "load_shapeshifter_pass_groups run_shapeshifter_stage"
        ),
    },
    "quark_onnx.onnx.utils.system_utils": {
        "quark_onnx.common.absent": (
            "check_and_create_path create_tmp_dir get_memory_usage update_tmp_dir"
        ),
    },
    "quark_onnx.onnx.utils.model_utils": {
        "quark_onnx.onnx.layout": "convert_nchw_to_nhwc",
        "quark_onnx.common.absent": (
            "ONNXQuantizedModel SharedNodesHelper cache_onnx_model_and_infer_shapes "
            "check_onnx_model check_shared_initializers clean_initializer_in_input "
            "collect_tensor_shapes_from_feed copy_shared_nodes "
            "create_infer_session_for_onnx_model decrypt_data encrypt_data "
            "fill_all_tensors_value_info generate_initializer get_shape_list "
            "get_tensor_value onnx_load_model_with_decryption "
            "onnx_save_model_with_encryption register_custom_ops_library "
            "run_onnx_model sanitize_model_outputs save_model "
            "save_onnx_model_with_external_data update_user_custom_op_lib_paths"
        ),
    },
    "quark_onnx.torch.pruning": {
        "quark_onnx.common.absent": "LayerImportancePruneConfig OSSCARConfig PConfig",
    },
    "quark_onnx.torch.pruning.api": {
        "quark_onnx.common.absent": "ModelPruner",
    },
    "quark_onnx.torch.pruning.config": {
        "quark_onnx.common.absent": "LayerImportancePruneConfig OSSCARConfig PConfig",
    },
    "quark_onnx.torch.quantization.file2file_quantization": {
        "quark_onnx.common.absent": ("quantize_model_per_safetensor"),
    },
    "quark_onnx.torch.quantization.nn": {},
    "quark_onnx.torch.quantization.nn.modules": {
        "quark_onnx.common.absent": (
            "QuantAdaptiveAvgPool2d QuantAvgPool2d QuantConv2d"
            " QuantConvTranspose2d QuantConvTransposeBatchNorm2d"
            " QuantEmbedding QuantEmbeddingBag QuantLeakyReLU QuantLinear"
            " QuantizedConvBatchNorm2d"
        ),
    },
    "quark_onnx.torch.quantization.tensor_quantize": {
        "quark_onnx.common.absent": (
            "BufferReusePool DynamicScaledFakeQuantize FakeQuantizeBase"
            " FrozenScaledFakeQuantize NonScaledFakeQuantize"
            " ScaledFakeQuantize SequentialQuantize StaticScaledFakeQuantize"
            " dispatch_scaled_fake_quantize enable_or_disable_quantizer"
        ),
    },
    "quark_onnx.torch.utils.device": {
        "quark_onnx.common.absent": (
            "TPDeviceManager e4m3fn_to_e4m3fnuz get_gpu_arch is_gfx950"
        ),
    },
    f"{_MIRROR}.base_quantizer": {},
    f"{_MIRROR}.calibrate": {},
    f"{_MIRROR}.cuda_quantizer": {},
    f"{_MIRROR}.execution_providers": {},
    f"{_MIRROR}.execution_providers.qnn": {},
    f"{_MIRROR}.execution_providers.qnn.fusion_lpnorm": {},
    f"{_MIRROR}.execution_providers.qnn.fusion_spacetodepth": {},
    f"{_MIRROR}.execution_providers.qnn.mixed_precision_overrides_utils": {},
    f"{_MIRROR}.execution_providers.qnn.preprocess": {},
    f"{_MIRROR}.execution_providers.qnn.quant_config": {},
    f"{_MIRROR}.fusions": {},
    f"{_MIRROR}.matmul_bnb4_quantizer": {},
    f"{_MIRROR}.matmul_nbits_quantizer": {f"{_MIRROR}.weights": "MatMulNBitsQuantizer"},
    f"{_MIRROR}.onnx_model": {},
    f"{_MIRROR}.onnx_quantizer": {f"{_MIRROR}.quantizers": "ONNXQuantizer"},
    f"{_MIRROR}.preprocess": {},
    f"{_MIRROR}.qdq_loss_debug": {},
    f"{_MIRROR}.qdq_quantizer": {f"{_MIRROR}.quantizers": "QDQQuantizer"},
    f"{_MIRROR}.quant_utils": {},
    f"{_MIRROR}.registry": {},
    f"{_MIRROR}.shape_inference": {},
    f"{_MIRROR}.tensor_quant_overrides": {},
}


class SourceFinder(MetaPathFinder, InspectLoader):
    """Finder and loader of modules by their source, which ``python -m`` runs as well.

    Args:
        sources: source by the full name of the module.
    """

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.sources = sources

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of the table; None for others."""
        if fullname not in self.sources:
            return None
        # Command lines show the origin as the name of the program.
        return spec_from_loader(fullname, self, origin=fullname)

    def is_package(self, fullname: str) -> bool:
        """Return True if other modules of the table lie below the module."""
        return any(name.startswith(f"{fullname}.") for name in self.sources)

    def get_source(self, fullname: str) -> str:
        """Return the source of a module of the table."""
        return self.sources[fullname]


def install(sources: Mapping[str, str]) -> None:
    """Let ``import`` and ``python -m`` find modules without a file.

    Args:
        sources: source by the full name of the module.
    """
    # A package that is loaded again installs its modules once.
    for finder in sys.meta_path:
        if isinstance(finder, SourceFinder) and finder.sources == sources:
            return
    # First, as a folder that has stubs alone would be found as a namespace package.
    sys.meta_path.insert(0, SourceFinder(sources))


def imports_of(path: str) -> str:
    """Return the statements that import the names of an alias.

    Args:
        path: module path, a key of ``ALIASES``.

    >>> print(imports_of("quark_onnx.onnx.quantization.auto_search.auto_search_pro"), end="")
    from quark_onnx.onnx.auto_search import AutoSearchPro as AutoSearchPro
    """
    return "".join(
        f"from {home} import {name} as {name}\n"
        for home, names in ALIASES[path].items()
        for name in names.split()
    )
