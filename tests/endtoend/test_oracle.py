"""Quantized models against arithmetic written out in integers, and against what onnxruntime makes
of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view
from onnx import ModelProto, numpy_helper

from quark_onnx import QConfig, quantize, quantize_static
from tests.models import (
    MODELS,
    Array,
    Factory,
    batch_norm_net,
    branches,
    conv_1d,
    conv_net,
    conv_relu,
    convtranspose,
    depthwise,
    gemm,
    normal,
    parse,
    residual,
    run,
    samples,
    weight,
)
from tests.optimized import optimized_kinds
from tests.settings import ALL, CHANNEL, POW2, SIGNED, TENSOR, WIDE, portable

# Integer arithmetic


def quantized_values(model: ModelProto) -> dict[str, Array]:
    """Scales, zero points and codes of a quantized model, as float64 and int64."""
    arrays = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    return {
        n: a.astype(np.float64 if a.dtype.kind == "f" else np.int64)
        for n, a in arrays.items()
    }


def codes(x: Array, v: dict[str, Array], name: str, low: int, high: int) -> Array:
    return np.clip(
        np.rint(x.astype(np.float64) / v[f"{name}_scale"]) + v[f"{name}_zero_point"],
        low,
        high,
    ).astype(np.int64)


def convolution(x: Array, w: Array, *, pads: int = 0, groups: int = 1) -> Array:
    """A 2-D convolution of integers with stride 1: x is (N, C, H, W), w is (M, C / groups, kH, kW)."""  # noqa: E501
    x = np.pad(x, ((0, 0), (0, 0), (pads, pads), (pads, pads)))
    parts = []
    for xs, ws in zip(np.split(x, groups, axis=1), np.split(w, groups), strict=True):
        windows = sliding_window_view(
            xs, ws.shape[2:], axis=(2, 3)
        )  # (N, C, H, W, kH, kW)
        parts.append(np.einsum("nchwij,mcij->nmhw", windows, ws))
    return np.concatenate(parts, axis=1)


def accumulated(
    x: Array,
    v: dict[str, Array],
    product: Callable[[Array, Array], Array],
    channels: tuple[int, ...],
) -> Array:
    """What a layer computes: integer products, the integer bias, and then once the scales, in
    float64.
    """
    total = product(x - v["x_zero_point"], v["w_quantized"])
    scale = v["x_scale"] * v["w_scale"]
    if "b_quantized" in v:
        np.testing.assert_allclose(v["b_scale"], scale, rtol=1e-6)
        total = total + v["b_quantized"].reshape(channels)
    result: Array = total * (scale.reshape(channels) if scale.ndim else scale)
    return result


LIMITS = {
    "tensor": (0, 255),
    "channel": (0, 255),
    "signed": (-128, 127),
    "wide": (0, 65535),
    "pow2": (-128, 127),
}


@pytest.mark.parametrize("config", ALL)
@pytest.mark.parametrize(
    ("make", "pads", "groups", "relu"),
    [(conv_relu, 1, 1, True), (depthwise, 1, 4, False)],
    ids=["conv and relu", "depthwise"],
)
def test_a_convolution(
    make: Factory, pads: int, groups: int, relu: bool, config: str
) -> None:
    model = make()
    data = samples(model)
    result = quantize_static(model, data, ALL[config])
    v, limits = quantized_values(result), LIMITS[config]
    for feeds in data:
        x = codes(feeds["x"], v, "x", *limits)
        y = accumulated(
            x,
            v,
            lambda a, w: convolution(a, w, pads=pads, groups=groups),
            (1, -1, 1, 1),
        )
        expected = codes(np.maximum(y, 0) if relu else y, v, "y", *limits)
        found = (
            np.rint(run(result, feeds)[0].astype(np.float64) / v["y_scale"])
            + v["y_zero_point"]
        )
        assert np.abs(found - expected).max() <= 1, (
            "one code: the float32 of the runtime may round another way"
        )
        assert (found != expected).mean() < 0.02


@pytest.mark.parametrize("config", ALL)
@pytest.mark.parametrize("trans_b", [0, 1])
def test_a_matrix_product(trans_b: int, config: str) -> None:
    model = gemm(trans_b)
    data = samples(model)
    result = quantize_static(model, data, ALL[config])
    v, limits = quantized_values(result), LIMITS[config]
    for feeds in data:
        x = codes(feeds["x"], v, "x", *limits)
        y = accumulated(x, v, lambda a, w: a @ (w.T if trans_b else w), (1, -1))
        found = run(result, feeds)[0].astype(np.float64)
        if config == "pow2":  # the result is quantized for integer-only hardware
            assert (
                np.abs(found - codes(y, v, "y", *limits) * v["y_scale"]).max()
                <= v["y_scale"] * 1.001
            )
        else:
            np.testing.assert_allclose(found, y, rtol=1e-5, atol=1e-6)


# What onnxruntime's optimizer makes of a model


@pytest.mark.parametrize("config", ALL)
@pytest.mark.parametrize(
    "make",
    [*MODELS.values(), conv_net, convtranspose, gemm],
    ids=lambda make: make.__name__,
)
def test_optimizing_changes_a_result_by_one_step_at_most(
    make: Factory, config: str
) -> None:
    model = make()
    data = samples(model, 4)
    result = quantize_static(model, data, portable(ALL[config]))
    v = quantized_values(result)
    for feeds in data:
        outputs = zip(
            result.graph.output,
            run(result, feeds),
            run(result, feeds, optimize=True),
            strict=True,
        )
        for output, plain, optimized in outputs:
            share = 1e-5
            if (
                make is branches
            ):  # inside a body weights alone are quantized: onnxruntime rounds what they multiply
                share = 1e-2
            tolerance = share * np.abs(plain).max() + float(
                v.get(f"{output.name}_scale", np.float64(0))
            )
            np.testing.assert_allclose(
                optimized.astype(np.float64),
                plain.astype(np.float64),
                rtol=0,
                atol=tolerance,
            )


@pytest.mark.parametrize("shape", [(5, 16), (2, 3, 16)], ids=["matrix", "stack"])
@pytest.mark.parametrize(
    "config", [TENSOR, CHANNEL, QConfig()], ids=["tensor", "channel", "default"]
)
def test_a_matmul_with_a_bias_runs_in_integers_and_has_a_float_result(
    tmp_path: Path, config: QConfig, shape: tuple[int, ...]
) -> None:
    # LayerNormalization keeps its input float, so that nothing rounds the sum.
    declared = ",".join(map(str, shape[:-1]))
    model = parse(
        f"""g (float[{declared},16] x) => (float[{declared},8] y) {{
            h = MatMul (x, w)  s = Add (h, b)  y = LayerNormalization (s, scale)
        }}""",
        w=weight(16, 8),
        b=normal(8),
        scale=np.ones(8, np.float32),
    )
    done = quantize_static(model, samples(model), config)
    kinds = optimized_kinds(done, tmp_path)
    assert "QGemm" in kinds and not {"Gemm", "MatMul", "DequantizeLinear"} & {*kinds}
    feeds = samples(model, 1, seed=9)[0]
    expected = run(model, feeds)[0].astype(np.float64)
    for optimize in (False, True):
        found = run(done, feeds, optimize=optimize)[0]
        assert np.square(found - expected).sum() < 1e-3 * np.square(expected).sum()


MOVED = {"QuantizeLinear", "DequantizeLinear", "Transpose", "Flatten", "MaxPool"}


@pytest.mark.parametrize(
    "config", [TENSOR, CHANNEL, QConfig()], ids=["tensor", "channel", "default"]
)
@pytest.mark.parametrize(
    ("make", "integer"),
    [
        (conv_relu, {"QLinearConv"}),
        (conv_1d, {"QLinearConv"}),
        (depthwise, {"QLinearConv"}),
        (batch_norm_net, {"QLinearConv"}),
        (conv_net, {"QLinearConv"}),
        (residual, {"QLinearConv", "QLinearAdd", "QLinearGlobalAveragePool", "QGemm"}),
        (gemm, {"QGemm"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_everything_runs_in_integers(
    tmp_path: Path, make: Factory, integer: set[str], config: QConfig
) -> None:
    model = make()
    found = optimized_kinds(quantize_static(model, samples(model), config), tmp_path)
    assert set(found) - MOVED == integer
    assert (
        found.count("QuantizeLinear") == 1 and found.count("DequantizeLinear") <= 1
    ), "only at the ends"


def test_a_join_and_attention_run_in_integers_too(tmp_path: Path) -> None:
    model = MODELS["unlike_concat"]()
    found = optimized_kinds(quantize_static(model, samples(model), TENSOR), tmp_path)
    assert {"QLinearConcat", "QLinearMul", "QLinearSigmoid", "QLinearConv"} <= set(
        found
    )
    model = MODELS["transformer_block"]()
    found = optimized_kinds(quantize_static(model, samples(model), CHANNEL), tmp_path)
    assert (
        "MatMul" not in found
        and found.count("QLinearMatMul") + found.count("MatMulIntegerToFloat") == 6
    )


@pytest.mark.parametrize("preset", ["A8W8", "U8U8", "DYNAMIC", "W8", "INT4"])
def test_no_layer_norm_becomes_a_slower_operator(tmp_path: Path, preset: str) -> None:
    """onnxruntime fuses an Add and a LayerNormalization only if their shapes are known to be equal.

    SkipLayerNormalization takes six times as long. The float model with an open sequence length
    does not tell the shapes, and neither may the quantized model, by names that inference invents.
    """
    model = parse(
        """g (float[N,S,8] x) => (float[N,T,8] y) {
            r = Reshape (x, sizes)  h = MatMul (r, w)  s = Add (h, r)
            y = LayerNormalization <axis = -1> (s, gamma, beta)
        }""",
        sizes=np.int64([0, -1, 8]),
        w=weight(8, 8),
        gamma=np.ones(8, np.float32),
        beta=np.zeros(8, np.float32),
    )
    data = samples(model) if QConfig.of(preset).measures else None
    result = quantize(model, data, preset).model
    for each in (model, result):
        found = optimized_kinds(each, tmp_path)
        assert found.count("LayerNormalization") == 1
        assert "SkipLayerNormalization" not in found


# How good it is


def on_the_grid(model: ModelProto) -> ModelProto:
    """The model with weights that 8 bits hold exactly."""
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.ndim > 1:
            largest = np.abs(array).max(axis=tuple(range(1, array.ndim)), keepdims=True)
            codes = np.rint(array / largest * 127).astype(np.float32)
            tensor.CopyFrom(
                numpy_helper.from_array(
                    codes * (largest / np.float32(127)), tensor.name
                )
            )
    return model


@pytest.mark.parametrize(
    ("preset", "floor"),
    [("A8W8", 25), ("S8S8", 25), ("A16W8", 30), ("XINT8", 25)],
    ids=lambda v: str(v),
)
def test_random_networks_keep_their_signal(preset: str, floor: float) -> None:
    for depth in (1, 4):
        assert (
            quantize(
                conv_net(depth), samples(conv_net(depth), 40), preset
            ).report.worst_sqnr
            >= floor
        )


def test_sixteen_bits_cost_nothing_beside_the_weights() -> None:
    """Gaussian weights of 8 bits give 36 to 41 dB here, whatever the activations.

    Exact ones show those alone.
    """
    for depth in (1, 4):
        model = conv_net(depth)
        data = samples(
            model, 10
        )  # too few to hold any out: nothing that is measured lies beyond the range
        weights_alone = quantize(
            model, data, WIDE.with_(activation=None)
        ).report.worst_sqnr
        assert quantize(model, data, WIDE).report.worst_sqnr >= weights_alone - 0.1
        assert quantize(on_the_grid(model), data, WIDE).report.worst_sqnr >= 70


def test_more_freedom_is_never_worse() -> None:
    model = residual()
    data = samples(model, 10)
    sqnr = {
        name: quantize(model, data, config).report.worst_sqnr
        for name, config in ALL.items()
    }
    assert (
        sqnr["wide"] > sqnr["channel"] > sqnr["pow2"] and sqnr["tensor"] > sqnr["pow2"]
    )


def test_one_scale_for_all_channels_ruins_the_small_ones() -> None:
    w = weight(4, 1, 3, 3) * np.float32([1, 0.1, 0.01, 0.001]).reshape(4, 1, 1, 1)
    model = parse(
        """g (float[N,4,8,8] x) => (float[N,4,8,8] y) {
            [conv] h = Conv <group = 4, pads = [1,1,1,1]> (x, w)
            [back] y = Mul (h, k)
        }""",
        w=w,
        k=np.float32([1, 10, 100, 1000]).reshape(1, 4, 1, 1),
    )
    # The Mul, which would be folded into the weight, keeps its channels apart.
    config = WIDE.with_(prepare=False)
    channel = quantize(model, samples(model), config).report.worst_sqnr
    tensor = quantize(
        model, samples(model), config.with_(per_channel=False)
    ).report.worst_sqnr
    results = np.concatenate([run(model, sample)[0] for sample in samples(model)])
    energies = np.square(results, dtype=np.float64).sum(axis=(0, 2, 3))
    lost = 10 * np.log10(energies.sum() / energies[-1])
    assert tensor <= lost and channel > 35, "the last of four channels is lost"


@pytest.mark.parametrize(
    "config", [TENSOR, SIGNED, POW2], ids=["tensor", "signed", "pow2"]
)
def test_permuting_channels_permutes_the_result(config: QConfig) -> None:
    order = np.array([2, 0, 3, 1])
    w, b = weight(4, 3, 3, 3), normal(4)
    text = "g (float[N,3,8,8] x) => (float[N,4,6,6] y) { y = Conv (x, w, b) }"
    models: list[Any] = [parse(text, w=w, b=b), parse(text, w=w[order], b=b[order])]
    data = samples(models[0])
    for channels in (False, True):
        first, second = (
            quantize_static(m, data, config.with_(per_channel=channels)) for m in models
        )
        np.testing.assert_array_equal(
            run(first, data[0])[0][:, order], run(second, data[0])[0]
        )
