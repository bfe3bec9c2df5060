"""analyze: the error of each tensor against numpy, its cause, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper

from quark_onnx import Analysis, QConfig, analyze, quantize_static
from quark_onnx.analysis.findings import TensorError
from quark_onnx.common.errors import ConfigError, DataError, ModelError
from quark_onnx.common.reported import to_json
from tests.models import (
    Feeds,
    conv_net,
    conv_relu,
    in_a_branch,
    normal,
    parse,
    residual,
    run,
    samples,
    weight,
)
from tests.settings import CHANNEL, SIGNED, TENSOR


def pair(scale: float, zero: int) -> ModelProto:
    """x, rounded to uint8, times a matrix."""
    return parse(
        """g (float[N,4] x) => (float[N,3] y) {
            [q] x_q = QuantizeLinear (x, s, z)
            [d] x_d = DequantizeLinear (x_q, s, z)
            [fc] y = MatMul (x_d, w)
        }""",
        s=np.float32(scale),
        z=np.uint8(zero),
        w=weight(4, 3),
    )


def plain() -> ModelProto:
    return parse(
        "g (float[N,4] x) => (float[N,3] y) { [fc] y = MatMul (x, w) }", w=weight(4, 3)
    )


def data(count: int = 5, scale: float = 1.0) -> list[Feeds]:
    return [{"x": normal(50, 4, seed=seed, scale=scale)} for seed in range(count)]


def of(found: Analysis, name: str) -> TensorError:
    return next(tensor for tensor in found.tensors if tensor.name == name)


def ratio(a: Any, b: Any) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(10 * np.log10((a**2).sum() / ((a - b) ** 2).sum()))


def test_a_tensor_has_the_error_that_numpy_finds() -> None:
    scale, zero, feeds = 0.01, 100, data()
    found = analyze(plain(), pair(scale, zero), feeds)
    x = np.concatenate([feed["x"] for feed in feeds])
    lo, hi = (0 - zero) * scale, (255 - zero) * scale
    rounded = (
        np.clip(np.rint(x / np.float32(scale)) + zero, 0, 255) - zero
    ) * np.float32(scale)
    tensor = of(found, "x")
    assert tensor.sqnr == pytest.approx(ratio(x, rounded), abs=1e-3)
    assert tensor.sqnr_grid == pytest.approx(tensor.sqnr, abs=1e-6)
    assert tensor.cosine == pytest.approx(
        np.vdot(x, rounded) / np.linalg.norm(x) / np.linalg.norm(rounded), abs=1e-6
    )
    assert tensor.mean_error == pytest.approx(
        float((rounded.astype(np.float64) - x).mean()), abs=1e-6
    )
    assert (tensor.grid_lo, tensor.grid_hi, tensor.step) == pytest.approx(
        (lo, hi, scale), rel=1e-6
    )
    assert tensor.clipped_low == pytest.approx(float((x < lo - scale / 2).mean()))
    assert tensor.clipped_high == pytest.approx(float((x > hi + scale / 2).mean()))
    beyond = (x < lo - scale / 2) | (x > hi + scale / 2)
    error = np.square((rounded - x).astype(np.float64))
    assert tensor.clip_noise == pytest.approx(
        error[beyond].sum() / error.sum(), rel=1e-4
    )
    assert (tensor.lo, tensor.hi, tensor.count) == (x.min(), x.max(), x.size)
    assert (tensor.format, tensor.op_type, tensor.counterpart) == (
        "uint8",
        "Input",
        "x_d",
    )
    y = of(found, "y")
    assert y.sqnr == pytest.approx(
        ratio(x @ weight(4, 3), rounded @ weight(4, 3)), abs=1e-3
    )
    assert (y.sqnr_inputs, y.source) == (tensor.sqnr, "x")
    assert (found.samples, found.sqnr) == (5, pytest.approx(y.sqnr, abs=1e-3))


def test_no_bias_corrects_the_shift_of_an_input() -> None:
    model = parse(
        "g (float[N,4] a, float[N,4] b) => (float[N,4] y) { [add] y = Add (a, b) }"
    )
    rounded = parse(
        """g (float[N,4] a, float[N,4] b) => (float[N,4] y) {
            [q] b_q = QuantizeLinear (b, s, z)
            [d] b_d = DequantizeLinear (b_q, s, z)
            [add] y = Add (a, b_d)
        }""",
        s=np.float32(1),
        z=np.uint8(0),
    )
    # every value of b lies 0.3 above a code
    b = np.tile(np.float32([1.3, 2.3, 3.3, 4.3]), (50, 1))
    found = analyze(model, rounded, [{"a": normal(50, 4), "b": b}])
    kinds = {cause.kind for cause in of(found, "b").causes}
    assert kinds and "shift" not in kinds


def test_what_is_clipped_is_named_first() -> None:
    tensor = of(analyze(plain(), pair(0.01, 128), data(scale=2.0)), "x")
    cause = tensor.causes[0]
    assert cause.kind == "clipped"
    assert cause.text.startswith("clipping: ")
    assert f"lie above {1.27:.3g}" in cause.text
    assert cause.options == ("--tensor-calibrator", "x=minmax")


def test_each_operator_is_measured_alone() -> None:
    """The error of the second layer alone is what float inputs, rounded by their own grid, make of
    its weights.
    """
    model, feeds = conv_net(3), samples(conv_net(3), 4)
    found = analyze(model, quantize_static(model, feeds, TENSOR), feeds)
    late = [t for t in found.tensors if t.op_type == "Conv" or t.op_type == "Relu"][-1]
    assert late.sqnr_local is not None
    assert late.sqnr_local > late.sqnr
    assert 0 < late.added <= 10 ** (-late.sqnr_local / 10)


def test_the_ranking_goes_by_the_noise_that_is_added() -> None:
    model, feeds = residual(), samples(residual(), 4)
    found = analyze(model, quantize_static(model, feeds, TENSOR), feeds)
    added = [tensor.added for tensor in found.ranking]
    assert added == sorted(added, reverse=True)
    assert added and all(tensor.causes for tensor in found.ranking)


def test_the_outputs_are_those_of_the_comparison() -> None:
    model, feeds = residual(), samples(residual(), 4)
    quantized = quantize_static(model, feeds, SIGNED)
    found = analyze(model, quantized, feeds)
    expected = ratio(
        *(np.stack([run(m, f)[0] for f in feeds]) for m in (model, quantized))
    )
    assert found.sqnr == pytest.approx(expected, abs=0.1)
    assert (found.bytes_before, found.bytes_after) == (
        model.ByteSize(),
        quantized.ByteSize(),
    )


def test_an_output_has_the_step_of_its_grid_in_its_own_unit() -> None:
    """Also where the grid lies before a join, which moves values alone; the widest one counts."""
    model = parse(
        """g (float[N,4] x) => (float[1,M] y, float[N,4] z) {
            [fc] h = MatMul (x, w)
            [large] l = Mul (h, hundred)
            [join] c = Concat <axis = 1> (h, l)
            [row] y = Reshape (c, shape)
            [copy] z = Add (x, x)
        }""",
        w=weight(4, 4),
        hundred=np.float32(100),
        shape=np.int64([1, -1]),
    )
    rounded = parse(
        """g (float[N,4] x) => (float[1,M] y, float[N,4] z) {
            [fc] h = MatMul (x, w)
            [q0] h_q = QuantizeLinear (h, fine, zero)
            [d0] h_d = DequantizeLinear (h_q, fine, zero)
            [large] l = Mul (h_d, hundred)
            [q1] l_q = QuantizeLinear (l, coarse, zero)
            [d1] l_d = DequantizeLinear (l_q, coarse, zero)
            [join] c = Concat <axis = 1> (h_d, l_d)
            [row] y = Reshape (c, shape)
            [copy] z = Add (x, x)
        }""",
        w=weight(4, 4),
        hundred=np.float32(100),
        shape=np.int64([1, -1]),
        fine=np.float32(0.25),
        coarse=np.float32(4.0),
        zero=np.int8(0),
    )
    assert analyze(model, rounded, data()).steps == {"y": 4.0}


@pytest.mark.parametrize("form", ["qdq", "operators", "vendor"])
@pytest.mark.parametrize("preset", ["A8W8", "S8S8"])
def test_every_form_is_compared(preset: str, form: str) -> None:
    model, feeds = residual(), samples(residual(), 6)
    config = QConfig.of(preset).with_(calibrator="minmax", form=form)
    found = analyze(model, quantize_static(model, feeds, config), feeds)
    ends = {tensor.name for tensor in found.tensors}
    assert {"x", "y"} <= ends
    assert (
        len(ends) + len(found.unmatched) >= 10
    )  # every tensor is either compared or explained
    assert all(tensor.sqnr > 15 for tensor in found.tensors)


@pytest.mark.parametrize(
    "preset",
    ["BF16", "FP16", "BF16_BFP16", "MX9", "MXINT8", "FP8E4M3", "A8W4", "A16W8", "INT4"],
)
def test_every_format_is_compared(preset: str) -> None:
    model, feeds = conv_net(2), samples(conv_net(2), 3)
    found = analyze(model, quantize_static(model, feeds, preset), feeds)
    assert found.tensors and found.sqnr > 3
    assert of(found, "y").sqnr > 3


def test_dynamic_scales_are_compared_where_tensors_are_float() -> None:
    model = parse(
        "g (float[N,4] x) => (float[N,3] y) { h = MatMul (x, w) y = Relu (h) }",
        w=weight(4, 3),
    )
    found = analyze(model, quantize_static(model, data(2), "DYNAMIC"), data(2))
    assert of(found, "y").sqnr > 20


def test_masks_do_not_count() -> None:
    """An attention mask of -3.4e38 would hide every other value of the scores that it is added to."""  # noqa: E501
    mask = np.zeros((1, 4), np.float32)
    mask[0, 3] = np.finfo(np.float32).min
    text = (
        "g (float[N,4] x) => (float[N,4] y) {{ {} s = Add ({}, mask) y = Softmax (s) }}"
    )
    rounding = "x_q = QuantizeLinear (x, scale, zero) x_d = DequantizeLinear (x_q, scale, zero)"
    quantized = parse(
        text.format(rounding, "x_d"),
        mask=mask,
        scale=np.float32(0.05),
        zero=np.uint8(128),
    )
    found = analyze(parse(text.format("", "x"), mask=mask), quantized, data(2))
    assert 20 < of(found, "s").sqnr < 60


def test_values_that_are_no_numbers_are_left_out() -> None:
    feeds = data(2)
    feeds[1]["x"][0, 0] = np.inf
    model = parse(
        "g (float[N,4] x) => (float[N,3] y) { y = MatMul (x, w) }", w=weight(4, 3)
    )
    with pytest.raises(DataError):
        analyze(model, pair(0.01, 128), feeds)


def test_the_findings_are_plain_values() -> None:
    found = analyze(plain(), pair(0.01, 100), data(2))
    document = json.loads(to_json(found.to_dict()))
    assert document["tensors"][0]["name"] == "x"
    assert document["ranking"] == [tensor.name for tensor in found.ranking]
    assert asdict(found)["samples"] == 2


def test_histograms_hold_every_value() -> None:
    found = analyze(plain(), pair(0.01, 100), data(3))
    tensor = of(found, "x")
    assert tensor.histogram is not None
    assert sum(tensor.histogram.counts) == tensor.count
    assert (tensor.histogram.edges[0], tensor.histogram.edges[-1]) == (
        tensor.lo,
        tensor.hi,
    )


def test_the_result_does_not_depend_on_how_samples_are_batched() -> None:
    whole = [{"x": np.concatenate([feed["x"] for feed in data(4)])}]
    one, many = (
        of(analyze(plain(), pair(0.01, 100), feeds), "x") for feeds in (whole, data(4))
    )
    assert one.sqnr == pytest.approx(many.sqnr, rel=1e-9)
    assert one.histogram == many.histogram


def test_a_limit_ends_the_stream() -> None:
    assert analyze(plain(), pair(0.01, 100), iter(data(9)), limit=3).samples == 3


@pytest.mark.parametrize("limit", [0, -1, 2.5, "x"])
def test_a_limit_is_a_number_of_samples(limit: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"limit is .*; it must be a whole number of at least 1"
    ):
        analyze(plain(), pair(0.01, 100), data(), limit=limit)


def test_a_body_may_be_all_that_is_quantized() -> None:
    """Tensors of bodies are not measured, but the outputs are."""
    found = analyze(in_a_branch(plain()), in_a_branch(pair(0.01, 100)), data())
    assert [output.name for output in found.outputs] == ["y"]


def test_what_cannot_be_analyzed() -> None:
    with pytest.raises(
        ModelError, match="it is not quantized; the float model comes first"
    ):
        analyze(plain(), plain(), data())
    other = parse(
        """g (float[N,4] z) => (float[N,3] y) {
            q = QuantizeLinear (z, s) d = DequantizeLinear (q, s) y = MatMul (d, w)
        }""",
        s=np.float32(0.1),
        w=weight(4, 3),
    )
    with pytest.raises(
        ModelError, match="lacks the input 'x' of the float model; its inputs are: z"
    ):
        analyze(plain(), other, data())
    other = pair(0.1, 0)
    other.graph.output[0].name = other.graph.node[-1].output[0] = "other"
    with pytest.raises(ModelError, match="lacks the output 'y' of the float model"):
        analyze(plain(), other, data())
    with pytest.raises(DataError):
        analyze(plain(), pair(0.1, 0), [])
    with pytest.raises(DataError, match="the model has no input"):
        analyze(plain(), pair(0.1, 0), [{"z": data()[0]["x"]}])
    with pytest.raises(ModelError, match=r"model file nowhere\.onnx cannot be read"):
        analyze("nowhere.onnx", pair(0.1, 0), data())
    broken = pair(0.1, 0)
    broken.graph.node[-1].op_type = "NoSuchOperator"
    with pytest.raises(ModelError, match="onnxruntime cannot load the quantized model"):
        analyze(plain(), broken, data())


def test_a_tensor_of_another_shape_is_not_compared() -> None:
    model = parse("g (float[N,4] x) => (float[N,4] y) { h = Relu (x) y = Abs (h) }")
    other = parse(
        """g (float[N,4] x) => (float[N,4] y) {
            t = Transpose <perm = [1,0]> (x)
            h = Relu (t)
            q = QuantizeLinear (h, s) d = DequantizeLinear (q, s)
            u = Transpose <perm = [1,0]> (d)
            y = Abs (u)
        }""",
        s=np.float32(0.1),
    )
    found = analyze(model, other, data(1))
    assert [tensor.name for tensor in found.tensors] == ["x", "y"]
    assert [entry.name for entry in found.unmatched] == ["h"]
    assert "its shape is" in found.unmatched[0].reason


def test_equalized_channels_are_recognized() -> None:
    """Channels multiplied by powers of two in one layer and divided again in the next are no error."""  # noqa: E501
    model = conv_net(2)
    equalized = ModelProto()
    equalized.CopyFrom(model)
    factors = np.exp2(np.tile(np.arange(-2, 2), 2)).astype(np.float32)
    for tensor in equalized.graph.initializer:
        value = numpy_helper.to_array(tensor)
        if tensor.name == "w0":
            value = value * factors[:, None, None, None]
        elif tensor.name == "b0":
            value = value * factors
        elif tensor.name == "w1":
            value = value / factors[None, :, None, None]
        tensor.CopyFrom(
            numpy_helper.from_array(np.ascontiguousarray(value), tensor.name)
        )
    feeds = samples(model, 4)
    found = analyze(model, quantize_static(equalized, feeds, CHANNEL), feeds)
    moved = [tensor for tensor in found.tensors if tensor.rescaled]
    assert moved and all(tensor.sqnr > 20 for tensor in moved)
    assert all(weight.sqnr > 20 for weight in found.weights if weight.role == "weight")
    assert {weight.name for weight in found.weights if weight.rescaled} == {"w0", "w1"}


def test_models_are_not_changed() -> None:
    model, quantized = (
        conv_relu(),
        quantize_static(conv_relu(), samples(conv_relu()), TENSOR),
    )
    before = model.SerializeToString(), quantized.SerializeToString()
    analyze(model, quantized, samples(model, 2))
    assert before == (model.SerializeToString(), quantized.SerializeToString())
    onnx.checker.check_model(quantized)
