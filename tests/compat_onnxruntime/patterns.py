"""Forty ways in which public scripts call onnxruntime.quantization, each with a small model.

A pattern is a function of the module ``q``, which is onnxruntime.quantization or stands in for it,
a folder with ``float.onnx``, and data. It writes ``folder / "quantized.onnx"``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto

from tests.compat_onnxruntime import networks
from tests.compat_onnxruntime.networks import Feeds

Script = Callable[[Any, Path, list[Feeds]], None]


@dataclass(frozen=True)
class Pattern:
    """A script, and the model that it is for."""

    name: str
    model: Callable[[], ModelProto]
    script: Script


PATTERNS: list[Pattern] = []


def pattern(model: Callable[[], ModelProto]) -> Callable[[Script], Script]:
    """Decorator: lists a script."""

    def decorate(script: Script) -> Script:
        PATTERNS.append(Pattern(script.__name__, model, script))
        return script

    return decorate


def reader(q: Any, data: list[Feeds]) -> Any:
    """A reader as tutorials write it, with the customary ``rewind``."""

    class Reader(q.CalibrationDataReader):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.enum = iter(data)

        def get_next(self) -> Feeds | None:
            return next(self.enum, None)

        def rewind(self) -> None:
            self.enum = iter(data)

    return Reader()


def paths(folder: Path) -> tuple[str, str]:
    """The model to read and the one to write."""
    return str(folder / "float.onnx"), str(folder / "quantized.onnx")


def static(q: Any, folder: Path, data: list[Feeds], **keywords: Any) -> None:
    """A call with keywords."""
    q.quantize_static(*paths(folder), reader(q, data), **keywords)


def module(q: Any, name: str) -> Any:
    """A submodule, as a script imports it."""
    return importlib.import_module(f"{q.__name__}.{name}")


@pattern(networks.convolutions)
def defaults(q: Any, folder: Path, data: list[Feeds]) -> None:
    q.quantize_static(*paths(folder), reader(q, data))


@pattern(networks.convolutions)
def tutorial(q: Any, folder: Path, data: list[Feeds]) -> None:
    """The call of onnxruntime's image classification example."""
    source, output = paths(folder)
    q.quantize_static(
        source,
        output,
        reader(q, data),
        quant_format=q.QuantFormat.from_string("QDQ"),
        per_channel=False,
        weight_type=q.QuantType.QInt8,
    )


@pattern(networks.convolutions)
def unsigned_activations(q: Any, folder: Path, data: list[Feeds]) -> None:
    static(
        q,
        folder,
        data,
        activation_type=q.QuantType.QUInt8,
        weight_type=q.QuantType.QInt8,
        per_channel=True,
    )


@pattern(networks.convolutions)
def unsigned_throughout(q: Any, folder: Path, data: list[Feeds]) -> None:
    static(
        q,
        folder,
        data,
        activation_type=q.QuantType.QUInt8,
        weight_type=q.QuantType.QUInt8,
    )


@pattern(networks.convolutions)
def signed_and_symmetric(q: Any, folder: Path, data: list[Feeds]) -> None:
    """The settings that TensorRT's users are told to take."""
    options = {
        "ActivationSymmetric": True,
        "WeightSymmetric": True,
        "AddQDQPairToWeight": True,
    }
    static(q, folder, data, extra_options=options)


@pattern(networks.convolutions)
def operators(q: Any, folder: Path, data: list[Feeds]) -> None:
    types = {"activation_type": q.QuantType.QUInt8, "weight_type": q.QuantType.QInt8}
    static(q, folder, data, quant_format=q.QuantFormat.QOperator, **types)


@pattern(networks.convolutions)
def numbers_for_types(q: Any, folder: Path, data: list[Feeds]) -> None:
    """Types as TensorProto numbers, and flags as 0 and 1."""
    static(
        q,
        folder,
        data,
        activation_type=TensorProto.UINT8,
        weight_type=TensorProto.INT8,
        per_channel=1,
    )


@pattern(networks.convolutions)
def nothing_for_lists(q: Any, folder: Path, data: list[Feeds]) -> None:
    none = dict.fromkeys(
        (
            "op_types_to_quantize",
            "nodes_to_quantize",
            "nodes_to_exclude",
            "extra_options",
        )
    )
    static(q, folder, data, calibration_providers=["CPUExecutionProvider"], **none)


