"""The tools of AMD Quark for ONNX run under their names, with options and with positional
arguments.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from quark_onnx.analysis import compare
from quark_onnx.api import quantize
from quark_onnx.config import Override, QuantizationSpec
from quark_onnx.config import QConfig as Native
from quark_onnx.onnx.tools.table import TOOLS, main
from tests.models import normal
from tests.quark_onnx.amd_quark.networks import classifier

#: The tools of AMD Quark 0.13.
NAMES = """
convert_a8w8_npu_to_a8w8_cpu convert_bias_int32_to_int16 convert_custom_ops convert_customqdq_to_qdq
convert_dynamic_to_fixed convert_fp16_to_bf16 convert_fp16_to_bfp16 convert_fp16_to_fp32 convert_fp32_to_bf16
convert_fp32_to_bfp16 convert_fp32_to_fp16 convert_lstm_to_customlstm convert_nchw_to_nhwc convert_onnx_to_onnxtxt
convert_onnxtxt_to_onnx convert_opset_version convert_qdq_to_qop convert_quant_to_float convert_resize_fs_to_pof2s
convert_s8s8_to_u8s8 convert_shared_initializer_to_unique convert_u16s8_to_s16s8 convert_u16u8_to_u8u8 evaluate
fix_shapes insert_clip_bfloat16_qdq print_a16w8_a8w8_nodes random_quantize remove_bf16_cast
remove_initializer_from_input remove_qdq remove_qdq_between_ops remove_qdq_mul_add replace_bfloat16_qdq_cast
replace_inf_weights save_tensor_hist save_weights_hist
"""  # noqa: E501

DATA = [{"x": normal(2, 4, 8, 8, seed=seed)} for seed in range(4)]


def saved(path: Path, model: onnx.ModelProto) -> str:
    onnx.save(model, path)
    return str(path)


def test_every_tool_has_a_row_and_a_module() -> None:
    assert sorted(TOOLS) == sorted(NAMES.split())
    for name in TOOLS:
        assert find_spec(f"quark_onnx.onnx.tools.{name}") is not None
    assert find_spec("quark_onnx.onnx.tools.fix_shape") is None


@pytest.mark.parametrize(
    "name", [name for name, tool in TOOLS.items() if tool.action is None]
)
def test_a_tool_that_does_not_exist_says_what_to_do(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(name, ["--input", "a.onnx", "--output", "b.onnx"]) == 2
    assert capsys.readouterr().err.startswith(f"{name} does not exist here: ")


def test_a_module_runs(tmp_path: Path) -> None:
    source, target = saved(tmp_path / "a.onnx", classifier()), tmp_path / "b.onnx"
    command = [
        sys.executable,
        "-m",
        "quark_onnx.onnx.tools.convert_opset_version",
        source,
        "19",
        str(target),
    ]
    subprocess.run(command, check=True)
    assert onnx.load(target).opset_import[0].version == 19


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("convert_fp32_to_fp16", ["--keep_io_types"]),
        ("convert_fp32_to_bf16", ["--format", "with_cast"]),
        ("convert_fp32_to_bfp16", []),
        ("convert_shared_initializer_to_unique", ["--op_types", "Conv"]),
    ],
)
def test_conversions_keep_the_function(
    name: str, options: list[str], tmp_path: Path
) -> None:
    source, target = saved(tmp_path / "a.onnx", classifier()), tmp_path / "b.onnx"
    assert main(name, [*options, "--input", source, "--output", str(target)]) == 0
    assert compare(classifier(), onnx.load(target), DATA).sqnr > 30


def test_conversions_of_quantized_models(tmp_path: Path) -> None:
    s8s8 = Native(QuantizationSpec("int8"), QuantizationSpec("int8", narrow=True))
    source = saved(tmp_path / "a.onnx", quantize(classifier(), DATA, s8s8).model)
    for name in (
        "convert_s8s8_to_u8s8",
        "convert_qdq_to_qop",
        "remove_qdq",
        "convert_quant_to_float",
    ):
        target = tmp_path / f"{name}.onnx"
        assert main(name, [source, str(target)]) == 0
        assert compare(classifier(), onnx.load(target), DATA).sqnr > 30
    kinds = {
        node.op_type for node in onnx.load(tmp_path / "remove_qdq.onnx").graph.node
    }
    assert kinds.isdisjoint({"QuantizeLinear", "DequantizeLinear"})


def test_shapes_text_and_inputs(tmp_path: Path) -> None:
    model = classifier()
    value = helper.make_tensor_value_info("w", TensorProto.FLOAT, [12, 10])
    model.graph.input.append(value)
    source = saved(tmp_path / "a.onnx", model)
    fixed, text, again, plain = (
        str(tmp_path / name) for name in ("f.onnx", "t.onnxtxt", "g.onnx", "p.onnx")
    )
    assert (
        main(
            "convert_dynamic_to_fixed",
            ["--fix_shapes", "x:[2,4,8,8];y:[2,10]", source, fixed],
        )
        == 0
    )
    assert [
        dim.dim_value
        for dim in onnx.load(fixed).graph.input[0].type.tensor_type.shape.dim
    ] == [2, 4, 8, 8]
    assert (
        main(
            "convert_onnx_to_onnxtxt", ["--input_model", source, "--output_model", text]
        )
        == 0
    )
    assert (
        main(
            "convert_onnxtxt_to_onnx", ["--input_model", text, "--output_model", again]
        )
        == 0
    )
    assert onnx.load(again) == onnx.load(source)
    assert (
        main("remove_initializer_from_input", ["--input", source, "--output", plain])
        == 0
    )
    assert [value.name for value in onnx.load(plain).graph.input] == ["x"]
    onnx.checker.check_model(onnx.load(plain), full_check=True)


def test_infinite_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = classifier()
    array = numpy_helper.to_array(model.graph.initializer[0]).copy()
    array[0, 0, 0, :2] = np.inf, -np.inf
    model.graph.initializer[0].CopyFrom(
        numpy_helper.from_array(array, model.graph.initializer[0].name)
    )
    source, target = saved(tmp_path / "a.onnx", model), str(tmp_path / "b.onnx")
    options = [
        "--input_model",
        source,
        "--output_model",
        target,
        "--replace_inf_value",
        "5",
    ]
    assert main("replace_inf_weights", options) == 0
    repaired = numpy_helper.to_array(onnx.load(target).graph.initializer[0])
    assert list(repaired[0, 0, 0, :2]) == [5, -5]
    assert np.array_equal(repaired[1:], array[1:])
    assert "1 initializer had infinite values" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:random data")
def test_random_quantize(tmp_path: Path) -> None:
    source, target = saved(tmp_path / "a.onnx", classifier()), str(tmp_path / "b.onnx")
    options = [
        "--config",
        "A8W8",
        "--exclude_nodes",
        "conv1;nothing",
        "--exclude_subgraphs",
        "[pool],[fc]",
    ]
    assert (
        main(
            "random_quantize",
            ["--input_model_path", source, "--quantized_model_path", target, *options],
        )
        == 0
    )
    model = onnx.load(target)
    floats = {tensor.name for tensor in model.graph.initializer}
    nodes = {node.name: node for node in model.graph.node}
    assert {
        name: nodes[name].input[1] in floats for name in ("conv1", "conv2", "fc")
    } == {
        "conv1": True,
        "conv2": False,
        "fc": True,
    }


def test_widths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wide = Override("conv2", activation=QuantizationSpec("uint16", symmetric=False))
    source = saved(
        tmp_path / "a.onnx",
        quantize(classifier(), DATA, Native(overrides=(wide,))).model,
    )
    assert main("print_a16w8_a8w8_nodes", [source]) == 0
    assert capsys.readouterr().out.split() == [
        "A16W8:",
        "1",
        "nodes",
        "conv2",
        "A8W8:",
        "2",
        "nodes",
        "conv1",
        "fc",
    ]


def test_weights_of_4_bits_are_none_of_8(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    narrow = Native(weight=QuantizationSpec("int4"))
    source = saved(tmp_path / "a.onnx", quantize(classifier(), DATA, narrow).model)
    assert main("print_a16w8_a8w8_nodes", [source]) == 0
    assert capsys.readouterr().out == "A16W8: 0 nodes\nA8W8: 0 nodes\n"


@pytest.mark.parametrize(
    "name",
    ["convert_onnx_to_onnxtxt", "replace_inf_weights", "remove_initializer_from_input"],
)
def test_a_model_that_does_not_exist(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(tmp_path / "none.onnx"), str(tmp_path / "out.onnx")]
    assert main(name, paths) == 2
    assert "none.onnx" in capsys.readouterr().err


def test_evaluate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = normal(4, 5), normal(4, 5, seed=1)
    for folder, array in (("float", a), ("quantized", b)):
        (tmp_path / folder).mkdir()
        np.save(tmp_path / folder / "y.npy", array)
    folders = ["--baseline_results_folder", str(tmp_path / "float")]
    assert (
        main(
            "evaluate",
            [*folders, "--quantized_results_folder", str(tmp_path / "quantized")],
        )
        == 0
    )
    x, y = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    cosine = x @ y / np.sqrt((x @ x) * (y @ y))
    peak = 10 * np.log10(np.square(x).max() / np.square(x - y).mean())
    expected = (
        f"y.npy: cosine {cosine:.6f}, L2 {np.sqrt(np.square(x - y).sum()):.6g}, PSNR"
        f" {peak:.2f} dB\n"
    )
    assert capsys.readouterr().out == expected


def test_errors_name_the_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            "convert_fp16_to_fp32",
            [str(tmp_path / "no.onnx"), str(tmp_path / "b.onnx")],
        )
        == 2
    )
    assert "no.onnx" in capsys.readouterr().err
    assert main("convert_fp16_to_fp32", [str(tmp_path / "no.onnx")]) == 2
    assert "name the two models" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
