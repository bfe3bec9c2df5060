"""engine_floats: for OpenVINO, functions after layers and attention run in float."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

from quark_onnx import Override, QConfig, compare, on_engine, quantize
from quark_onnx.targets import check
from tests.models import kinds, normal, parse, run, samples, weight

OPENVINO = QConfig.of("A8W8").with_(target="openvino")
FUNCTIONS = {
    "gated": "g = Sigmoid (c)  a = Mul (c, g)",
    "gated hard": "g = HardSigmoid (c)  a = Mul (c, g)",
    "alone": "a = HardSwish (c)",
    "leaky": "a = LeakyRelu (c)",
    "after Relu": "r = Relu (c)  a = Sigmoid (r)",
    "after Clip": "r = Clip (c)  a = Tanh (r)",
}
#: The function is not all that reads the layer's result: the result is quantized for its readers.
SHARED = "g = Sigmoid (c)  d = Neg (c)  a = Mul (d, g)"


def network(text: str) -> ModelProto:
    """Two convolutions with a function from c to a between them."""
    return parse(
        f"""g (float[1,4,6,6] x) => (float[1,3,6,6] y) {{
            c = Conv <pads = [1, 1, 1, 1]> (x, w)
            {text}
            y = Conv (a, u)
        }}""",
        w=normal(4, 4, 3, 3),
        u=normal(3, 4, 1, 1, seed=1),
        zero=np.float32(0),
    )


def attention() -> ModelProto:
    return parse(
        """g (float[1,6,8] x) => (float[1,6,8] y) {
            q = MatMul (x, wq)  k = MatMul (x, wk)  v = MatMul (x, wv)
            t = Transpose <perm = [0, 2, 1]> (k)
            s = MatMul (q, t)
            r = Mul (s, scale)
            p = Softmax (r)
            o = MatMul (p, v)
            y = MatMul (o, wo)
        }""",
        wq=weight(8, 8),
        wk=weight(8, 8, seed=1),
        wv=weight(8, 8, seed=2),
        wo=weight(8, 8, seed=3),
        scale=np.float32(0.3),
    )


def quantized_tensors(model: ModelProto) -> set[str]:
    """Return the float tensors that a QuantizeLinear reads."""
    return {n.input[0] for n in model.graph.node if n.op_type == "QuantizeLinear"}


def test_factors_of_equalization_run_with_the_layer_and_its_function() -> None:
    reach = np.exp2(np.linspace(-5, 3, 16)).astype(np.float32).reshape(-1, 1, 1, 1)
    model = parse(
        """g (float[1,3,12,12] x) => (float[1,4,10,10] y) {
            c = Conv (x, w, b)
            g = Sigmoid (c)  a = Mul (c, g)
            d = Conv <group = 16> (a, v)
            y = Conv (d, u)
        }""",
        w=normal(16, 3, 1, 1) * reach,
        b=normal(16, seed=1) * reach.ravel(),
        v=normal(16, 1, 3, 3, seed=2) / reach,
        u=normal(4, 16, 1, 1, seed=3),
    )
    data = samples(model, 16)
    plain = quantize(model, data, OPENVINO.with_(equalize=False))
    found = quantize(model, data, OPENVINO)
    kinds = [node.op_type for node in found.model.graph.node]
    assert (kinds.count("Conv"), kinds.count("Mul")) == (3, 2)
    assert quantized_tensors(found.model) == {"x", "a", "d"}
    assert not check(found.model, "openvino").findings
    assert found.report.worst_sqnr > plain.report.worst_sqnr + 3


@pytest.mark.parametrize("text", FUNCTIONS.values(), ids=FUNCTIONS)
def test_no_pair_separates_a_layer_from_its_function(text: str) -> None:
    model = network(text)
    found = quantize(model, samples(model, 8), OPENVINO).model
    assert quantized_tensors(found) == {"x", "a"}
    assert not check(found, "openvino").findings
    # Elsewhere the layer runs on integers only where its result is quantized.
    usual = quantize(model, samples(model, 8), "A8W8").model
    assert quantized_tensors(usual) & {"c", "r"}
    rules = [finding.rule for finding in check(usual, "openvino").findings]
    assert rules == ["openvino.fused"]


@pytest.mark.parametrize(
    "text",
    [
        *(f"g = {kind} (c)  a = Mul (c, g)" for kind in ("Tanh", "HardSwish", "Elu")),
        "g = Sigmoid (c)  d = Mul (c, g)  e = Mul (g, c)  f = Neg (e)  a = Max (d, f)",
    ],
)
def test_other_products_are_no_gates(text: str) -> None:
    """The engine has no kernel for them, and reads the layer's result twice."""
    model = network(text)
    found = quantize(model, samples(model, 8), OPENVINO).model
    assert "c" in quantized_tensors(found)
    assert not check(found, "openvino").findings