@pattern(networks.convolutions)
def entropy(q: Any, folder: Path, data: list[Feeds]) -> None:
    static(
        q,
        folder,
        data,
        calibrate_method=q.CalibrationMethod.Entropy,
        activation_type=q.QuantType.QUInt8,
    )


@pattern(networks.convolutions)
def percentile(q: Any, folder: Path, data: list[Feeds]) -> None:
    options = {"CalibPercentile": 99.99, "CalibTensorRangeSymmetric": False}
    static(
        q,
        folder,
        data,
        calibrate_method=q.CalibrationMethod["Percentile"],
        extra_options=options,
    )


@pattern(networks.convolutions)
def moving_average(q: Any, folder: Path, data: list[Feeds]) -> None:
    options = {
        "CalibMovingAverage": True,
        "CalibMovingAverageConstant": 0.1,
        "CalibTensorRangeSymmetric": True,
    }
    static(q, folder, data, extra_options=options)


@pattern(networks.convolutions)
def sixteen_bits(q: Any, folder: Path, data: list[Feeds]) -> None:
    static(
        q,
        folder,
        data,
        activation_type=q.QuantType.QUInt16,
        weight_type=q.QuantType.QInt8,
        per_channel=True,
    )


@pattern(networks.convolutions)
def some_operators(q: Any, folder: Path, data: list[Feeds]) -> None:
    static(q, folder, data, op_types_to_quantize=["Conv", "Gemm"], per_channel=True)


@pattern(networks.convolutions)
def without_the_head(q: Any, folder: Path, data: list[Feeds]) -> None:
    """Nodes by name, one of which the model does not have."""
    static(q, folder, data, nodes_to_exclude=["fc", "/model.22/dfl/conv/Conv"])


@pattern(networks.detector)
def detector_without_its_decoding(q: Any, folder: Path, data: list[Feeds]) -> None:
    """A detector as tutorials exclude its head: the operators that onnxruntime would quantize."""
    decoding = ("Sigmoid", "Mul", "Add", "Concat", "Split")
    nodes = onnx.load(folder / "float.onnx").graph.node
    excluded = [node.name for node in nodes if node.op_type in decoding]
    kinds = {"activation_type": q.QuantType.QUInt8, "weight_type": q.QuantType.QInt8}
    static(q, folder, data, nodes_to_exclude=excluded, **kinds)


@pattern(networks.convolutions)
def some_nodes(q: Any, folder: Path, data: list[Feeds]) -> None:
    static(q, folder, data, nodes_to_quantize=["conv1", "conv2"])


@pattern(networks.branches)
def nodes_that_few_bits_ruin(q: Any, folder: Path, data: list[Feeds]) -> None:
    static(
        q,
        folder,
        data,
        nodes_to_quantize=["add1", "add2", "softmax1"],
        activation_type=q.QuantType.QUInt8,
    )


@pattern(networks.convolutions)
def reduced_range(q: Any, folder: Path, data: list[Feeds]) -> None:
    static(q, folder, data, reduce_range=True, per_channel=True)


@pattern(networks.convolutions)
def external_data(q: Any, folder: Path, data: list[Feeds]) -> None:
    static(q, folder, data, use_external_data_format=True)


@pattern(networks.convolutions)
def model_in_memory(q: Any, folder: Path, data: list[Feeds]) -> None:
    q.quantize_static(
        onnx.load(folder / "float.onnx"), folder / "quantized.onnx", reader(q, data)
    )


@pattern(networks.convolutions)
def float_biases(q: Any, folder: Path, data: list[Feeds]) -> None:
    static(q, folder, data, extra_options={"QuantizeBias": False})


@pattern(networks.convolutions)
def dedicated_pairs(q: Any, folder: Path, data: list[Feeds]) -> None:
    static(
        q,
        folder,
        data,
        extra_options={"DedicatedQDQPair": True, "QDQKeepRemovableActivations": True},
    )


@pattern(networks.convolutions)
def contributed_pairs(q: Any, folder: Path, data: list[Feeds]) -> None:
    static(
        q,
        folder,
        data,
        extra_options={"UseQDQContribOps": True, "MinimumRealRange": 0.0001},
    )


@pattern(networks.attention)
def constant_factors(q: Any, folder: Path, data: list[Feeds]) -> None:
    options = {
        "MatMulConstBOnly": True,
        "OpTypesToExcludeOutputQuantization": ["MatMul"],
    }
    static(q, folder, data, op_types_to_quantize=["MatMul"], extra_options=options)


