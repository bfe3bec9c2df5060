"""The checker: every rule finds the model that breaks it, and nothing in the models that this
package makes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from quark_onnx import QConfig, convert, quantize
from quark_onnx.common.errors import ConfigError
from quark_onnx.npu import RULES, Check, check, preflight
from tests.models import Feeds, in_constant_nodes, parse, weight

NET = """
    a = Conv <kernel_shape = [3,3], strides = [1,1], pads = [1,1,1,1], dilations = [1,1], group = 1> (x, w, b)
    r = Relu (a)
    p = MaxPool <kernel_shape = [2,2], strides = [2,2], pads = [0,0,0,0]> (r)
    c = Conv <kernel_shape = [3,3], strides = [1,1], pads = [1,1,1,1], dilations = [1,1], group = 1> (p, v)
    s = Add (p, c)
    h = HardSigmoid <alpha = 0.16666667, beta = 0.5> (s)
    m = Mul (s, h)
    j = Concat <axis = 1> (m, c)
    g = GlobalAveragePool (j)
    f = Flatten (g)
    y = Gemm (f, u)
"""  # noqa: E501


def net() -> ModelProto:
    return parse(
        f"g (float[1,3,8,8] x) => (float[1,5] y) {{ {NET} }}",
        w=weight(4, 3, 3, 3) * 3,
        b=weight(4),
        v=weight(4, 4, 3, 3, seed=1) / 9,
        u=weight(8, 5, seed=2),
    )


def images(count: int = 6) -> list[Feeds]:
    random = np.random.default_rng(0)
    return [
        {"x": random.normal(size=(1, 3, 8, 8)).astype(np.float32)} for _ in range(count)
    ]


def xint8(**changes: object) -> ModelProto:
    return quantize(
        net(), images(), QConfig.of("XINT8").with_(**{"target": "npu", **changes})
    ).model


def rules(found: Check) -> set[str]:
    return {finding.rule for finding in found.findings}


@pytest.mark.parametrize("search", [0, 3])
@pytest.mark.parametrize("target", ["npu", "phx", "stx"])
def test_nothing_is_found_in_our_own_models(target: str, search: int) -> None:
    found = check(xint8(search=search, target=target), target)
    assert (found.kind, found.findings) == ("XINT8", ())
    assert (
        str(found) == f"verdict   good: XINT8 model for {target}: 0 errors, 0 warnings"
    )


def test_without_a_target_scales_go_their_own_ways() -> None:
    assert {"C1", "C2"} <= rules(check(xint8(target="", search=0), "phx"))


def scale_of(model: ModelProto, tensor: str, factor: float, *, only: str = "") -> None:
    """Multiply the scale of the codes that are written for a tensor, or only where they are read."""  # noqa: E501
    for node in [
        n
        for n in model.graph.node
        if n.op_type in (only or "QuantizeLinear", "DequantizeLinear")
    ]:
        if not any(tensor in name for name in node.input[:1]):
            continue
        [old] = [each for each in model.graph.initializer if each.name == node.input[1]]
        new = numpy_helper.from_array(
            numpy_helper.to_array(old) * np.float32(factor), f"{node.name}_{factor}"
        )
        model.graph.initializer.append(new)
        node.input[1] = new.name


def power(model: ModelProto) -> None:
    scale_of(model, "m", 1.1)


def zero_point(model: ModelProto) -> None:
    node = next(
        node
        for node in model.graph.node
        if node.op_type == "QuantizeLinear" and node.input[0] == "x"
    )
    for name in (node.input[2],):
        [old] = [each for each in model.graph.initializer if each.name == name]
        old.CopyFrom(numpy_helper.from_array(np.asarray(3, np.int8), name))


def unlike(model: ModelProto) -> None:
    scale_of(model, "x", 2.0, only="DequantizeLinear")


def computed(model: ModelProto) -> None:
    node = next(node for node in model.graph.node if node.op_type == "QuantizeLinear")
    model.graph.node.insert(
        0, parse("g (float s) => (float t) { t = Abs (s) }").graph.node[0]
    )
    model.graph.node[0].input[0], model.graph.node[0].output[0] = (
        node.input[1],
        "computed",
    )
    node.input[1] = "computed"


def batch(model: ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2


def dynamic(model: ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "H"


def attribute(kind: str, name: str) -> Callable[[ModelProto], None]:
    def drop(model: ModelProto) -> None:
        node = next(node for node in model.graph.node if node.op_type == kind)
        node.attribute.remove(
            next(each for each in node.attribute if each.name == name)
        )

    return drop


def shared(model: ModelProto) -> None:
    convs = [node for node in model.graph.node if node.op_type == "Conv"]
    convs[0].input[1] = convs[1].input[1]


def inputs(model: ModelProto) -> None:
    first = model.graph.initializer[0]
    model.graph.input.add().CopyFrom(
        parse("g (float[1] i) => (float[1] o) { o = Abs (i) }").graph.input[0]
    )
    model.graph.input[-1].name = first.name


def single(model: ModelProto) -> None:
    for node in [node for node in model.graph.node if node.op_type == "Conv"]:
        node.op_type = "ConvTranspose"


def missing(model: ModelProto) -> None:
    model.graph.node[-1].input[0] = "nowhere"


def unwritten(model: ModelProto) -> None:
    model.graph.output[0].name = "nowhere"


def twice(model: ModelProto) -> None:
    model.graph.node.extend([model.graph.node[-1]])


def narrow(model: ModelProto) -> None:
    model.graph.node.append(
        helper.make_node("Cast", ["x"], ["narrow"], to=TensorProto.BFLOAT16)
    )


def recent(model: ModelProto) -> None:
    model.opset_import[0].version = 21


BROKEN: dict[str, tuple[Callable[[ModelProto], None], str]] = {
    "a scale that is no power of two": (power, "S1"),
    "a zero point": (zero_point, "S2"),
    "a computed scale": (computed, "S4"),
    "other scales": (unlike, "S5"),
    "a batch of 2": (batch, "G2"),
    "a dynamic height": (dynamic, "G1"),
    "no strides": (attribute("Conv", "strides"), "G3"),
    "no pads": (attribute("MaxPool", "pads"), "G4"),
    "a shared weight": (shared, "G5"),
    "an initializer as an input": (inputs, "G7"),
    "no convolution": (single, "G6"),
    "a tensor that nothing computes": (missing, "G9"),
    "an output that nothing computes": (unwritten, "G9"),
    "a tensor that two nodes compute": (twice, "G9"),
    "a tensor of bfloat16": (narrow, "G10"),
    "an opset above 17": (recent, "G11"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_each_rule_finds_the_model_that_breaks_it(case: str) -> None:
    spoil, rule = BROKEN[case]
    model = xint8(search=0)
    spoil(model)
    found = check(model, "phx")
    assert rule in rules(found)
    finding = next(each for each in found.findings if each.rule == rule)
    assert (
        finding.figures
        and finding.severity in str(finding)
        and RULES[rule].source in str(finding)
    )
    assert [each.severity for each in found.findings] == sorted(
        each.severity for each in found.findings
    )


# A Constant node cannot compute an input.
@pytest.mark.parametrize("case", sorted({"", *BROKEN} - {"an initializer as an input"}))
def test_constants_may_be_nodes(case: str) -> None:
    model = xint8(search=0)
    if case:
        BROKEN[case][0](model)
    expected = check(model, "phx")
    found = check(in_constant_nodes(model), "phx")
    assert (found.kind, rules(found)) == (expected.kind, rules(expected))


def test_a_weight_that_is_an_input_too_has_no_batch() -> None:
    model = net()
    model.graph.input.append(
        helper.make_tensor_value_info("v", TensorProto.FLOAT, (4, 4, 3, 3))
    )
    assert rules(check(model, "stx")) == {"G7"}


def test_a_node_that_computes_nothing_is_passed_over() -> None:
    for model in (net(), xint8(search=0)):
        model.opset_import.append(helper.make_opsetid("mine", 1))
        model.graph.node.append(helper.make_node("Print", ["x"], [], domain="mine"))
        assert (
            not check(model, "phx").findings
            and preflight(model, "phx").counts["CPU"] == 1
        )


def test_rules_that_can_be_repaired_name_the_command() -> None:
    without = {"G6", "G9"}
    assert {
        name for name, rule in RULES.items() if "quark-onnx " not in rule.fix
    } == without


@pytest.mark.parametrize(("tensor", "rule"), [("m", "C1"), ("p", "C2"), ("g", "C2")])
def test_positions_that_do_not_fit(tensor: str, rule: str) -> None:
    model = xint8(search=0)
    writer = next(
        node
        for node in model.graph.node
        if node.op_type == "QuantizeLinear" and node.input[0] == tensor
    )
    scale_of(model, writer.output[0], 4.0)
    scale_of(model, tensor, 4.0, only="QuantizeLinear")
    assert rule in rules(check(model, "phx"))


def test_operators_on_codes() -> None:
    found = check(convert(xint8(search=0), "qdq-to-qoperator").model, "phx")
    assert (
        "S8" in rules(found)
        and RULES["S8"].fix == "quark-onnx convert --to qoperator-to-qdq"
    )


def test_other_formats() -> None:
    wide = quantize(
        net(), images(), QConfig.of("A16W8").with_(per_channel=True, target="stx")
    ).model
    assert check(wide, "stx").kind == "integer" and not check(wide, "stx").findings
    assert {"S1", "S3", "S6"} <= rules(check(wide, "phx"))
    assert check(net(), "stx").kind == "float" and not check(net(), "stx").findings


def test_operators_that_end_the_process() -> None:
    lstm = parse(
        "g (float[1,1,3] x) => (float[1,1,1,4] y) { y = LSTM <hidden_size = 4> (x, w,"
        " r) }",
        w=weight(1, 16, 3),
        r=weight(1, 16, 4),
    )
    assert rules(check(lstm, "stx")) == {"G8"}


def test_an_unknown_target() -> None:
    with pytest.raises(ConfigError, match="unknown target 'stix'; did you mean 'stx'"):
        check(net(), "stix")
    with pytest.raises(ConfigError, match="unknown target 'stix'"):
        QConfig.of("XINT8").with_(target="stix")


def test_vendor_types() -> None:
    model = xint8(search=0)
    assert {
        each.data_type
        for each in model.graph.initializer
        if each.name.endswith("zero_point")
    } <= {
        TensorProto.INT8,
        TensorProto.INT32,
    }
