"""Engines as targets: files keep their rules, each rule finds a file that breaks it, and what an
engine does not take is refused before the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec

import numpy as np
import pytest
from onnx import ModelProto, helper

from quark_onnx import QConfig, convert, npu, on_engine, quantize
from quark_onnx.common.errors import ConfigError, ConstraintError
from quark_onnx.common.registry import TARGETS
from quark_onnx.engines import selected
from quark_onnx.graph import Graph
from quark_onnx.graph.node import QUANTIZE
from quark_onnx.targets import RULES, Check, check
from quark_onnx.targets.target import npu_names
from quark_onnx.writing.fusion_barriers import describe_barriers, drop_barriers
from tests.models import (
    Feeds,
    branches,
    conv_relu,
    detector_head,
    kinds,
    normal,
    parse,
    residual,
    run,
    samples,
    transformer_block,
    weight,
)

ENGINES = [name for name in TARGETS if not TARGETS[name].is_npu]
#: Engines that need no Min beside pairs, which onnxruntime's fusions do.
OTHERS = ("openvino", "tensorrt", "qnn")


def mobile() -> ModelProto:
    """A pointwise and a depthwise convolution with a bounded activation, and a classifier."""
    return parse(
        """g (float[N,3,8,8] x) => (float[N,5] y) {
            a = Conv (x, w) r = Clip (a, zero, six)
            d = Conv <group = 8, pads = [1,1,1,1]> (r, u, b) s = Clip (d, zero, six)
            p = GlobalAveragePool (s) f = Flatten (p) y = Gemm (f, v, c)
        }""",
        w=weight(8, 3, 1, 1),
        u=weight(8, 1, 3, 3),
        b=normal(8),
        v=weight(8, 5),
        c=normal(5),
        zero=np.float32(0),
        six=np.float32(6),
    )


def recurrent() -> ModelProto:
    """An LSTM between two products."""
    return parse(
        """g (float[6,1,8] x) => (float[6,1,5] y) {
            a = MatMul (x, k)
            h, last, state = LSTM <hidden_size = 4> (a, w, r, b)
            s = Squeeze (h, one) y = MatMul (s, v)
        }""",
        k=weight(8, 8),
        w=weight(1, 16, 8),
        r=weight(1, 16, 4),
        b=normal(1, 32, scale=0.1),
        v=weight(4, 5),
        one=np.int64([1]),
    )


def styled() -> ModelProto:
    """Convolutions around an InstanceNormalization with an activation."""
    return parse(
        """g (float[N,3,8,8] x) => (float[N,4,6,6] y) {
            a = Conv <pads = [1,1,1,1]> (x, w)
            n = InstanceNormalization (a, gain, shift) r = Relu (n)
            y = Conv (r, v)
        }""",
        w=weight(8, 3, 3, 3),
        gain=np.abs(normal(8)) + np.float32(0.5),
        shift=normal(8, seed=1),
        v=weight(4, 8, 3, 3),
    )


NETS: dict[str, Callable[[], ModelProto]] = {
    "style": styled,
    "classifier": residual,
    "depthwise": mobile,
    "transformer": transformer_block,
    "detector": detector_head,
    "recurrent": recurrent,
}


#: Rules that files break where accuracy asks for it: a residual stream stays float.
WARNINGS = {("transformer", "qnn"): {"qnn.paired"}}


def written(model: ModelProto, target: str, **changes: object) -> ModelProto:
    """The model as its target's first preset writes it."""
    config = QConfig.of(TARGETS[target].presets[0]).with_(target=target, **changes)
    return quantize(model, samples(model, 4), config).model


