"""Models and data that are odd but valid: quantized as far as they can be, or refused with an error
that helps.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from quark_onnx.api import quantize
from quark_onnx.common.errors import DataError, ModelError
from quark_onnx.config import QConfig
from quark_onnx.job import Result
from quark_onnx.report.measure import measure
from tests.models import run


def parsed(text: str, opset: int = 17) -> ModelProto:
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}]>\n{text}'
    )


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def quantized(model: ModelProto, *samples: dict[str, Any]) -> Result:
    result = quantize(model, list(samples))
    onnx.checker.check_model(result.model, full_check=True)
    return result


def test_sequence_input() -> None:
    model = parsed(
        """g (seq(float[N]) s, float[2, 2] x) => (seq(float[N]) t, float[2, 2] y) {
        t = Identity (s)
        y = Relu (x)
    }"""
    )
    sample = {"s": [normal(2), normal(3)], "x": normal(2, 2)}
    report = quantized(model, sample, sample).report
    assert report.operators["Relu"] == (1, 1)
    assert [
        output.sqnr is not None and output.sqnr > 30 for output in report.outputs
    ] == [True, True]


def test_optional_input_without_a_value() -> None:
    model = parsed(
        """g (optional(seq(float[N])) s, float[2] x) => (bool b, float[2] y) {
        b = OptionalHasElement (s)
        y = Relu (x)
    }"""
    )
    assert quantized(model, {"s": None, "x": normal(2)}).report.quantized == 1


def test_no_inputs() -> None:
    model = parsed(
        "g () => (float[2] y) { y = Constant <value_floats = [1.0, 2.0]> () }"
    )
    assert quantized(model, {}).report.worst_sqnr == np.inf


def test_integers_only_come_back_as_they_were() -> None:
    model = parsed("g (int64[3] x) => (int64[3] y) { y = Add (x, x) }")
    result = quantized(model, {"x": np.arange(3)})
    assert result.report.quantized == 0
    assert "nothing in this model could be quantized" in str(result.report)


def test_not_a_number_where_nothing_is_measured() -> None:
    model = parsed("""g (float[3] x, float[3] z) => (bool[3] y, float[3] w) {
        y = IsNaN (x)
        w = Relu (z)
    }""")
    assert (
        quantized(
            model, {"x": np.float32([1, np.nan, np.inf]), "z": normal(3)}
        ).report.quantized
        == 1
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_bfloat16_represents_infinity(value: float) -> None:
    """NaN and infinity spoil a range. bfloat16 has none, and represents both."""
    model = parsed("g (float[3] x) => (float[3] y) { y = Neg (x) }")
    samples = [{"x": np.float32([1, value, 3])}]
    result = quantize(model, samples, "BF16")
    assert result.report.quantized == 1
    np.testing.assert_array_equal(run(result.model, samples[0])[0], -samples[0]["x"])


@pytest.mark.parametrize("preset", ["A8W8", "FP8E4M3", "FP16", "BFP16", "MXFP8E4M3"])
def test_infinity_spoils_a_scale_or_a_block_or_saturates(preset: str) -> None:
    model = parsed("g (float[1, 8] x) => (float[1, 8] y) { y = Neg (x) }")
    with pytest.raises(DataError, match="1 of 8 values are NaN or infinite"):
        quantize(model, [{"x": np.float32([[1, np.inf, *[1] * 6]])}], preset)


@pytest.mark.parametrize(
    ("body", "value"),
    [
        *(
            (body, value)
            for body in ("y = Relu (x)", "a = Sqrt (x) y = Relu (a)")
            for value in (np.nan, np.inf, -np.inf)
        ),
        *(
            ("a = Add (x, x) y = Softmax (a)", value) for value in (np.nan, np.inf)
        ),  # minus infinity would be a mask
    ],
)
def test_not_a_number_where_it_matters(body: str, value: float) -> None:
    model = parsed(f"g (float[2] x) => (float[2] y) {{ {body} }}")
    with pytest.raises(
        DataError, match="sample 1, input 'x': 1 of 2 values are NaN or infinite"
    ):
        quantize(model, [{"x": np.ones(2, np.float32)}, {"x": np.float32([1, value])}])


ATTENTION = """g (float[2, 4, 8] q, float[2, 8, 4] k, float[2, 1, 4] mask, float[2, 4, 3] v) => (float[2, 4, 3] y) {{
    scores = MatMul (q, k)
    masked = Add (scores, mask)
    p = {softmax}
    y = MatMul (p, v)
}}"""  # noqa: E501
SOFTMAX = "Softmax <axis = -1> (masked)"
EXPANDED = """Div (e, n)
    m = ReduceMax <axes = [-1]> (masked)
    d = Sub (masked, m)
    e = Exp (d)
    n = ReduceSum (e, last)
    last = Constant <value_ints = [-1]> ()"""


@pytest.mark.parametrize("softmax", [SOFTMAX, EXPANDED])
@pytest.mark.parametrize("never", [-np.inf, np.finfo(np.float32).min, -1e4])
def test_attention_mask(never: float, softmax: str) -> None:
    """What the mask hides must not cost the scores their resolution."""
    mask = np.float32([[[0, 0, 0, never]], [[0, 0, never, never]]])
    samples = [
        {
            "q": normal(2, 4, 8, seed=i),
            "k": normal(2, 8, 4, seed=i + 50),
            "v": normal(2, 4, 3, seed=i),
            "mask": mask,
        }
        for i in range(30)
    ]
    report = quantized(parsed(ATTENTION.format(softmax=softmax)), *samples).report
    assert report.operators["MatMul"] == (2, 2)
    assert report.worst_sqnr > 30


def test_minus_infinity_that_reaches_a_layer_is_no_mask() -> None:
    model = parsed("""g (float[1, 2] x) => (float[1, 2] y) {
        w = Constant <value = float[2, 2] {1.0, 2.0, 3.0, 4.0}> ()
        a = MatMul (x, w)
        y = Softmax (a)
    }""")
    with pytest.raises(DataError, match="NaN or infinite"):
        quantize(model, [{"x": np.float32([[0, -np.inf]])}])


def test_random_output_is_no_error() -> None:
    model = parsed("""g (float[64] x) => (float[64] y, float[64] z) {
        i = Identity (x)
        r = RandomNormalLike (i)
        y = Add (i, r)
        z = Relu (i)
    }""")
    report = quantized(model, *[{"x": normal(64)}] * 3).report
    assert "remove_identity: 1" in report.notes
    assert [output.random for output in report.outputs] == [True, False]
    assert report.worst_sqnr > 30
    lines = str(report).splitlines()
    assert any(line.split()[:2] == ["y", "random:"] for line in lines)


def test_dilated_average_pool_runs() -> None:
    model = parsed(
        "g (float[1, 1, 8, 8] x) => (float[1, 1, 6, 6] y) { r = Relu (x) y ="
        " AveragePool <kernel_shape = [2, 2], dilations = [2, 2]> (r) }",
        opset=19,
    )
    assert (
        "dilations"
        in quantized(model, {"x": normal(1, 1, 8, 8)}).report.kept_nodes[
            "AveragePool_y"
        ]
    )


def test_model_that_onnx_cannot_infer_is_quantized(tmp_path: Any) -> None:
    """onnx's full check fails on MeanVarianceNormalization 13 whatever is around it."""
    model = parsed(
        "g (float[1, 2, 3, 3] x) => (float[1, 2, 3, 3] y) { m ="
        " MeanVarianceNormalization (x) y = Relu (m) }",
        opset=13,
    )
    with pytest.raises(onnx.shape_inference.InferenceError):
        onnx.checker.check_model(model, full_check=True)
    output = tmp_path / "out.onnx"
    assert (
        quantize(model, [{"x": normal(1, 2, 3, 3)}], output=output).report.quantized
        == 2
    )
    onnx.checker.check_model(str(output))