def test_a_gate_that_is_an_output_is_no_part_of_a_function() -> None:
    model = network(FUNCTIONS["gated"])
    value = helper.make_tensor_value_info("g", TensorProto.FLOAT, [1, 4, 6, 6])
    model.graph.output.append(value)
    found = quantize(model, samples(model, 8), OPENVINO).model
    assert "c" in quantized_tensors(found)
    assert not check(found, "openvino").findings


def test_a_result_that_a_body_reads_is_quantized() -> None:
    body = "g = Neg (c)", "g = Abs (c)"
    branches = ", ".join(
        f"{name}_branch = {name} () => (float[1,4,6,6] g) {{ {text} }}"
        for name, text in zip(("then", "else"), body, strict=True)
    )
    model = network(
        f"""n = ReduceSum <keepdims = 0> (x)  b = Greater (n, zero)
        f = If (b) <{branches}>  s = Sigmoid (c)  a = Add (f, s)"""
    )
    found = quantize(model, samples(model, 8), OPENVINO).model
    assert "c" in quantized_tensors(found)
    assert not check(found, "openvino").findings


def test_a_slope_is_not_the_argument_of_a_function() -> None:
    model = network("a = PRelu (x, c)")
    found = quantize(model, samples(model, 8), OPENVINO).model
    assert "c" in quantized_tensors(found)
    assert not check(found, "openvino").findings


def test_attention_with_relu_is_float() -> None:
    model = attention()
    for node in model.graph.node:
        if node.op_type == "Softmax":
            node.op_type = "Relu"
    found = quantize(model, samples(model, 8), OPENVINO).model
    assert quantized_tensors(found) == {"x", "o"}


def test_a_function_of_a_shared_result_is_quantized() -> None:
    model = network(SHARED)
    found = quantize(model, samples(model, 8), OPENVINO).model
    assert "c" in quantized_tensors(found)


def test_results_that_no_layer_reads_are_float() -> None:
    model = parse(
        """g (float[1,2,4,4] x) => (float[1,12] p, float[1,4,4,4] r) {
            a = Conv (x, w)  b = Conv (a, u)
            f = Flatten (b)  s = Softmax (f)  h = Slice (s, zero, half, one)
            p = Concat <axis = 1> (h, h)  r = Relu (a)
        }""",
        w=normal(4, 2, 1, 1),
        u=normal(3, 4, 1, 1, seed=1),
        zero=np.int64([0]),
        half=np.int64([6]),
        one=np.int64([1]),
    )
    found = quantize(model, samples(model, 8), OPENVINO).model
    assert quantized_tensors(found) == {"x", "a"}


def test_attention_is_float_and_projections_are_not() -> None:
    model = attention()
    found = quantize(model, samples(model, 8), OPENVINO).model
    assert quantized_tensors(found) == {"x", "o"}
    assert quantized_tensors(quantize(model, samples(model, 8), "A8W8").model) >= {
        "q",
        "t",
        "p",
        "v",
    }


@pytest.mark.parametrize("model", [network(FUNCTIONS["gated"]), attention()])
def test_float_functions_lose_no_accuracy(model: ModelProto) -> None:
    data = samples(model, 8)

    def error(config: QConfig) -> float:
        found = quantize(model, data, config).model
        return sum(
            float(np.sum((run(found, feed)[0] - run(model, feed)[0]) ** 2))
            for feed in data
        )

    assert error(OPENVINO) <= error(QConfig.of("A8W8"))


def test_the_weights_of_a_last_rnn_have_codes() -> None:
    model = parse(
        """g (float[1,4,5,1] x) => (float[5,1,1,3] y) {
            c = Conv (x, k)
            t = Transpose <perm = [2, 0, 1, 3]> (c)
            s = Squeeze (t, axes)
            y, h = RNN <hidden_size = 3> (s, w, r)
        }""",
        k=normal(4, 4, 1, 1),
        axes=np.array([3]),
        w=normal(1, 3, 4),
        r=normal(1, 3, 3, seed=1),
    )
    data = samples(model, 8)
    found = quantize(model, data, OPENVINO).model
    producers = {out: n.op_type for n in found.graph.node for out in n.output}
    [rnn] = [node for node in found.graph.node if node.op_type == "RNN"]
    assert [producers[name] for name in rnn.input[1:3]] == ["DequantizeLinear"] * 2
    assert not check(found, "openvino").findings
    [value], [expected] = run(found, data[0])[:1], run(model, data[0])[:1]
    np.testing.assert_allclose(value, expected, atol=0.05)