@pytest.mark.parametrize("target", ENGINES)
@pytest.mark.parametrize("net", NETS)
def test_files_keep_the_rules(net: str, target: str) -> None:
    model = NETS[net]()
    result = written(model, target)
    found = check(result, target)
    assert found.errors == 0, found.findings
    assert rules(found) == WARNINGS.get((net, target), set())
    assert any(node.op_type in QUANTIZE for node in result.graph.node)
    # Without fusions, which are wrong for some of the files.
    for feeds in samples(model, 2):
        (expected,) = run(model, feeds)
        (found,) = run(result, feeds)
        error = np.square(expected - found).sum()
        assert 10 * np.log10(np.square(expected).sum() / error) > 20


@pytest.mark.skipif(find_spec("openvino") is None, reason="openvino is not installed")
@pytest.mark.parametrize("net", NETS)
def test_openvino_computes_what_its_file_says(net: str) -> None:
    model = NETS[net]()
    result = written(model, "openvino")
    with on_engine("openvino"):
        engine = selected()
        assert engine is not None
        session = engine.open(result)
        for feeds in samples(model, 2):
            (found,) = session.run(None, feeds)
            (expected,) = run(result, feeds)
            error = np.square(expected - found).sum()
            # Another order of sums may round a value to the next code.
            assert error < 1e-2 * np.square(expected).sum()


# Rules


def float_result(target: str) -> ModelProto:
    """A convolution on codes whose result stays float."""
    model = written(conv_relu(), target)
    last = next(node for node in model.graph.node if node.op_type == "Conv")
    writer = next(node for node in model.graph.node if node.input[0] == last.output[0])
    reader = next(
        node for node in model.graph.node if node.input[0] == writer.output[0]
    )
    output = reader.output[0]
    for node in (writer, reader):
        model.graph.node.remove(node)
    last.output[0] = output
    return model


def broken() -> Iterator[tuple[str, Callable[[], ModelProto]]]:
    """Yield each rule with a model that breaks it."""

    def preset(name: str, **changes: object) -> Callable[[], ModelProto]:
        def make() -> ModelProto:
            model = residual()
            config = QConfig.of(name).with_(**changes)
            return quantize(model, samples(model, 4), config).model

        return make

    def vendor() -> ModelProto:
        return preset("A8W8", contrib=True)()

    def on_codes() -> ModelProto:
        return convert(preset("A8W8")(), "qdq-to-qoperator").model

    def gated() -> ModelProto:
        model = parse(
            """g (float[1,2,4,4] x) => (float[1,3,4,4] y) {
                c = Conv (x, w)  g = Sigmoid (c)  y = Mul (c, g)
            }""",
            w=normal(3, 2, 1, 1),
        )
        return quantize(model, samples(model, 4), "A8W8").model

    def padded_means() -> ModelProto:
        model = parse(
            """g (float[1,2,4,4] x) => (float[1,2,4,4] y) {
                y = AveragePool <kernel_shape = [3,3], pads = [1,1,1,1],
                    count_include_pad = 1> (x)
            }"""
        )
        return quantize(model, samples(model, 4), "A8W8").model

    def small_products() -> ModelProto:
        model = parse(
            "g (float[1,4] x) => (float[1,2] y) { h = MatMul (x, w)  y = MatMul (h, u) }",
            w=normal(4, 3),
            u=normal(3, 2, seed=1),
        )
        return quantize(model, samples(model, 4), "A8W8").model

    def int16_biases() -> ModelProto:
        return preset("A8W8", bias="int16")()

    yield "openvino.activations", preset("S8S8")
    yield "openvino.weights", preset("U8U8")
    yield "openvino.biases", int16_biases
    yield "openvino.floats", lambda: written(recurrent(), "cpu")
    yield "openvino.fused", gated
    yield "openvino.padded_means", padded_means
    yield "openvino.small_products", small_products
    yield "openvino.codes", vendor
    yield "tensorrt.activations", preset("A8W8", bias=False)
    yield "tensorrt.weights", preset("U8U8", bias=False)
    yield "tensorrt.zero_points", preset("A8W8", bias=False)
    yield "tensorrt.biases", preset("S8S8")
    yield "tensorrt.codes", vendor
    yield "tensorrt.refused", on_codes
    yield "qnn.activations", preset("A16W8")
    yield "qnn.weights", preset("INT16")
    yield "qnn.biases", int16_biases
    yield "qnn.channels", preset("A8W8")
    yield "qnn.one_scale", preset("A8W8", per_channel=False)
    yield "qnn.codes", lambda: convert(preset("A8W8")(), "qdq-to-qoperator").model
    yield "qnn.refused", branches
    yield "qnn.static", preset("A8W8")
    yield "qnn.paired", lambda: float_result("qnn")
    yield "web.activations", preset("S8S8")


