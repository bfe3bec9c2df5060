"""Models with AMD's operators, under any of their names and without bodies, run as those of ONNX
do.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper

from quark_onnx import QConfig, analyze, compare, convert, npu, quantize
from quark_onnx.common.errors import ModelError
from quark_onnx.running.function_bodies import OLD_DOMAIN, RENAMED, with_bodies
from tests.models import Feeds, parse, run, weight

ATTRIBUTES = (
    "kernel_shape = [3,3], strides = [1,1], pads = [1,1,1,1], dilations = [1,1],"
    " group = 1"
)


def network(opset: int = 17) -> ModelProto:
    text = (
        f"g (float[1,4,6,6] x) => (float[1,4,6,6] y) {{ a = Conv <{ATTRIBUTES}> (x, w)"
        " y = Relu (a) }"
    )
    return parse(text, opset=opset, w=weight(4, 4, 3, 3))


def data() -> list[Feeds]:
    return [
        {"x": np.random.default_rng(seed).normal(size=(1, 4, 6, 6)).astype(np.float32)}
        for seed in range(3)
    ]


def bare(model: ModelProto, *, old: bool) -> ModelProto:
    """The model as AMD's tools write it: without bodies, its pairs those of the vendor."""
    result = ModelProto()
    result.CopyFrom(model)
    del result.functions[:]
    names = {new: old_name for old_name, new in RENAMED.items()}
    for node in result.graph.node:
        if node.op_type.endswith("tizeLinear") and not node.op_type.startswith(
            "Extended"
        ):
            node.op_type = f"Extended{node.op_type}"
        if node.op_type in names:
            node.op_type, node.domain = (
                (names[node.op_type], OLD_DOMAIN)
                if old
                else (node.op_type, "com.amd.quark")
            )
    result.opset_import.extend(
        helper.make_opsetid(name, 1) for name in (OLD_DOMAIN, "com.amd.quark")
    )
    return result


@pytest.mark.parametrize("old", [False, True], ids=["quark", "vitis"])
@pytest.mark.parametrize("preset", ["XINT8", "A16W8", "BFP16", "MXINT8"])
def test_everything_runs_them(preset: str, old: bool, tmp_path: Path) -> None:
    made = quantize(network(), data(), QConfig.of(preset)).model
    model = bare(made, old=old)
    onnx.save(model, tmp_path / "model.onnx")
    np.testing.assert_array_equal(
        run(with_bodies(model), data()[0])[0], run(made, data()[0])[0]
    )
    assert (
        compare(network(), tmp_path / "model.onnx", data()).sqnr
        == compare(network(), made, data()).sqnr
    )
    assert analyze(network(), model, data()).tensors
    legal = npu.legalize(tmp_path / "model.onnx", output=tmp_path / "legal.onnx").model
    assert {node.domain for node in legal.graph.node} == {
        node.domain for node in model.graph.node
    }
    assert not legal.functions


@pytest.mark.parametrize("opset", [11, 13, 16])
def test_pairs_of_earlier_opsets_are_those_of_onnx(opset: int) -> None:
    made = quantize(
        network(opset), data(), QConfig.of("XINT8").with_(max_opset=opset)
    ).model
    assert made.opset_import[0].version == opset
    np.testing.assert_array_equal(
        run(with_bodies(bare(made, old=True)), data()[0])[0], run(made, data()[0])[0]
    )


def test_blocks_of_an_earlier_opset_are_an_error() -> None:
    model = bare(quantize(network(), data(), QConfig.of("BFP16")).model, old=True)
    model.opset_import[0].version = 13
    with pytest.raises(
        ModelError,
        match=r"the vendor's operators of the model cannot be run: .* opsets 17 to",
    ):
        with_bodies(model)


def test_what_lacks_nothing_is_itself() -> None:
    for model in (network(), quantize(network(), data(), QConfig.of("BFP16")).model):
        assert with_bodies(model) is model


def test_names_of_today_and_of_before() -> None:
    made = quantize(network(), data(), QConfig.of("XINT8")).model
    before = convert(made, ["vendor-qdq", "vitis-names"]).model
    pairs = {node.op_type for node in before.graph.node if node.domain == OLD_DOMAIN}
    assert (
        pairs == {"VitisQuantizeLinear", "VitisDequantizeLinear"}
        and not before.functions
    )
    assert {value.name for value in before.graph.value_info} >= {"a"}
    today = convert(before, "quark-names").model
    np.testing.assert_array_equal(run(today, data()[0])[0], run(made, data()[0])[0])
    assert {node.domain for node in today.graph.node} == {"", "com.amd.quark"}
    blocks = convert(
        quantize(network(), data(), QConfig.of("BFP16")).model, "vitis-names"
    ).model
    assert {node.op_type for node in blocks.graph.node if node.domain} == {
        "BFPFixNeuron"
    }


@pytest.mark.parametrize(
    "conversions",
    [["vendor-qdq"], ["vendor-qdq", "vitis-names"]],
    ids=["quark", "vitis"],
)
@pytest.mark.parametrize("opset", [13, 17])
def test_operators_in_subgraphs_run(conversions: list[str], opset: int) -> None:
    """AMD's operators get their bodies wherever they are, also in an If within an If."""
    inner = "h = MatMul (x, w) a = Relu (h) r = MatMul (a, w)"
    text = f"""g (float[4,4] x, bool c) => (float[4,4] y) {{ y = If (c) <
        then_branch = t () => (float[4,4] p) {{ p = If (c) <
            then_branch = tt () => (float[4,4] r) {{ {inner} }},
            else_branch = te () => (float[4,4] s) {{ s = Sin (x) }}> }},
        else_branch = e () => (float[4,4] q) {{ q = Cos (x) }}> }}"""
    model = parse(text, opset=opset, w=weight(4, 4))
    samples = [
        {
            "x": np.random.default_rng(i).normal(size=(4, 4)).astype(np.float32),
            "c": np.array(True),
        }
        for i in (0, 1)
    ]
    made = quantize(model, samples, QConfig.of("A8W8").with_(max_opset=opset)).model
    vendors = convert(made, conversions).model
    del vendors.functions[:]
    np.testing.assert_array_equal(
        run(with_bodies(vendors), samples[0])[0], run(made, samples[0])[0]
    )
    assert compare(model, vendors, samples).sqnr > 25


@pytest.mark.parametrize("name", ["Constant", "NoSuchOperator"])
def test_an_operator_without_inputs_stays(name: str) -> None:
    """Whoever opens the model refuses it: no operator of the domain is without inputs."""
    model = parse("g () => (float[2] y) { y = Identity (c) }", c=weight(2))
    model.graph.node.add(op_type=name, domain="com.amd.quark", output=["z"])
    made = with_bodies(model)
    assert (name, "com.amd.quark") in [
        (node.op_type, node.domain) for node in made.graph.node
    ]
