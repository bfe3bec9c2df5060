"""Scripts written for onnxruntime.quantization run with the package name replaced, and are as
accurate as there.
"""

from __future__ import annotations

import importlib
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import onnxruntime.quantization as theirs
import pytest
from onnx import ModelProto, TensorProto, numpy_helper

import quark_onnx.compat_onnxruntime as ours
from calibrators.onnx_runtime.cpu_features import saturates
from tests.compat_onnxruntime import networks
from tests.compat_onnxruntime.patterns import PATTERNS, Pattern, reader

#: Scripts whose result has other operators than onnxruntime's, and why.
OTHER_OPERATORS = {
    "signed_and_symmetric": "a sum and the Relu after it are rounded once",
    "moving_average": "onnxruntime drops a Relu that symmetric codes do not replace",
    "nodes_that_few_bits_ruin": "the result of the last Add, which is not named, stays float",
    "constant_factors": "products of two activations stay float, with their operands",
    "dynamic_without_a_layer": "an excluded Gemm stays what it is; onnxruntime renames it first",
    "float_results_of_layers": "a Relu is done by saturation",
    "dynamic_vocoder": "the bias is stored in the shape in which it is added",
    "dynamic_convolutions": "the bias is stored in the shape in which it is added",
}
#: What a result may be worse than onnxruntime's, in decibels.
MARGIN = 0.5


def run(path: Path, data: list[networks.Feeds]) -> np.ndarray[Any, Any]:
    session = onnxruntime.InferenceSession(
        str(path), providers=["CPUExecutionProvider"]
    )
    return np.stack([session.run(["y"], feeds)[0] for feeds in data]).astype(np.float64)


def sqnr(folder: Path, data: list[networks.Feeds]) -> float:
    """Signal to noise of the quantized model's output against the float one, in decibels."""
    wanted, found = (
        run(folder / name, data) for name in ("float.onnx", "quantized.onnx")
    )
    return float(
        10
        * np.log10(np.sum(wanted**2) / max(float(np.sum((wanted - found) ** 2)), 1e-30))
    )


def done(pattern: Pattern, q: Any, folder: Path) -> float:
    """Run a script in a folder; its accuracy on other data than it was calibrated on."""
    folder.mkdir()
    model = pattern.model()
    networks.save(model, folder)
    pattern.script(q, folder, networks.samples(model))
    return sqnr(folder, networks.samples(model, 8, seed=1))


