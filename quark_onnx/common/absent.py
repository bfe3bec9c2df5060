"""Names of AMD Quark without a counterpart here.

A script that imports such a name and never uses it runs. The first call raises an error that names
the native way. ``quark_onnx.common.aliases`` lists the module paths of the names.
"""

from __future__ import annotations

from typing import Any

from quark_onnx.common.errors import ConfigError

#: Native way -> names.
WAYS = {
    "pruning is no quantization; prune the model with torch.nn.utils.prune before": (
        "ModelPruner LayerImportancePruneConfig OSSCARConfig PConfig"
    ),
    "histograms are kept in a file of ranges: quark-onnx calibrate MODEL DATA": (
        "save_tensor_hist_fig"
    ),
    "the differences of blocks choose no scale; use OCP_MXFP4Spec": (
        "OCP_MXFP4DiffsSpec PerBlockMXDiffsObserver"
    ),
    "training is not done; AutoRoundConfig learns roundings": (
        "LSQObserver TQTObserver"
    ),
    "no loader reads blocks of two axes; use PerGroupMinMaxObserver": (
        "PerBlock2DMinMaxObserver"
    ),
    "a scheme is a name; quark-onnx list schemes, LLMTemplate.register_scheme adds one": (
        "AmdFP4GlobalScaleScheme AmdFP4Scheme BFP16Scheme"
        " FP4Block16ScaleE4M3Scheme FP8Scheme INT4_FP8Scheme"
        " Int4WeightAndActivationScheme Int4WeightOnlyPerChannelScheme"
        " Int4WeightOnlyScheme Int8Scheme MX6Scheme MX9Scheme MXFP4Scheme"
        " MXFP4WeightOnlyScheme MXFP4_FP8Scheme MXFP4_MXFP6E2M3Scheme"
        " MXFP6E2M3Scheme MXFP6E3M2Scheme PTPCFP8Scheme QuantizationScheme"
        " QuantizationSchemeCollection Uint4WeightOnlyPerChannelScheme"
        " Uint4WeightOnlyScheme"
    ),
    "modules are quantized in place by ModelQuantizer(config).quantize_model(model)": (
        "QuantAdaptiveAvgPool2d QuantAvgPool2d QuantConv2d"
        " QuantConvTranspose2d QuantConvTransposeBatchNorm2d"
        " QuantEmbedding QuantEmbeddingBag QuantLeakyReLU QuantLinear"
        " QuantizedConvBatchNorm2d"
    ),
    "quantize_model rounds inside; observers of quark_onnx.torch.quantization.observer": (
        "BufferReusePool DynamicScaledFakeQuantize FakeQuantizeBase"
        " FrozenScaledFakeQuantize NonScaledFakeQuantize"
        " ScaledFakeQuantize SequentialQuantize StaticScaledFakeQuantize"
        " dispatch_scaled_fake_quantize enable_or_disable_quantizer"
    ),
    "quark-onnx llm ptq FOLDER quantizes file to file; quark_onnx.torch.quantize_checkpoint, too": (
        "quantize_model_per_safetensor"
    ),
    "low-rank error correction is not done; AWQConfig or GPTQConfig": "SVDQuantConfig",
    "give QTensorConfig the members of ScaleType, RoundType and ZeroPointType": (
        "get_round_method get_scale_type get_zero_point_type"
    ),
    "name the class of the observer: PerTensorMinMaxObserver, PerTensorMSEObserver": (
        "get_per_tensor_observer"
    ),
    "give a list of two QTensorConfig": "TwoStageSpec",
    "models are not encrypted; encrypt the files": (
        "decrypt_data encrypt_data onnx_load_model_with_decryption"
        " onnx_save_model_with_encryption update_crypto_mode"
    ),
    "the report of quark_onnx.quantize_static says what became of each node": (
        "check_weights_in_node print_effective_quantization_summary print_fp32_nodes"
        " print_quantize_dynamic_info print_quantize_static_info print_quantized_info"
        " print_user_supplied_configuration save_quantized_info"
    ),
    "optimizers keep their own state; resume= of quark_onnx.quantize_static": (
        "load_model_layers_to_finetune save_and_restore_func save_model_layers_to_finetune"
    ),
    "passes run by quark-onnx convert, and before each quantization": (
        "ShapeShifterPreprocessResult apply_shapeshifter_preprocess"
        " load_shapeshifter_pass_groups run_shapeshifter_stage"
    ),
    "give QTensorConfig a member of Dtype; MX formats have specs, such as OCP_MXFP4Spec": (
        "BFP16 BFloat16 FP4 FP6_E2M3 FP6_E3M2 FP8_E4M3 FP8_E5M2 FP8_E5M3 Float16 Int16 Int2 Int3"
        " Int32 Int4 Int8 MX MX6 MX9 UInt16 UInt2 UInt32 UInt4 UInt8"
    ),
    "thresholds are not trained; PerTensorMSEObserver chooses one": "TQTThresholdInitMeth",
    "it switches AMD Quark's own kernels and protocols; quark-onnx llm ptq --verbose reports": (
        "QPARAMSLINEAR_OVERRIDES_STATE_DICT QUARK_ACTIVATION_SCALES_FILENAME QUARK_ALGO_DEBUG"
        " QUARK_AWQ_MEMORY_OPTIMIZATION QUARK_CHECK_SCALE QUARK_COUNT_OBSERVED_SAMPLES QUARK_DEBUG"
        " QUARK_DEBUG_ACT_HIST QUARK_DEBUG_INPUT_PICKLE QUARK_DEBUG_NAN QUARK_DISABLE_COMPILE"
        " QUARK_DISABLE_CUDA_GRAPH QUARK_ENABLE_BUFFER_REUSE QUARK_GPTQ_DEBUG"
        " QUARK_LOG_BUFFER_STATS QUARK_MXFP4_IMPL QUARK_SAVE_ACTIVATION_SCALES"
        " QUARK_TOKENS_DISTRIBUTION_PATH QUARK_TORCH_COMPILE_MODE TOKEN_DISTRIBUTION_THRESHOLD"
        " TRITON_GPU_SUPPORTS_FP8"
    ),
    "models are not split over devices in a run; torchrun splits the calibration samples": (
        "TPDeviceManager move_model_to_device_if_it_fits"
    ),
    "write_checkpoint packs codes; quark_onnx.torch.quantize_checkpoint, too": (
        "create_pack_method e4m3fn_to_e4m3fnuz"
    ),
    "training is not done; get_calib_dataloader gives the calibration data": (
        "get_trainer_dataset"
    ),
    "one block is in memory at a time, and samples go through it one by one": (
        "get_per_block_calib_batch_size"
    ),
    "it is a helper of AMD Quark's own code; use torch.nn.Module's own methods": (
        "AppError LossError assert_no_nan create_dir get_gpu_arch get_op_name"
        " getattr_recursive is_gfx950 resolve_star setattr_recursive"
    ),
    "temporary files are removed by themselves; the environment variable TMPDIR moves them": (
        "check_and_create_path create_tmp_dir update_tmp_dir get_memory_usage"
    ),
    "it is a helper of AMD Quark's own code; use quark_onnx.quantize_static and onnx": (
        "ONNXQuantizedModel SharedNodesHelper cache_onnx_model_and_infer_shapes"
        " check_onnx_model check_shared_initializers clean_initializer_in_input"
        " collect_tensor_shapes_from_feed copy_shared_nodes"
        " create_infer_session_for_onnx_model fill_all_tensors_value_info"
        " generate_initializer get_shape_list get_tensor_value register_custom_ops_library"
        " run_onnx_model sanitize_model_outputs save_model"
        " save_onnx_model_with_external_data update_user_custom_op_lib_paths"
        " add_or_update_opset_import calculate_mse check_hard_sigmoid_condition"
        " check_model_is_fp16 check_model_quantizable check_reduce_mean_condition"
        " check_relu_like_node compute_minmse compute_scale_zp compute_scale_zp_fp"
        " convert_fp16_scale_to_fp32 convert_nparray convert_to_bf16 create_range_dict"
        " dequantize_data dpu_leaky_relu_alpha extract_sub_model find_int16_scale fp32_nodes"
        " get_all_target_nodes get_all_tensor_names get_annotate_tensors get_batch_size"
        " get_clip_min_max get_datatype_shape get_eltwise_op get_exclude_nodes"
        " get_matmul_nodes_without_weights get_model_node_name_dict"
        " get_model_node_output_node_name_dict get_model_weight_name_dict"
        " get_node_from_node_name get_node_input_node_name get_node_input_var"
        " get_opset_version get_output_nodes_of_node get_pre_defined_preprocess_config"
        " get_qdq_to_remove get_qmin_qmax_for_qType get_qrange_for_qType"
        " get_shape_from_tensor get_tensor_to_consumer get_tensor_type_from_qType"
        " get_weight_from_weight_name get_weights_node_of_node infer_custom_op_shape"
        " infer_shape inference_sub_model_with_data insert_quant_nodes_at_boundaries"
        " is_approximately_equal is_clip_with_min_max is_fp8_qtype"
        " is_leaky_relu_with_alpha is_node_needs_annotated is_version_below"
        " load_model_with_shape_infer make_batch_size_dynamic make_batch_size_fixed"
        " match_subgraphs model_size_exceeds modified_annotate_input pos2scale quantize_data"
        " quantize_nparray recursive_update remove_initializer_from_input"
        " remove_initializers remove_nodes save_and_reload_model_with_shape_infer scale2pos"
        " skip_node_with_inf_tensor apply_align_eltwise_quant_type"
        " prune_stale_tensor_quant_overrides from_float_and_dict get_name_and_info"
    ),
}
_WAY_OF = {name: way for way, names in WAYS.items() for name in names.split()}