@pytest.mark.parametrize("prepare", [True, False])
def test_model_that_does_not_run(prepare: bool) -> None:
    model = parsed("g (float[2] x) => (float[2] y) { y = Add (x, x) }", opset=6)
    with pytest.raises(ModelError, match="onnxruntime cannot load the model"):
        quantize(model, [{"x": np.ones(2, np.float32)}], {"prepare": prepare})


class Session:
    """A session whose runs return given values, one after the other."""

    def __init__(self, *values: Any) -> None:
        self.values = list(values)

    def get_inputs(self) -> list[Any]:
        return []

    def get_outputs(self) -> list[Any]:
        return [onnx.ValueInfoProto(name="y")]

    def run(self, names: Any, feeds: Any) -> list[Any]:
        return [self.values.pop(0)]


def test_measure_looks_into_sequences_and_maps() -> None:
    a, b = normal(3), normal(4)
    [same] = measure(Session([a, b]), Session([a, b]), [{}])
    assert same.sqnr == np.inf
    [near] = measure(Session([{0: 1.0, 1: 2.0}]), Session([{0: 1.0, 1: 1.9}]), [{}])
    assert near.max_error == pytest.approx(0.1)


@pytest.mark.parametrize("kind", [np.float32, np.int64])
def test_measure_of_another_number_of_detections(kind: type) -> None:
    boxes = np.ones((5, 4), kind)
    [error] = measure(Session(boxes, boxes, boxes), Session(boxes[:3]), [{}])
    assert error.sqnr == -np.inf if kind is np.float32 else error.agreement == 0.0


