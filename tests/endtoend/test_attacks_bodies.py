"""Faults that an attack on bodies, large models and scales found, all fixed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from calibrators.onnx_runtime.session import open_session
from quark_onnx import QConfig, QuantizationSpec, quantize
from quark_onnx.common.errors import ConfigError, ModelError
from quark_onnx.files import io
from quark_onnx.graph import store

Spec = QuantizationSpec
Array = NDArray[Any]


def normal(*shape: int, seed: int = 0, by: float = 0.25) -> Array:
    return (by * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


def parse(text: str, opset: int = 17, ir: int = 8, **constants: Any) -> ModelProto:
    model = onnx.parser.parse_model(
        f'<ir_version: {ir}, opset_import: ["" : {opset}]> {text}'
    )
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(v), name) for name, v in constants.items()
    )
    return model


X = [{"x": normal(4, 16, seed=i, by=1.0)} for i in range(8)]
BOTH = [{**sample, "c": np.array(i % 2 == 0)} for i, sample in enumerate(X)]
WEIGHTS = {"w0": normal(16, 16), "w1": normal(16, 16, seed=1)}


def branches(
    before: str, read: str, opset: int = 17, ir: int = 8, extra: str = ""
) -> ModelProto:
    return parse(
        f"""g (float[N,16] x, bool c{extra}) => (float[N,16] y) {{ {before} [choice] y = If (c) <
            then_branch = t () => (float[N,16] r) {{
                [inner1] a = MatMul ({read}, w1) b = Relu (a) r = MatMul (b, w0) }},
            else_branch = e () => (float[N,16] r2) {{ [inner2] r2 = MatMul ({read}, w1) }}> }}""",
        opset,
        ir,
        **WEIGHTS,
    )


def only(opset: int = 17, ir: int = 8) -> ModelProto:
    """All layers are inside."""
    return branches("", "x", opset, ir)


def sqnr(model: ModelProto, other: ModelProto, feeds: dict[str, Array]) -> float:
    expected = open_session(model).run(None, feeds)[0].astype(np.float64)
    found = [
        open_session(other, optimize=flag).run(None, feeds)[0] for flag in (True, False)
    ]
    noise = max(float(np.square(value - expected).sum()) for value in found)
    return float(10 * np.log10(np.square(expected).sum() / max(noise, 1e-30)))


def types(model: ModelProto) -> list[str]:
    """Operator types inside bodies."""
    return [
        node.op_type
        for outer in model.graph.node
        for a in outer.attribute
        for node in a.g.node
    ]


def test_standard_pairs_of_4_bit_floats_in_bodies_too() -> None:
    config = QConfig.of("FP4E2M1")
    model = branches("h = MatMul (x, w0)", "h", 21, 10)
    standard = quantize(model, BOTH, config.with_(functions=False)).model
    onnx.checker.check_model(standard, full_check=True)
    runs = quantize(model, BOTH, config).model
    for feeds in BOTH[:2]:
        for each in (standard, runs):
            [found] = ReferenceEvaluator(each).run(None, feeds)
            np.testing.assert_allclose(
                found, open_session(runs).run(None, feeds)[0], rtol=1e-4, atol=1e-4
            )


@pytest.mark.parametrize(
    ("preset", "changes", "opset"),
    [
        *((preset, {}, 9) for preset in ("A8W8", "U8U8", "XINT8", "A16W8")),
        *(("A8W8", {"form": "vendor"}, opset) for opset in (9, 11, 13)),
        ("BF16", {"form": "vendor"}, 13),
        *(
            (preset, {}, 11)
            for preset in (
                "BF16",
                "BFP16",
                "FP8E4M3",
                "FP4E2M1",
                "INT4",
                "MXINT8",
                "FP16",
            )
        ),
    ],
)
def test_the_opset_is_raised_for_what_is_inside(
    preset: str, changes: dict[str, Any], opset: int
) -> None:
    model = only(opset, 6)
    config = QConfig.of(preset).with_(**changes)
    result = quantize(model, BOTH if config.measures else None, config)
    assert result.report.quantized >= 3
    assert min(sqnr(model, result.model, feeds) for feeds in BOTH[:2]) > (
        6 if preset == "FP4E2M1" else 12
    )


def test_a_limit_of_the_opset_counts_inside() -> None:
    with pytest.raises(
        ConfigError, match="fp8e4m3 needs opset 19, but max_opset is 13"
    ):
        quantize(only(13, 7), BOTH, QConfig.of("FP8E4M3").with_(max_opset=13))
    result = quantize(
        only(13, 7), None, QConfig.of("INT4").with_(max_opset=13)
    )  # blocks are written at any opset
    assert result.report.quantized >= 3
    assert min(sqnr(only(13, 7), result.model, feeds) for feeds in BOTH[:2]) > 12


def test_defaults_of_inputs_that_bodies_read() -> None:
    model = branches("", "x", extra=", float[16,16] w0")
    assert quantize(model, BOTH, "A8W8").report.worst_sqnr > 25
    loop = parse(
        """g (float[4,16] x, int64 n) => (float[4,16] y) { y = Loop (n, , x) <
            body = b (int64 i, bool go, float[4,16] t) => (bool on, float[4,16] u) {
                on = Identity (go) p = MatMul (t, w0) u = Tanh (p) }> }""",
        n=np.int64(3),
        **WEIGHTS,
    )
    assert quantize(loop, X, "A8W8").report.worst_sqnr > 25


@pytest.mark.parametrize("preset", ["BFP16", "MX9", "MX9_INT8", "MXINT8", "MXFP8E4M3"])
@pytest.mark.parametrize(
    ("line", "constants"),
    [
        ("t = Unsqueeze (x, k)", {"k": np.int64([1])}),
        ("t = Reshape (x, k)", {"k": np.int64([4, 4, 4])}),
        ("t = Transpose <perm = [1,0]> (x)", {}),
    ],
)
def test_blocks_behind_a_rearrangement(
    line: str, constants: dict[str, Any], preset: str
) -> None:
    rows = 4 if "k" not in constants or constants["k"].size == 3 else 16
    model = parse(
        f"g (float[4,16] x) => (y) {{ {line} y = MatMul (t, w) }}",
        w=normal(rows, 16),
        **constants,
    )
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT
    result = quantize(model, None, preset)
    rounded = [
        node.input[0]
        for node in result.model.graph.node
        if node.op_type.endswith("QuantizeDequantize")
    ]
    assert rounded.count("x") == 0 and "t" in rounded
    assert sqnr(model, result.model, X[0]) > (22 if preset == "MXFP8E4M3" else 35)


@pytest.mark.parametrize("preset", ["W8", "A8W8", "INT4", "DYNAMIC", "BFP16"])
def test_bodies_that_are_quantized_already(preset: str) -> None:
    config = QConfig.of(preset)
    once = quantize(only(21, 10), BOTH if config.measures else None, config).model
    with pytest.raises(ModelError, match="quantized already"):
        quantize(once, BOTH, "A8W8")
    assert quantize(once, BOTH, QConfig(keep_existing=True)).report.notes


@pytest.mark.parametrize("preset", ["A8W8", "XINT8", "U8U8", "FP4E2M1", "S8S8"])
@pytest.mark.parametrize("by", [1e-6, 1.0, 1e6])
def test_scales_that_float16_does_not_hold_are_not_forced_into_it(
    by: float, preset: str
) -> None:
    text = """g (float[N,16] x) => (float[N,16] y) { h = MatMul (x, w0) s = Add (h, b) r = Relu (s) y = MatMul (r, w1) }"""  # noqa: E501
    model = parse(
        text,
        b=by * normal(16),
        w0=np.float32(by) * WEIGHTS["w0"],
        w1=np.float32(by) * WEIGHTS["w1"],
    )
    for tensor in model.graph.initializer:
        tensor.CopyFrom(
            numpy_helper.from_array(
                numpy_helper.to_array(tensor).astype(np.float32), tensor.name
            )
        )
    plain = QConfig.of(preset).with_(search=0)
    half = plain.with_(
        activation=plain.activation.with_(scale="float16"),
        weight=plain.weight.with_(scale="float16"),
    )
    single, narrow = (quantize(model, X, config) for config in (plain, half))
    assert narrow.report.worst_sqnr > single.report.worst_sqnr - 2
    for tensor in narrow.model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT16:
            assert 2.0**-18 <= numpy_helper.to_array(tensor).max() <= 2.0**15


def test_a_bias_that_no_float16_scale_of_a_weight_holds() -> None:
    model = parse(
        "g (float[1,3,7,7] x) => (float[1,5,7,7] y) { y = Conv <pads = [1,1,1,1]> (x,"
        " w, b) }",
        w=normal(5, 3, 3, 3, by=1.0),
        b=np.float32([1e8, 2e8, 3e8, 4e8, 5e8]),
    )
    data = [{"x": normal(1, 3, 7, 7, seed=i, by=1e-2)} for i in range(8)]
    plain = QConfig.of("A8W8")
    assert plain.activation is not None and plain.weight is not None
    half = plain.with_(
        activation=plain.activation.with_(scale="float16"),
        weight=plain.weight.with_(scale="float16"),
    )
    assert quantize(model, data, half).report.worst_sqnr > 30


def test_a_function_with_weights_in_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(store, "LARGE_MODEL", 1)
    monkeypatch.setattr(store, "LEAST", 256)
    model = parse(
        "g (float[N,16] x, bool c) => (float[N,16] y) { h = MatMul (x, w0) y = loc.F"
        " (h, c) }",
        w0=WEIGHTS["w0"],
    )
    model.opset_import.append(helper.make_opsetid("loc", 1))
    own = numpy_helper.from_array(WEIGHTS["w1"], "fw")
    result = helper.make_tensor_value_info("r", TensorProto.FLOAT, ["N", 16])
    then = helper.make_graph(
        [helper.make_node("MatMul", ["x", "fw"], ["r"])], "t", [], [result], [own]
    )
    other = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["r"])], "e", [], [result]
    )
    choice = helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=other)
    imports = [helper.make_opsetid("", 17)]
    model.functions.append(
        helper.make_function("loc", "F", ["x", "c"], ["y"], [choice], imports)
    )
    tensors = [tensor for tensor, _ in io.tensors_with_data(model) if tensor.raw_data]
    for place, tensor in enumerate(tensors):
        (tmp_path / f"{place}.bin").write_bytes(tensor.raw_data)
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=f"{place}.bin")
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    for config in (QConfig.of("W8"), QConfig(exclude="*"), QConfig.of("A8W8")):
        found = quantize(tmp_path / "m.onnx", BOTH if config.measures else None, config)
        assert found.report.worst_sqnr > 25
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "0.bin",
        "1.bin",
        "m.onnx",
    ]


def test_values_that_numpy_cannot_hold_may_be_captured() -> None:
    model = parse(
        """g (float[N,16] x, bool c) => (float[N,16] y) { h = MatMul (x, w0) k = Cast <to = 17> (h) y = If (c) <
            then_branch = t () => (float[N,16] r) { r = Cast <to = 1> (k) },
            else_branch = e () => (float[N,16] r2) { r2 = MatMul (h, w1) }> }""",  # noqa: E501
        19,
        9,
        **WEIGHTS,
    )
    assert quantize(model, BOTH, "A8W8").report.worst_sqnr > 15


def test_constants_in_16_bits_that_bodies_read_stay_in_16_bits() -> None:
    model = parse(
        """g (float16[N,16] x, bool c) => (float16[N,16] y) { h = MatMul (x, w0) y = If (c) <
            then_branch = t () => (float16[N,16] r) { a = Cos (big) s = ReduceSum <keepdims = 0> (a) r = Add (h, s) },
            else_branch = e () => (float16[N,16] r2) { r2 = Identity (h) }> }""",  # noqa: E501
        w0=normal(16, 16).astype(np.float16),
        big=normal(512, 16).astype(np.float16),
    )
    data = [{**feeds, "x": feeds["x"].astype(np.float16)} for feeds in BOTH]
    result = quantize(model, data, "A8W8")
    assert result.report.bytes_after < result.report.bytes_before + 2000
    [found] = open_session(result.model).run(None, data[0])
    [expected] = open_session(model).run(None, data[0])
    np.testing.assert_allclose(found, expected, rtol=0.05, atol=1)


def test_the_report_counts_what_is_inside() -> None:
    report = quantize(only(), BOTH, "A8W8").report
    assert report.quantized >= 3
    assert "nothing in this model could be quantized" not in str(report)
    assert "there is no rule" not in str(report)


def test_nodes_inside_are_excluded_and_chosen_by_name() -> None:
    plain = types(quantize(only(), BOTH, "A8W8").model)
    without = types(quantize(only(), BOTH, QConfig(exclude="inner1")).model)
    assert without.count("DequantizeLinear") < plain.count("DequantizeLinear")
    chosen = types(quantize(only(), BOTH, QConfig(nodes="inner2")).model)
    assert 0 < chosen.count("DequantizeLinear") < plain.count("DequantizeLinear")
    assert quantize(only(), BOTH, QConfig(op_types="MatMul")).report.quantized == 3
    with pytest.raises(ConfigError, match="no node of the model matches 'inner3'"):
        quantize(only(), BOTH, QConfig(exclude="inner3"))


def test_data_that_goes_on_behind_the_values(tmp_path: Path) -> None:
    model = parse(
        "g (float[N,16] x) => (float[N,16] y) { y = MatMul (x, w0) }", w0=WEIGHTS["w0"]
    )
    [tensor] = model.graph.initializer
    (tmp_path / "w.bin").write_bytes(tensor.raw_data + b"abc")
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="w.bin")
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    assert quantize(tmp_path / "m.onnx", X, "A8W8").report.worst_sqnr > 30


def test_a_wrong_setting_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(store, "LARGE_MODEL", 1)
    with pytest.raises(ConfigError):
        quantize(only(), BOTH, QConfig(exclude="nosuch*"), tmp_path / "out.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("preset", ["A8W8", "INT4", "DYNAMIC", "W8"])
def test_equal_names_in_both_branches(preset: str) -> None:
    model = parse(
        """g (float[N,16] x, bool c) => (float[N,16] y) { y = If (c) <
            then_branch = t () => (float[N,16] r) { [same] r = MatMul (x, w0) },
            else_branch = e () => (float[N,16] r2) { [same] r2 = MatMul (x, w1) }> }""",
        21,
        10,
        **WEIGHTS,
    )
    config = QConfig.of(preset).with_(form="operators")
    result = quantize(model, BOTH if config.measures else None, config).model
    assert min(sqnr(model, result, feeds) for feeds in BOTH[:2]) > 14