@pytest.mark.parametrize("product", ["MatMul (x, t)", "Gemm (x, t, b)"])
def test_a_transposed_weight_is_quantized_without_preparation(product: str) -> None:
    """The file computes what preparation, which folds the Transpose, makes of the model."""
    model = parse(
        f"""g (float[N,6] x) => (float[N,3] y) {{
            t = Transpose <perm = [1, 0]> (w)
            h = {product}
            r = Relu (h)
            y = MatMul (r, u)
        }}""",
        w=normal(8, 6) * np.logspace(-2, 0, 8, dtype=np.float32)[:, None],
        u=normal(8, 3, seed=1),
        **({"b": normal(8, seed=2)} if "b)" in product else {}),
    )
    data = samples(model, 4)
    for target in ("openvino", "cpu", ""):
        config = OPENVINO.with_(target=target)
        prepared = quantize(model, data, config).model
        kept = quantize(model, data, config.with_(prepare=False)).model
        codes = {each.name: each for each in kept.graph.initializer}["w_quantized"]
        assert codes.data_type == TensorProto.INT8
        for feeds in samples(model, 3):
            np.testing.assert_allclose(
                run(kept, feeds)[0], run(prepared, feeds)[0], rtol=1e-5, atol=1e-5
            )


PADDED = """g (float[1,4,6,6] x) => (float[1,3,6,6] y) {
    c = Conv (x, w)
    p = AveragePool <kernel_shape = [3,3], pads = [1,1,1,1], count_include_pad = 1> (c)
    y = Conv (p, u)
}"""


def test_openvino_computes_means_that_count_padding() -> None:
    pytest.importorskip("openvino")
    model = parse(PADDED, w=normal(4, 4, 1, 1), u=normal(3, 4, 1, 1, seed=1))
    data = samples(model, 8)
    result = quantize(model, data, OPENVINO).model
    assert not check(result, "openvino").findings
    with on_engine("openvino"):
        assert compare(model, result, data, preprocessing=False).sqnr > 25


@pytest.mark.parametrize("move", ["", "t = Transpose <perm = [0,1,3,2]> (c)"])
def test_means_that_count_padding_read_floats_without_preparation(move: str) -> None:
    text = PADDED.replace("(c)\n", f"({'t' if move else 'c'})\n").replace(
        "p =", f"{move} p ="
    )
    model = parse(text, w=normal(4, 4, 1, 1), u=normal(3, 4, 1, 1, seed=1))
    written_as_floats(model, OPENVINO.with_(prepare=False), {"x", "p"})


@pytest.mark.parametrize(
    "windows",
    [
        "kernel_shape = [3,3], pads = [1,1,1,1], ceil_mode = 1",
        'kernel_shape = [3,3], auto_pad = "SAME_UPPER"',
    ],
)
def test_means_that_stay_read_floats(windows: str) -> None:
    text = PADDED.replace("kernel_shape = [3,3], pads = [1,1,1,1]", windows)
    model = parse(text, w=normal(4, 4, 1, 1), u=normal(3, 4, 1, 1, seed=1))
    written_as_floats(model, OPENVINO, {"x", "p"})


@pytest.mark.parametrize("axes", [1, 3])
def test_means_of_sequences_and_volumes_read_floats(axes: int) -> None:
    sizes = ",".join(["6"] * axes)
    kernel = ",".join(["3"] * axes)
    pads = ",".join(["1"] * 2 * axes)
    model = parse(
        f"""g (float[1,4,{sizes}] x) => (float[1,3,{sizes}] y) {{
            c = Conv (x, w)
            p = AveragePool <kernel_shape = [{kernel}], pads = [{pads}],
                count_include_pad = 1> (c)
            y = Conv (p, u)
        }}""",
        w=normal(4, 4, *[1] * axes),
        u=normal(3, 4, *[1] * axes, seed=1),
    )
    written_as_floats(model, OPENVINO, {"x", "p"})


def test_decisions_for_the_operator_type_reach_means_that_count_padding() -> None:
    model = parse(PADDED, w=normal(4, 4, 1, 1), u=normal(3, 4, 1, 1, seed=1))
    keep = Override(op_types="AveragePool", keep=True)
    written_as_floats(model, OPENVINO.with_(overrides=(keep,)), {"x", "p"})
    written_as_floats(model, OPENVINO.with_(op_types=("Conv",)), {"x", "p"})


def written_as_floats(model: ModelProto, config: QConfig, quantized: set[str]) -> None:
    """Check that an average stays, reads floats, and that the file breaks no rule."""
    data = samples(model, 8)
    result = quantize(model, data, config).model
    assert kinds(result).count("AveragePool") == 1
    assert quantized_tensors(result) == quantized
    assert not check(result, "openvino").findings
    assert compare(model, result, data, preprocessing=False).sqnr > 25


@pytest.mark.parametrize("clip", ["Relu (s)", "Clip (s, low, high)"])
def test_no_pair_separates_a_product_with_bias_from_its_clip(clip: str) -> None:
    """A pair before the Clip has a coarser scale than the one after it."""
    model = parse(
        f"""g (float[N,8] x) => (float[N,3] y) {{
            h = MatMul (x, w)  s = Add (h, b)  r = {clip}  y = MatMul (r, u)
        }}""",
        w=normal(8, 8),
        b=normal(8),
        u=normal(8, 3, seed=1),
        **({"low": np.float32(-1), "high": np.float32(1)} if "low" in clip else {}),
    )
    result = quantize(model, samples(model, 8), OPENVINO).model
    assert quantized_tensors(result) == {"x", "r"}
    assert not check(result, "openvino").findings