BROKEN = dict(broken())


def rules(found: Check) -> set[str]:
    return {finding.rule for finding in found.findings}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_found(rule: str) -> None:
    target, _, field = rule.partition(".")
    found = check(BROKEN[rule](), target)
    if rule == "qnn.codes":  # QLinearAdd of onnxruntime; QLinearConv is ONNX's own
        assert {"qnn.codes", "qnn.refused"} & rules(found)
        return
    assert rule in rules(found), (field, rules(found))
    [problem] = [each for each in found.problems.problems if each.label == rule]
    assert problem.sources == [RULES[rule].source] and problem.remedy


def test_every_rule_of_an_engine_has_a_model_that_breaks_it() -> None:
    names = {rule for rule in RULES if rule.partition(".")[0] in ENGINES}
    assert names == set(BROKEN)


def test_each_bound_of_an_engine_is_a_rule() -> None:
    """What ``Takes`` bounds is what the checker checks."""
    for name in ENGINES:
        takes = TARGETS[name].takes
        bounded = {
            field
            for field in (
                "activations",
                "weights",
                "biases",
                "channels",
                "one_scale",
                "floats",
            )
            if getattr(takes, field)
        }
        bounded |= {
            field for field in ("refused", "static", "paired") if getattr(takes, field)
        }
        assert bounded <= {
            rule.partition(".")[2] for rule in RULES if rule.startswith(name)
        }


# Refusals


@pytest.mark.parametrize(
    ("target", "changes", "told"),
    [
        ("openvino", {"preset": "S8S8"}, "of uint8, not int8; take --preset A8W8"),
        ("openvino", {"preset": "U8U8"}, "weights of int8, not uint8"),
        ("openvino", {"preset": "INT4"}, "in codes, and config is W4"),
        ("openvino", {"preset": "DYNAMIC"}, "constant scales"),
        ("openvino", {"contrib": True}, "contrib is true: leave it out"),
        ("openvino", {"form": "operators"}, "Q/DQ pairs, and form is operators"),
        ("openvino", {"bias": "int16"}, "bias is int16: leave it out"),
        ("openvino", {"optimizers": "auto_mixed_precision"}, "take to=float"),
        ("tensorrt", {}, "of int8, not uint8; take --preset S8S8"),
        ("tensorrt", {"preset": "INT4"}, "take --preset S8S8"),
        ("qnn", {"preset": "A16W8"}, "of uint8, not uint16"),
        (
            "qnn",
            {"overrides": [{"nodes": ["*"], "activation": "uint16"}]},
            "not uint16",
        ),
        ("web", {"preset": "S8S8"}, "of uint8, not int8"),
        (
            "tensorrt",
            {"preset": "S8S8", "tensors": [{"tensors": "a", "dtype": "uint8"}]},
            "codes of int8.*, not uint8, which tensors a have",
        ),
    ],
    ids=str,
)
def test_what_an_engine_does_not_take_is_refused(
    target: str, changes: dict[str, object], told: str
) -> None:
    def unread() -> Iterator[Feeds]:
        raise AssertionError("the data is read")
        yield {}

    config = QConfig.of({"target": target, **changes})
    with pytest.raises(ConfigError, match=rf"^{target} \(.*{told}"):
        quantize(residual(), unread, config)


