"""The error of quantized constants, against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

from quark_onnx import analyze
from quark_onnx.analysis.findings import WeightError
from tests.models import Array, Feeds, normal, parse, weight

FLOAT = "g (float[N,3,6,6] x) => (float[N,{},4,4] y) {{ [conv] y = Conv (x, w, b) }}"
QUANTIZED = """g (float[N,3,6,6] x) => (float[N,{},4,4] y) {{
    wd = DequantizeLinear <axis = 0> (wq, ws)
    bd = DequantizeLinear (bq, bs)
    [conv] y = Conv (x, wd, bd)
}}"""


def feeds() -> list[Feeds]:
    return [{"x": normal(2, 3, 6, 6)}]


def models(
    w: Array, scale: Any, b: Array, bias_scale: float
) -> tuple[ModelProto, ModelProto]:
    scale = np.float32(scale)
    spread = scale.reshape(-1, 1, 1, 1) if scale.ndim else scale
    codes = np.clip(np.rint(w / spread), -128, 127).astype(np.int8)
    stored = np.clip(
        np.rint(b.astype(np.float64) / bias_scale), -(2.0**31), 2.0**31 - 1
    ).astype(np.int32)
    count = len(w)
    return (
        parse(FLOAT.format(count), w=w, b=b),
        parse(
            QUANTIZED.format(count),
            wq=codes,
            ws=scale,
            bq=stored,
            bs=np.float32(bias_scale),
        ),
    )


def errors(*arguments: Any) -> dict[str, WeightError]:
    return {
        error.name: error for error in analyze(*models(*arguments), feeds()).weights
    }


def test_the_error_is_the_one_that_numpy_finds() -> None:
    w, b = weight(8, 3, 3, 3), normal(8)
    found = errors(w, 0.01, b, 1e-4)["w"]
    rounded = np.clip(np.rint(w / np.float32(0.01)), -128, 127) * np.float32(0.01)
    noise, signal = (
        np.square(v.astype(np.float64)).sum(axis=(1, 2, 3)) for v in (w - rounded, w)
    )
    by_channel = 10 * np.log10(signal / noise)
    assert found.sqnr == pytest.approx(
        10 * np.log10(signal.sum() / noise.sum()), abs=1e-3
    )
    assert (found.worst_channel, found.channels) == (int(by_channel.argmin()), 8)
    assert found.worst_sqnr == pytest.approx(by_channel.min(), abs=1e-3)
    reach = np.abs(w).max(axis=(1, 2, 3))
    assert found.outlier_ratio == pytest.approx(
        reach.max() / np.median(reach), rel=1e-5
    )
    assert (found.format, found.granularity, found.role, found.node) == (
        "int8",
        "tensor",
        "weight",
        "conv",
    )
    assert (found.dead, found.rescaled) == ([], False)
    assert (found.lo, found.hi) == (w.min(), w.max())


def test_dead_channels_are_those_of_which_nothing_is_left() -> None:
    w = weight(6, 3, 3, 3)
    w[[1, 4]] *= 1e-4
    w[5] = 0  # which was zero before
    assert errors(w, 0.01, normal(6), 1e-4)["w"].dead == [1, 4]
    found = analyze(*models(w, 0.01, normal(6), 1e-4), feeds())
    assert "dead-channels" not in {
        cause.kind for tensor in found.tensors for cause in tensor.causes
    }  # they are tiny
    w[1] *= 40  # too small for half a step, and yet no trifle
    w[4] *= 40
    found = analyze(*models(w, 0.05, np.zeros(6, np.float32), 1e-4), feeds())
    (weight_error,) = [error for error in found.weights if error.name == "w"]
    assert weight_error.dead == [1, 4]


def test_one_scale_a_channel() -> None:
    w = weight(4, 3, 3, 3) * np.float32([1, 10, 100, 1000]).reshape(-1, 1, 1, 1)
    scales = np.abs(w).max(axis=(1, 2, 3)) / 127
    found = errors(w, scales, normal(4), 1e-4)["w"]
    assert found.granularity == "channel"
    assert found.worst_sqnr > 35
    alone = errors(w, float(scales.max()), normal(4), 1e-4)["w"]
    assert alone.worst_sqnr < 10 < alone.outlier_ratio


def test_codes_at_the_ends_and_values_beyond_them() -> None:
    w = weight(4, 3, 3, 3)
    scale = 0.5 * float(np.abs(w).max()) / 127
    found = errors(w, scale, normal(4), 1e-4)["w"]
    codes = np.clip(np.rint(w / np.float32(scale)), -128, 127)
    assert found.saturated == pytest.approx(
        float(((codes == -128) | (codes == 127)).mean())
    )
    beyond = (w > 127 * scale + scale / 2) | (w < -128 * scale - scale / 2)
    assert found.clipped == pytest.approx(float(beyond.mean()), abs=0.01)


def test_a_bias_that_32_bits_do_not_hold() -> None:
    b = np.float32([0.5, 30.0, -0.25, 0.1])
    found = analyze(*models(weight(4, 3, 3, 3), 0.01, b, 1e-8), feeds())
    (bias,) = [error for error in found.weights if error.role == "bias"]
    assert (bias.name, bias.clipped, bias.worst_channel) == ("b", 0.25, 1)
    (output,) = [tensor for tensor in found.tensors if tensor.name == "y"]
    assert output.causes[0].kind == "bias"
    assert (
        output.causes[0].text
        == "bias saturates: 25 % of it lies beyond what int32 holds"
    )


def test_a_depthwise_weight_with_one_scale_is_a_cause() -> None:
    w = weight(4, 1, 3, 3) * np.float32([1, 3, 40, 900]).reshape(-1, 1, 1, 1)
    scale = np.float32(np.abs(w).max() / 127)
    text = (
        "g (float[N,4,6,6] x) => (float[N,4,4,4] y) { %s [conv] y = Conv <group = 4>"
        " (x, %s) }"
    )
    found = analyze(
        parse(text % ("", "w"), w=w),
        parse(
            text % ("d = DequantizeLinear (c, s)", "d"),
            c=np.clip(np.rint(w / scale), -128, 127).astype(np.int8),
            s=scale,
        ),
        [
            {
                "x": (
                    normal(1, 4, 6, 6)
                    * np.float32([900, 300, 20, 1]).reshape(1, -1, 1, 1)
                )
            }
        ],
    )
    cause = next(tensor for tensor in found.tensors if tensor.name == "y").causes[0]
    assert cause.kind in ("dead-channels", "weight")
    assert cause.options == ("--per-channel",)


def test_a_transposed_weight_is_compared() -> None:
    w = weight(4, 3)
    float_model = parse(
        "g (float[N,4] x) => (float[N,3] y) { [fc] y = Gemm (x, w) }", w=w
    )
    quantized = parse(
        "g (float[N,4] x) => (float[N,3] y) { d = DequantizeLinear (c, s) [fc] y = Gemm"
        " <transB = 1> (x, d) }",
        c=np.rint(w.T / np.float32(0.01)).astype(np.int8),
        s=np.float32(0.01),
    )
    (found,) = analyze(float_model, quantized, [{"x": normal(2, 4)}]).weights
    assert found.sqnr > 30