@pattern(networks.attention)
def per_channel_axis(q: Any, folder: Path, data: list[Feeds]) -> None:
    static(
        q,
        folder,
        data,
        per_channel=True,
        extra_options={"QDQOpTypePerChannelSupportToAxis": {"MatMul": 1}},
    )


@pattern(networks.attention)
def one_tensor_in_sixteen_bits(q: Any, folder: Path, data: list[Feeds]) -> None:
    overrides = {
        "r": [{"quant_type": q.QuantType.QUInt16}],
        "wo": [{"quant_type": q.QuantType.QUInt8}],
    }
    types = {"activation_type": q.QuantType.QUInt8, "weight_type": q.QuantType.QInt8}
    static(q, folder, data, extra_options={"TensorQuantOverrides": overrides}, **types)


@pattern(networks.attention)
def scales_from_elsewhere(q: Any, folder: Path, data: list[Feeds]) -> None:
    given = {"scale": np.array(0.03, np.float32), "zero_point": np.array(128, np.uint8)}
    overrides = {
        "x": [given],
        "g": [{"rmin": np.array(0, np.float32), "rmax": np.array(1, np.float32)}],
    }
    static(
        q,
        folder,
        data,
        activation_type=q.QuantType.QUInt8,
        extra_options={"TensorQuantOverrides": overrides},
    )


@pattern(networks.attention)
def converted_for_one_reader(q: Any, folder: Path, data: list[Feeds]) -> None:
    convert = {"quant_type": q.QuantType.QUInt16, "recv_nodes": {"scores"}}
    overrides = {"q": [{"quant_type": q.QuantType.QUInt8, "convert": convert}]}
    static(
        q,
        folder,
        data,
        activation_type=q.QuantType.QUInt8,
        extra_options={"TensorQuantOverrides": overrides},
    )


@pattern(networks.attention)
def whole_model(q: Any, folder: Path, data: list[Feeds]) -> None:
    """get_qdq_config and quantize, as NPUs want it."""
    source, output = paths(folder)
    settings = q.get_qdq_config(
        source, reader(q, data), activation_type=q.QuantType.QUInt16, per_channel=True
    )
    q.quantize(source, output, settings)


@pattern(networks.convolutions)
def for_a_phone(q: Any, folder: Path, data: list[Feeds]) -> None:
    """The preparation and the settings for Qualcomm's NPU."""
    qnn = module(q, "execution_providers.qnn")
    source, output = paths(folder)
    prepared = str(folder / "prepared.onnx")
    changed = qnn.qnn_preprocess_model(source, prepared)
    source = prepared if changed else source
    kinds = {"activation_type": q.QuantType.QUInt16, "weight_type": q.QuantType.QUInt8}
    q.quantize(source, output, qnn.get_qnn_qdq_config(source, reader(q, data), **kinds))


@pattern(networks.convolutions)
def static_config(q: Any, folder: Path, data: list[Feeds]) -> None:
    settings = q.StaticQuantConfig(
        calibration_data_reader=reader(q, data),
        quant_format=q.QuantFormat.QDQ,
        calibrate_method=q.CalibrationMethod.MinMax,
        activation_type=q.QuantType.QUInt8,
        per_channel=True,
    )
    q.quantize(*paths(folder), settings)


@pattern(networks.convolutions)
def prepared_first(q: Any, folder: Path, data: list[Feeds]) -> None:
    preparation = module(q, "shape_inference")
    preparation.quant_pre_process(
        str(folder / "float.onnx"),
        str(folder / "inferred.onnx"),
        skip_symbolic_shape=True,
    )
    q.quantize_static(
        str(folder / "inferred.onnx"), str(folder / "quantized.onnx"), reader(q, data)
    )


@pattern(networks.convolutions)
def calibration_cache(q: Any, folder: Path, data: list[Feeds]) -> None:
    """Measured once, and quantized from the file."""
    cache = folder / "ranges.json"
    q.quantize_static(*paths(folder), reader(q, data), calibration_cache_path=cache)
    q.quantize_static(*paths(folder), None, calibration_cache_path=cache)