def kinds(model: ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


def test_there_are_fifty() -> None:
    assert len(PATTERNS) >= 50


@pytest.mark.parametrize(
    "pattern", PATTERNS, ids=[pattern.name for pattern in PATTERNS]
)
def test_a_script_runs_and_is_as_accurate(
    pattern: Pattern, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = done(pattern, theirs, tmp_path / "theirs")
    after = done(pattern, ours, tmp_path / "ours")
    assert after >= before - MARGIN
    expected, found = (
        kinds(onnx.load(tmp_path / name / "quantized.onnx"))
        for name in ("theirs", "ours")
    )
    if pattern.name in OTHER_OPERATORS:
        assert found != expected, "the pattern has the same operators now"
    else:
        assert found == expected


def quantized(name: str, folder: Path) -> ModelProto:
    [pattern] = [pattern for pattern in PATTERNS if pattern.name == name]
    networks.save(pattern.model(), folder)
    pattern.script(ours, folder, networks.samples(pattern.model()))
    return onnx.load(folder / "quantized.onnx")


def constant(model: ModelProto, name: str) -> Any:
    [tensor] = [tensor for tensor in model.graph.initializer if tensor.name == name]
    return numpy_helper.to_array(tensor)


def test_operators_on_codes(tmp_path: Path) -> None:
    found = kinds(quantized("operators", tmp_path))
    assert found["QLinearConv"] == 2 and found["QGemm"] == 1


def test_nodes_that_are_asked_for_are_quantized(tmp_path: Path) -> None:
    model = quantized("nodes_that_few_bits_ruin", tmp_path)
    read = {
        name
        for node in model.graph.node
        if node.op_type in ("Add", "Softmax")
        for name in node.input
    }
    assert {
        "x_DequantizeLinear_Output",
        "a_DequantizeLinear_Output",
        "s_DequantizeLinear_Output",
    } <= read


def test_what_safety_would_spare_is_quantized_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    networks.save(networks.stream(), tmp_path)
    source, output = str(tmp_path / "float.onnx"), str(tmp_path / "q.onnx")
    ours.quantize_static(
        source, output, reader(theirs, networks.samples(networks.stream()))
    )
    [add] = [node for node in onnx.load(output).graph.node if node.name == "add"]
    assert not any(name.endswith("_DequantizeLinear_Output") for name in add.input)
    with caplog.at_level(logging.WARNING):
        data = reader(theirs, networks.samples(networks.stream()))
        ours.quantize_static(source, output, data, nodes_to_quantize=["add"])
    [add] = [node for node in onnx.load(output).graph.node if node.name == "add"]
    assert all(name.endswith("_DequantizeLinear_Output") for name in add.input)
    assert "1 node is quantized as requested by name" in caplog.text


def test_half_quadratic_blocks(tmp_path: Path) -> None:
    model = networks.attention()
    networks.save(model, tmp_path)
    nbits, data = (
        importlib.import_module("quark_onnx.compat_onnxruntime.matmul_nbits_quantizer"),
        networks.samples(model),
    )
    found = []
    for algorithm in (None, nbits.HQQWeightOnlyQuantConfig(block_size=32, bits=4)):
        quantizer = nbits.MatMulNBitsQuantizer(
            model, 4, 32, False, algo_config=algorithm
        )
        quantizer.process()
        quantizer.model.save_model_to_file(str(tmp_path / "quantized.onnx"), False)
        found.append(sqnr(tmp_path, data))
    assert found[1] > found[0] - MARGIN


@pytest.mark.parametrize("bits", [2, 8])
def test_a_table_without_an_operator_of_blocks_is_not_dequantized_whole(
    bits: int, tmp_path: Path
) -> None:
    model = networks.table()
    networks.save(model, tmp_path)
    nbits = importlib.import_module(
        "quark_onnx.compat_onnxruntime.matmul_nbits_quantizer"
    )
    quantizer = nbits.MatMulNBitsQuantizer(
        model, bits, 32, op_types_to_quantize=("Gather",)
    )
    quantizer.process()
    assert "DequantizeLinear" not in kinds(quantizer.model.model)
    quantizer.model.save_model_to_file(str(tmp_path / "quantized.onnx"), False)
    # Bytes with a scale per row.
    assert sqnr(tmp_path, networks.samples(model)) > 35


@pytest.mark.parametrize("types", [None, ("Conv",)])
def test_a_pass_with_nothing_left_changes_nothing(
    types: tuple[str, ...] | None, caplog: pytest.LogCaptureFixture
) -> None:
    nbits = importlib.import_module(
        "quark_onnx.compat_onnxruntime.matmul_nbits_quantizer"
    )
    first = nbits.MatMulNBitsQuantizer(networks.table(), 4, 32)
    first.process()
    before = first.model.model.SerializeToString()
    second = nbits.MatMulNBitsQuantizer(
        first.model.model, 4, 32, op_types_to_quantize=types
    )
    second.process()
    assert second.model.model.SerializeToString() == before
    assert "nothing is quantized" in caplog.text


def test_bodies_stay_float_unless_they_are_asked_for(tmp_path: Path) -> None:
    networks.save(networks.branches(), tmp_path)
    pairs = {}
    for asked in (False, True):
        data = reader(theirs, networks.samples(networks.branches()))
        ours.quantize_static(
            str(tmp_path / "float.onnx"),
            str(tmp_path / "q.onnx"),
            data,
            extra_options={"EnableSubgraph": asked},
        )
        [branch] = [
            node
            for node in onnx.load(tmp_path / "q.onnx").graph.node
            if node.op_type == "If"
        ]
        bodies = [attribute.g for attribute in branch.attribute]
        pairs[asked] = sum(
            node.op_type == "DequantizeLinear" for body in bodies for node in body.node
        )
    assert pairs[False] == 0 < pairs[True]


def test_weights_keep_their_floats(tmp_path: Path) -> None:
    model = quantized("signed_and_symmetric", tmp_path)
    assert {"w1", "w2"} <= {tensor.name for tensor in model.graph.initializer}
    assert not constant(model, "x_zero_point").any()


def test_a_relu_stays(tmp_path: Path) -> None:
    assert kinds(quantized("dedicated_pairs", tmp_path))["Relu"] == 2


def test_domains(tmp_path: Path) -> None:
    model = quantized("contributed_pairs", tmp_path)
    assert {
        node.domain for node in model.graph.node if "quantize" in node.op_type.lower()
    } == {"com.microsoft"}


def test_products_of_activations_stay_float(tmp_path: Path) -> None:
    model = quantized("constant_factors", tmp_path)
    [scores] = [node for node in model.graph.node if node.name == "scores"]
    assert list(scores.input) == ["q", "kt"]


def test_overrides_of_tensors(tmp_path: Path) -> None:
    model = quantized("one_tensor_in_sixteen_bits", tmp_path)
    assert (
        constant(model, "r_zero_point").dtype == np.uint16
        and constant(model, "wo_zero_point").dtype == np.uint8
    )
    (tmp_path / "b").mkdir()
    model = quantized("scales_from_elsewhere", tmp_path / "b")
    assert (
        constant(model, "x_scale") == np.float32(0.03)
        and constant(model, "x_zero_point") == 128
    )
    assert constant(model, "g_scale") == np.float32(1 / 255)


def test_a_reader_gets_another_format(tmp_path: Path) -> None:
    model = quantized("converted_for_one_reader", tmp_path)
    assert constant(model, "q_zero_point").dtype == np.uint8
    [scores] = [node for node in model.graph.node if node.name == "scores"]
    assert (
        constant(
            model, scores.input[0].replace("_DequantizeLinear_Output", "_zero_point")
        ).dtype
        == np.uint16
    )


def test_accuracy_level_and_names(tmp_path: Path) -> None:
    model = quantized("four_bits", tmp_path)
    nbits = [node for node in model.graph.node if node.op_type == "MatMulNBits"]
    assert len(nbits) == 5
    assert {
        a.i for node in nbits for a in node.attribute if a.name == "accuracy_level"
    } == {4}
    types = {
        tensor.data_type
        for tensor in quantized("four_bit_pairs", tmp_path).graph.initializer
    }
    assert TensorProto.INT4 in types


def test_their_debugging_tools_find_our_tensors(tmp_path: Path) -> None:
    from quark_onnx.compat_onnxruntime import qdq_loss_debug as debug

    quantized("defaults", tmp_path)
    activations = []
    for name in ("float.onnx", "quantized.onnx"):
        watched = str(tmp_path / f"watched_{name}")
        debug.modify_model_output_intermediate_tensors(str(tmp_path / name), watched)
        activations.append(
            debug.collect_activations(
                watched, reader(theirs, networks.samples(networks.convolutions()))
            )
        )
    matches = debug.create_activation_matching(activations[1], activations[0])
    errors = debug.compute_activation_error(matches)
    assert {"x", "r1", "m", "s"} & set(errors)
    assert all(
        error["xmodel_err"] > 15 for error in errors.values() if "xmodel_err" in error
    )
    weights = debug.create_weight_matching(
        str(tmp_path / "float.onnx"), str(tmp_path / "quantized.onnx")
    )
    assert {"w1", "w2"} <= set(weights)
    assert all(error > 30 for error in debug.compute_weight_error(weights).values())


def test_float8_is_as_accurate_as_theirs(tmp_path: Path) -> None:
    """Over several models: which scale is nearer in a single one is a matter of luck.

    onnxruntime scales by the deviation and clips what lies beyond 4.5 of them; this package scales
    by the greatest value.
    """
    settings: dict[str, Any] = {
        "activation_type": theirs.QuantType.QFLOAT8E4M3FN,
        "weight_type": theirs.QuantType.QFLOAT8E4M3FN,
        "calibrate_method": theirs.CalibrationMethod.Distribution,
    }
    found: dict[Any, list[float]] = {theirs: [], ours: []}
    for seed in range(8):
        model = networks.products(seed)
        networks.save(model, tmp_path)
        source, output = str(tmp_path / "float.onnx"), str(tmp_path / "quantized.onnx")
        for quantizer, ratios in found.items():
            data = reader(theirs, networks.samples(model, seed=seed))
            quantizer.quantize_static(source, output, data, **settings)
            ratios.append(sqnr(tmp_path, networks.samples(model, 8, seed=seed + 100)))
    assert np.mean(found[ours]) > np.mean(found[theirs])


@pytest.mark.parametrize("make", [networks.embedding, networks.words])
def test_tables_are_as_accurate_as_theirs(make: Any, tmp_path: Path) -> None:
    """Those that Gather looks up, and those of EmbedLayerNormalization."""
    model = make()
    networks.save(model, tmp_path)
    found = []
    for quantizer in (theirs, ours):
        quantizer.quantize_dynamic(
            str(tmp_path / "float.onnx"),
            str(tmp_path / "quantized.onnx"),
            reduce_range=saturates(),  # as users are told to choose there
        )
        found.append(sqnr(tmp_path, networks.samples(model, 8, seed=1)))
    assert found[1] >= found[0] - MARGIN
    types = {
        tensor.data_type
        for tensor in onnx.load(tmp_path / "quantized.onnx").graph.initializer
        if tensor.name == "table_quantized"
    }
    assert types == {TensorProto.INT8}


def fused(path: Path) -> Counter[str]:
    """Return the operators of a model after onnxruntime's optimizations."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    optimized = path.with_name("optimized.onnx")
    options.optimized_model_filepath = str(optimized)
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return kinds(onnx.load(optimized))


def test_weights_with_pairs_are_fused_by_onnxruntime(tmp_path: Path) -> None:
    """Nothing stands between a weight's pair and its operator, also with scales per channel."""
    [pattern] = [p for p in PATTERNS if p.name == "pairs_of_weights_per_channel"]
    found = []
    for package in (ours, theirs):
        networks.save(pattern.model(), tmp_path)
        pattern.script(package, tmp_path, networks.samples(pattern.model()))
        found.append(fused(tmp_path / "quantized.onnx"))
    assert found[0] == found[1]
    assert found[0]["QLinearConv"] and found[0]["QGemm"]


def test_stored_codes_stay(tmp_path: Path) -> None:
    """Also -128, which the codes of new weights leave out, and with scales per channel."""
    for axis in (None, 0):
        model = networks.stored_weights(axis)
        networks.save(model, tmp_path)
        data = networks.samples(model)
        ours.quantize_static(
            tmp_path / "float.onnx",
            tmp_path / "quantized.onnx",
            reader(theirs, data),
            per_channel=axis is not None,
        )
        result = onnx.load(tmp_path / "quantized.onnx")
        for name, stored in (("w1_quantized", "codes"), ("w1_scale", "step")):
            np.testing.assert_array_equal(
                constant(result, name), constant(model, stored)
            )
        assert kinds(result)["Cast"] == 0


def test_stored_codes_of_an_excluded_layer_stay(tmp_path: Path) -> None:
    model = networks.stored_weights()
    networks.save(model, tmp_path)
    ours.quantize_static(
        tmp_path / "float.onnx",
        tmp_path / "quantized.onnx",
        reader(theirs, networks.samples(model)),
        nodes_to_exclude=["conv1"],
    )
    result = onnx.load(tmp_path / "quantized.onnx")
    [conv] = [node for node in result.graph.node if node.name == "conv1"]
    [pair] = [node for node in result.graph.node if node.output[0] == conv.input[1]]
    assert pair.op_type == "DequantizeLinear"
    np.testing.assert_array_equal(
        constant(result, pair.input[0]), constant(model, "codes")
    )


def test_a_damaged_output_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both operands of a difference are rounded to steps that are greater than the difference."""
    model = networks.cancelling()
    networks.save(model, tmp_path)
    source, output = tmp_path / "float.onnx", tmp_path / "quantized.onnx"
    ours.quantize_dynamic(source, output)
    assert "output 'y' has" in caplog.text and "not usable" in caplog.text


def test_a_result_that_was_not_compared_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = networks.layers()
    # A custom operator: no session computes it.
    model.graph.node[1].domain = "custom"
    model.opset_import.append(onnx.helper.make_opsetid("custom", 1))
    networks.save(model, tmp_path)
    ours.quantize_dynamic(tmp_path / "float.onnx", tmp_path / "quantized.onnx")
    assert "was not compared with the float model" in caplog.text