def test_operators_that_an_engine_does_not_have_are_refused() -> None:
    model = parse(
        """<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
        g (float[1,4] x) => (float[1,3] y) {
            a = MatMul (x, w) g = com.microsoft.Gelu (a) y = MatMul (g, u)
        }""",
        w=weight(4, 4),
        u=weight(4, 3),
    )
    config = QConfig.of("S8S8").with_(target="tensorrt")
    with pytest.raises(
        ConstraintError, match=r"tensorrt.*nothing was quantized:\n.*com.microsoft.Gelu"
    ):
        quantize(model, samples(model, 2), config)


def test_sizes_become_static_where_an_engine_needs_them() -> None:
    for target, size in (("qnn", 1), ("openvino", 0)):
        [value] = written(residual(), target).graph.input
        assert value.type.tensor_type.shape.dim[0].dim_value == size


@pytest.mark.parametrize("op_type", ["Identity", "Relu"])
def test_a_float_result_has_static_sizes_too(op_type: str) -> None:
    """A model in which nothing is quantized keeps the rules of its target."""
    model = parse(f"g (float[N,4] x) => (float[N,4] y) {{ y = {op_type} (x) }}")
    config = QConfig.of("A8W8").with_(target="qnn", exclude=("*",))
    result = quantize(model, samples(model, 4), config)
    assert check(result.model, "qnn").findings == ()
    assert any("prepared for qnn" in note for note in result.report.notes)


def test_an_engine_is_no_processor() -> None:
    assert set(npu_names()) >= {"npu", "phx", "hpt", "stx", "krk"}
    assert not set(npu_names()) & set(ENGINES)
    for function in (npu.preflight, npu.legalize, npu.choose):
        with pytest.raises(
            ConfigError, match=r"openvino is OpenVINO .* one of npu, phx"
        ):
            function(residual(), "openvino")


# Forms that serve onnxruntime alone


def attention() -> ModelProto:
    """A Softmax of small probabilities, where onnxruntime's operator on codes wraps around."""
    return parse(
        """g (float[1,4,512] x) => (float[1,4,6] y) {
            p = Softmax <axis = -1> (x) y = MatMul (p, w)
        }""",
        w=weight(512, 6),
    )


def barriers(model: ModelProto) -> int:
    return kinds(model).count("Min")


@pytest.mark.parametrize("target", ["", "cpu", "web", *OTHERS])
def test_barriers_are_written_for_onnxruntime_alone(target: str) -> None:
    model = attention()
    preset = TARGETS[target].presets[0] if target else "A8W8"
    config = QConfig.of(preset).with_(target=target)
    result = quantize(model, samples(model, 4), config)
    named = [note for note in result.report.notes if "Min" in note]
    if target in OTHERS:
        assert barriers(result.model) == 0 and named == []
    elif config.activation is not None:
        assert barriers(result.model) == 1 and len(named) == 1
    # The measured error is that of the codes, with or without barriers.
    assert result.report.worst_sqnr > 20
    names = {name for node in result.model.graph.node for name in node.input}
    assert all(tensor.name in names for tensor in result.model.graph.initializer)


@pytest.mark.parametrize("target", OTHERS)
def test_without_barriers_the_values_are_the_same(target: str) -> None:
    model = attention()
    preset = TARGETS[target].presets[0]
    plain = quantize(model, samples(model, 4), QConfig.of(preset).with_(target=target))
    for feeds in samples(model, 2):
        (expected,) = run(model, feeds)
        (found,) = run(plain.model, feeds)
        assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


def test_a_min_of_the_model_stays() -> None:
    """Where it bounds values that the codes reach."""
    model = parse(
        """g (float[1,4] x) => (float[1,3] y) {
            m = Min (x, half) a = MatMul (m, w) y = Relu (a)
        }""",
        w=weight(4, 3),
        half=np.float32(0.5),
    )
    result = written(model, "openvino")
    for feeds in samples(model, 4):
        (expected,) = run(model, feeds)
        (found,) = run(result, feeds)
        assert np.abs(found - expected).max() < 0.1