@pytest.mark.parametrize("config", ["A8W8", "XINT8"])
@pytest.mark.parametrize("opset", [7, 10])
def test_float_bias_at_an_old_opset(opset: int, config: str) -> None:
    """onnxruntime makes an integer of the bias by itself, with an operator that is newer than this
    model.
    """
    text = """g (float[1, 1, 4, 4] x) => (float[1, 2, 4, 4] y)
    <float[2, 1, 1, 1] w = {1, -0.5}, float[2] b = {0.3, 0.1}> {
        y = Conv (x, w, b)
    }"""
    result = quantize(
        parsed(text, opset),
        [{"x": normal(1, 1, 4, 4)}],
        QConfig.of(config).with_(bias=False),
    )
    assert result.report.operators["Conv"] == (1, 1)
    assert result.report.worst_sqnr > 30


@pytest.mark.parametrize("opset", [8, 10])
def test_clip_of_an_old_opset_is_fused(opset: int) -> None:
    """Raising the opset makes its bounds inputs, which must stay known constants."""
    text = """g (float[1, 1, 8, 8] x) => (float[1, 1, 8, 8] y) <float[1, 1, 1, 1] w = {3.0}> {
        c = Conv (x, w)
        y = Clip <min = 0.0, max = 1.0> (c)
    }"""
    result = quantized(parsed(text, opset), {"x": normal(1, 1, 8, 8)})
    assert "Clip" not in [node.op_type for node in result.model.graph.node]


@pytest.mark.parametrize("size", [-1, -2])
def test_a_negative_size_is_an_open_one(size: int, tmp_path: Any) -> None:
    """Some exporters write -1. onnx 1.23 ends the process where it infers a Slice of such a tensor,
    in a child too.
    """
    model = parsed("""g (float[N,4] x) => (float[M,4] y) {
        low = Constant <value_ints = [0]> ()
        high = Constant <value_ints = [1]> ()
        r = Relu (x)
        y = Slice (r, low, high)
    }""")
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_value = size
    onnx.save(model, tmp_path / "m.onnx")
    code = (
        "import numpy, sys\nfrom quark_onnx import"
        " quantize\nprint(quantize(sys.argv[1], [{'x': numpy.ones((3, 4), 'float32')}],"
        " 'A8W8').report.quantized)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "m.onnx")],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