class _AbsentType(type):
    """The type of the names: their members do not exist, either."""

    def __getattr__(cls, name: str) -> Any:
        # An AttributeError, so that hasattr answers. The base itself stands for no name.
        what = f": {_explanation(cls.absent)}" if cls.absent else ""
        raise AttributeError(f"{name!r}{what}")

    def __bool__(cls) -> bool:
        # The switches of AMD Quark are off.
        return False


class Absent(metaclass=_AbsentType):
    """Base of the names: a call raises ConfigError.

    Attributes:
        absent: the name in AMD Quark.
    """

    absent = ""

    def __new__(cls, *args: Any, **keywords: Any) -> Any:
        """Raise ConfigError, whatever the arguments."""
        raise ConfigError(_explanation(cls.absent))


def _explanation(name: str) -> str:
    return f"{name} of AMD Quark does not exist here: {_WAY_OF[name]}"


def __getattr__(name: str) -> Any:
    # PEP 562: called once for each name, as the class is kept.
    if name not in _WAY_OF:
        raise AttributeError(f"{__name__} has no {name!r}")
    document = f"No counterpart of AMD Quark's name: {_WAY_OF[name]}."
    attributes = {"__module__": __name__, "__doc__": document, "absent": name}
    globals()[name] = absent = _AbsentType(name, (Absent,), attributes)
    return absent