@pattern(networks.convolutions)
def calibrator_and_quantizer(q: Any, folder: Path, data: list[Feeds]) -> None:
    """What quantize_static does, step by step."""
    source, output = paths(folder)
    calibrator = q.create_calibrator(source, [], str(folder / "augmented.onnx"))
    calibrator.collect_data(reader(q, data))
    types = ["Conv", "Gemm", "Add", "MaxPool", "Relu"]
    kinds = (q.QuantType.QInt8, q.QuantType.QUInt8)
    quantizer = q.QDQQuantizer(
        onnx.load(source),
        True,
        False,
        *kinds,
        calibrator.compute_data(),
        [],
        [],
        types,
        {},
    )
    quantizer.quantize_model()
    quantizer.model.save_model_to_file(output, False)


@pattern(networks.attention)
def dynamic(q: Any, folder: Path, data: list[Feeds]) -> None:
    q.quantize_dynamic(*paths(folder))


@pattern(networks.attention)
def dynamic_unsigned(q: Any, folder: Path, data: list[Feeds]) -> None:
    q.quantize_dynamic(
        model_input=paths(folder)[0],
        model_output=paths(folder)[1],
        weight_type=q.QuantType.QUInt8,
    )


@pattern(networks.embedding)
def dynamic_per_channel(q: Any, folder: Path, data: list[Feeds]) -> None:
    q.quantize_dynamic(
        *paths(folder),
        per_channel=True,
        op_types_to_quantize=["MatMul", "Attention", "LSTM"],
    )


@pattern(networks.attention)
def dynamic_config(q: Any, folder: Path, data: list[Feeds]) -> None:
    settings = q.DynamicQuantConfig(
        weight_type=q.QuantType.QInt8, extra_options={"MatMulConstBOnly": True}
    )
    q.quantize(*paths(folder), settings)


@pattern(networks.fused_attention)
def dynamic_attention(q: Any, folder: Path, data: list[Feeds]) -> None:
    q.quantize_dynamic(*paths(folder), op_types_to_quantize=["MatMul", "Attention"])


@pattern(networks.fused_attention)
def dynamic_attention_per_channel(q: Any, folder: Path, data: list[Feeds]) -> None:
    q.quantize_dynamic(*paths(folder), per_channel=True)


@pattern(networks.styled)
def instance_normalization(q: Any, folder: Path, data: list[Feeds]) -> None:
    static(q, folder, data, activation_type=q.QuantType.QUInt8)


@pattern(networks.styled)
def instance_normalization_per_channel(q: Any, folder: Path, data: list[Feeds]) -> None:
    static(q, folder, data, activation_type=q.QuantType.QUInt8, per_channel=True)


@pattern(networks.bounded)
def symmetric_clip(q: Any, folder: Path, data: list[Feeds]) -> None:
    static(q, folder, data, extra_options={"ActivationSymmetric": True})


def _blocks(q: Any, folder: Path, data: list[Feeds], **keywords: Any) -> None:
    nbits = module(q, "matmul_nbits_quantizer")
    quantizer = nbits.MatMulNBitsQuantizer(onnx.load(folder / "float.onnx"), **keywords)
    quantizer.process()
    quantizer.model.save_model_to_file(str(folder / "quantized.onnx"), False)


@pattern(networks.attention)
def four_bits(q: Any, folder: Path, data: list[Feeds]) -> None:
    _blocks(
        q,
        folder,
        data,
        block_size=32,
        is_symmetric=True,
        accuracy_level=4,
        nodes_to_exclude=["down"],
    )


@pattern(networks.attention)
def eight_bits_asymmetric(q: Any, folder: Path, data: list[Feeds]) -> None:
    nbits = module(q, "matmul_nbits_quantizer")
    _blocks(
        q,
        folder,
        data,
        algo_config=nbits.DefaultWeightOnlyQuantConfig(
            block_size=16, is_symmetric=False, bits=8
        ),
    )


@pattern(networks.attention)
def four_bit_pairs(q: Any, folder: Path, data: list[Feeds]) -> None:
    _blocks(
        q,
        folder,
        data,
        block_size=32,
        is_symmetric=True,
        quant_format=q.QuantFormat.QDQ,
    )


@pattern(partial(networks.convolutions, 11))
def old_opset(q: Any, folder: Path, data: list[Feeds]) -> None:
    static(q, folder, data, activation_type=q.QuantType.QUInt8)