def test_a_target_of_the_cpu_writes_what_none_writes() -> None:
    """But for metadata, and sums before a normalization."""
    for net in ("classifier", "depthwise", "detector", "recurrent"):
        model = NETS[net]()
        default = quantize(model, samples(model, 4), "A8W8").model
        cpu = written(model, "cpu")
        for each in (default, cpu):
            del each.metadata_props[:]
        assert cpu.SerializeToString(deterministic=True) == default.SerializeToString(
            deterministic=True
        )


@pytest.mark.parametrize("text", ["a = Abs (x) m = Min (a, six)", "m = Min (x, wide)"])
def test_a_min_stays_whose_bound_or_shape_others_read(text: str) -> None:
    """A caller reads the bounded values, which no codes bound; or the rank is that of the bound."""
    is_wide = "wide" in text
    shape, outputs = ("1,1,4", "") if is_wide else ("4", "float[4] m, ")
    model = parse(
        f"""g (float[4] x) => ({outputs}float[{shape}] y) {{
            {text} q = QuantizeLinear (m, s, z) y = DequantizeLinear (q, s, z)
        }}""",
        six=np.float32(6),
        wide=np.full((1, 1, 1), 6, np.float32),
        s=np.float32(0.02),
        z=np.uint8(0),
    )
    graph = Graph.of(model)
    assert drop_barriers(graph) == 0 and describe_barriers(graph) == []
    feeds = {"x": np.float32([1, 2, 5, 9])}
    for found, expected in zip(
        run(graph.to_model(), feeds), run(model, feeds), strict=True
    ):
        assert np.array_equal(found, expected)


def biased_product(zeros: list[int]) -> ModelProto:
    """A product whose bias is an Add of int32 codes, and results with a zero point each."""
    return parse(
        """g (float[1,4] x) => (float[1,3] y) {
            xq = QuantizeLinear (x, s, z) xd = DequantizeLinear (xq, s, z)
            wd = DequantizeLinear (w, s, z) a = MatMul (xd, wd)
            bd = DequantizeLinear (b, s, n) p = Add (a, bd)
            q = QuantizeLinear <axis = 1> (p, t, u) y = DequantizeLinear <axis = 1> (q, t, u)
        }""",
        w=np.ones((4, 3), np.int8),
        b=np.ones(3, np.int32),
        s=np.float32(0.1),
        z=np.int8(0),
        n=np.int32(0),
        t=np.full(3, 0.1, np.float32),
        u=np.int8(zeros),
    )


def test_a_bias_of_its_own_is_a_bias() -> None:
    """Codes of int32 in an Add after a MatMul break the rule of biases, not that of activations."""
    for target, expected in (("openvino", []), ("tensorrt", ["a bias of int32"])):
        findings = check(biased_product([0, 0, 0]), target).findings
        of_bias = [each.figures for each in findings if "int32" in each.figures]
        assert of_bias == expected
        assert all(
            "biases" in each.rule for each in findings if "int32" in each.figures
        )


def test_the_zero_point_that_breaks_the_rule_is_named() -> None:
    findings = check(biased_product([0, 5, 0]), "tensorrt").findings
    assert "a zero point of 5" in [each.figures for each in findings]


@pytest.mark.parametrize("target", ENGINES)
def test_a_function_of_the_model_is_no_foreign_operator(target: str) -> None:
    """Engines inline functions, whose nodes are checked."""
    model = parse("g (float[1,4] x) => (float[1,4] y) { r = Relu (x) y = Abs (r) }")
    relu = model.graph.node[0]
    function = helper.make_function(
        "local",
        "Bound",
        ["a"],
        ["b"],
        [helper.make_node("Relu", ["a"], ["b"])],
        model.opset_import,
    )
    model.functions.append(function)
    model.opset_import.append(helper.make_opsetid("local", 1))
    relu.op_type, relu.domain = "Bound", "local"
    assert check(model, target).findings == ()