@pattern(networks.layers)
def dynamic_products_alone(q: Any, folder: Path, data: list[Feeds]) -> None:
    """The call of speech projects: Gemm counts as MatMul."""
    q.quantize_dynamic(*paths(folder), op_types_to_quantize=["MatMul"])


@pattern(networks.layers)
def dynamic_without_a_layer(q: Any, folder: Path, data: list[Feeds]) -> None:
    q.quantize_dynamic(
        *paths(folder), per_channel=True, reduce_range=True, nodes_to_exclude=["third"]
    )


@pattern(networks.layers)
def results_of_layers(q: Any, folder: Path, data: list[Feeds]) -> None:
    static(q, folder, data, activation_type=q.QuantType.QUInt8)


@pattern(networks.layers)
def float_results_of_layers(q: Any, folder: Path, data: list[Feeds]) -> None:
    options = {"OpTypesToExcludeOutputQuantization": ["Gemm"]}
    kinds = {"activation_type": q.QuantType.QUInt8}
    static(q, folder, data, extra_options=options, **kinds)


@pattern(networks.vocoder)
def dynamic_vocoder(q: Any, folder: Path, data: list[Feeds]) -> None:
    q.quantize_dynamic(*paths(folder), weight_type=q.QuantType.QUInt8)


@pattern(networks.vocoder)
def vocoder_with_pairs(q: Any, folder: Path, data: list[Feeds]) -> None:
    static(q, folder, data, activation_type=q.QuantType.QUInt8)


@pattern(networks.convolutions)
def pairs_of_weights_per_channel(q: Any, folder: Path, data: list[Feeds]) -> None:
    options = {"AddQDQPairToWeight": True}
    static(q, folder, data, per_channel=True, extra_options=options)


@pattern(networks.convolutions)
def dynamic_convolutions(q: Any, folder: Path, data: list[Feeds]) -> None:
    q.quantize_dynamic(*paths(folder), weight_type=q.QuantType.QUInt8)


@pattern(networks.convolutions)
def written_over_its_input(q: Any, folder: Path, data: list[Feeds]) -> None:
    output = folder / "quantized.onnx"
    output.write_bytes((folder / "float.onnx").read_bytes())
    q.quantize_static(str(output), str(output), reader(q, data))


@pattern(networks.attention)
def dynamic_written_over_its_input(q: Any, folder: Path, data: list[Feeds]) -> None:
    output = folder / "quantized.onnx"
    output.write_bytes((folder / "float.onnx").read_bytes())
    q.quantize_dynamic(output, output)


@pattern(networks.stream)
def dynamic_stream(q: Any, folder: Path, data: list[Feeds]) -> None:
    """A float Add before a LayerNormalization stays what it is."""
    q.quantize_dynamic(*paths(folder))


@pattern(networks.stored_weights)
def weights_in_codes(q: Any, folder: Path, data: list[Feeds]) -> None:
    static(q, folder, data, activation_type=q.QuantType.QUInt8)


@pattern(partial(networks.stored_weights, 0))
def weights_in_codes_per_channel(q: Any, folder: Path, data: list[Feeds]) -> None:
    static(q, folder, data, per_channel=True)


@pattern(networks.stack)
def four_bits_of_a_stack(q: Any, folder: Path, data: list[Feeds]) -> None:
    _blocks(q, folder, data, block_size=32, is_symmetric=True)


@pattern(networks.table)
def four_bits_of_a_table(q: Any, folder: Path, data: list[Feeds]) -> None:
    _blocks(q, folder, data, block_size=32, op_types_to_quantize=("MatMul", "Gather"))


@pattern(networks.table)
def nodes_in_addition(q: Any, folder: Path, data: list[Feeds]) -> None:
    """``nodes_to_include`` adds to the operators."""
    _blocks(q, folder, data, block_size=32, nodes_to_include=["look_up"])


@pattern(networks.attention)
def a_second_pass(q: Any, folder: Path, data: list[Feeds]) -> None:
    """4 bits but for one node, and 8 bits for the rest."""
    nbits = module(q, "matmul_nbits_quantizer")
    model = onnx.load(folder / "float.onnx")
    first = nbits.MatMulNBitsQuantizer(model, 4, 32, nodes_to_exclude=["down"])
    first.process()
    second = nbits.MatMulNBitsQuantizer(first.model.model, 8, 32)
    second.process()
    second.model.save_model_to_file(str(folder / "quantized.onnx"), False)
