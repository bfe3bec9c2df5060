"""solve: scales against numpy in float64, and biases that always fit into 32 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import ModelProto

from quark_onnx import QConfig, quantize
from quark_onnx.graph import Graph
from quark_onnx.plan import BiasOf, Keep, Quantize, Use
from quark_onnx.scales.compute_qparams import Params
from tests.models import (
    MODELS,
    Array,
    Factory,
    conv_relu,
    convtranspose,
    dead_channel,
    gemm,
    normal,
    parse,
    run,
    samples,
    shared_bias,
    tiny_weight_big_bias,
    weight,
)
from tests.pipeline import Stages
from tests.settings import ALL, CHANNEL, POW2, SIGNED, TENSOR, portable

TINY = np.finfo(np.float32).tiny


def scale(params: Params, tensor: str) -> Array:
    return params.table[Use(tensor)].scale.astype(np.float64)


def test_activations_follow_the_range_of_the_data() -> None:
    model = conv_relu()
    data = samples(model)
    lowest, highest = min(s["x"].min() for s in data), max(s["x"].max() for s in data)
    x = Stages.of(model, TENSOR, data).params.table[Use("x")]
    assert x.scale == pytest.approx((float(highest) - float(lowest)) / 255, rel=1e-6)
    assert x.zero_point == np.rint(-lowest / x.scale)
    x = Stages.of(model, SIGNED, data).params.table[Use("x")]
    assert (
        x.scale == pytest.approx(max(-lowest / 128, highest / 127), rel=1e-6)
        and x.zero_point == 0
    )


@pytest.mark.parametrize("group", [1, 2])
def test_weights_have_a_scale_for_each_channel(group: int) -> None:
    for model, axes in (
        (conv_relu(), (1, 2, 3)),
        (convtranspose(group), (0, 2, 3)),
        (gemm(0), 0),
        (gemm(1), 1),
    ):
        stages = Stages.of(model, CHANNEL)
        w = stages.graph.constant("w")
        assert w is not None
        np.testing.assert_allclose(
            scale(stages.params, "w"), np.abs(w).max(axis=axes) / 127, rtol=1e-6
        )


@pytest.mark.parametrize(
    "config",
    [TENSOR, CHANNEL, SIGNED, POW2],
    ids=["tensor", "channel", "signed", "pow2"],
)
def test_a_bias_has_the_scale_of_the_product(config: QConfig) -> None:
    for model, repeat in (
        (conv_relu(), 1),
        (gemm(1), 1),
        (convtranspose(1), 1),
        (convtranspose(2), 2),
    ):
        params = Stages.of(model, config).params
        expected = scale(params, "x") * np.tile(
            scale(params, "w"), repeat if config is CHANNEL else 1
        )
        np.testing.assert_allclose(
            scale(params, "b"), expected.reshape(scale(params, "b").shape), rtol=1e-6
        )
        assert not params.table[Use("b")].zero_point.any()


def test_a_shared_bias_has_a_scale_for_each_layer() -> None:
    params = Stages.of(shared_bias()).params
    first, second = (
        params.table[Use("b", layer)].scale for layer in ("first", "second")
    )
    assert second / first == pytest.approx(100, rel=0.01)


# A bias that 32 bits do not hold


def codes(stages: Stages, tensor: str) -> Array:
    """The exact codes of a bias, before any clipping."""
    bias = stages.graph.constant(tensor)
    assert bias is not None
    return np.abs(bias / scale(stages.params, tensor))


@pytest.mark.parametrize(
    ("config", "count"),
    [(CHANNEL, 2), (TENSOR, 1), (POW2, 1)],
    ids=["channel", "tensor", "pow2"],
)
def test_the_weight_scale_is_raised_and_counted(config: QConfig, count: int) -> None:
    stages = Stages.of(tiny_weight_big_bias(), config)
    assert codes(stages, "b").max() <= 2**31 - 1
    assert stages.params.raised == {"w": count}
    np.testing.assert_allclose(
        scale(stages.params, "b"),
        scale(stages.params, "x") * scale(stages.params, "w"),
        rtol=1e-6,
    )
    if config is POW2:
        assert all(
            np.frexp(scale(stages.params, tensor))[0].max() == 0.5 for tensor in "xwb"
        )


def test_only_the_channel_in_need_is_raised() -> None:
    w = weight(3, 3, 1, 1)
    w[1] *= 1e-9
    model = parse(
        "g (float[N,3,4,4] x) => (float[N,3,4,4] y) { y = Conv (x, w, b) }",
        w=w,
        b=np.float32([1, 5, -1]),
    )
    stages = Stages.of(model, CHANNEL)
    before = np.abs(w).max(axis=(1, 2, 3)) / 127
    raised = scale(stages.params, "w") / before
    assert stages.params.raised == {"w": 1} and raised[1] > 2
    np.testing.assert_allclose(raised[[0, 2]], 1, rtol=1e-6)


def test_each_group_of_a_transposed_convolution_raises_its_own_channel() -> None:
    w = weight(4, 2, 1, 1)
    w[:, 1] *= 1e-9
    model = parse(
        "g (float[N,4,4,4] x) => (float[N,4,4,4] y) { y = ConvTranspose <group = 2> (x, w, b) }",
        w=w,
        b=np.float32([1, 2, 3, -50]),
    )
    stages = Stages.of(model, CHANNEL)
    # Each group has scales of its own, and both of its channels in need are raised.
    assert stages.params.raised == {"w": 2} and codes(stages, "b").max() <= 2**31 - 1


def test_a_weight_shared_by_two_biases_holds_both() -> None:
    model = parse(
        """g (float[N,2,4,4] x) => (float[N,2,4,4] y, float[N,2,4,4] z) {
            y = Conv (x, w, b)
            z = Conv (x, w, c)
        }""",
        w=weight(2, 2, 1, 1) * np.float32(1e-9),
        b=np.float32([5, 1]),
        c=np.float32([1, 9]),
    )
    for config in (TENSOR, CHANNEL):
        stages = Stages.of(model, config)
        assert max(codes(stages, "b").max(), codes(stages, "c").max()) <= 2**31 - 1


@given(
    st.lists(
        st.sampled_from([0.0, 1e-45, 1e-38, 1e-8, 1.0, 65504.0, 3e38]),
        min_size=4,
        max_size=4,
    ),
    st.lists(st.sampled_from([0.0, -1e-38, 1e-8, -1.0, 3e38]), min_size=2, max_size=2),
    st.sampled_from([0.0, 1e-45, 1e-30, 1.0, 65504.0, 3e38]),
    st.sampled_from(sorted(ALL)),
)
def test_no_scale_is_ever_degenerate(
    w: list[float], b: list[float], x: float, config: str
) -> None:
    model = parse(
        "g (float[N,2] x) => (float[N,2] y) { y = Gemm (x, w, b) }",
        w=np.float32(w).reshape(2, 2),
        b=np.float32(b),
    )
    stages = Stages.of(model, ALL[config], [{"x": np.float32([[x, -x]])}])
    for use, params in stages.params.table.items():
        assert np.isfinite(params.scale).all() and (params.scale >= TINY).all(), use
        if isinstance(stages.plan.entry(use), BiasOf):
            bound = (
                3e38 / 2**31
            )  # a bias that large fits no float32 scale that anything else could share
            assert np.abs(b).max() > bound or codes(stages, "b").max() <= 2**31


def test_a_dead_channel_has_a_scale() -> None:
    for config in ALL.values():
        assert all(
            (p.scale >= TINY).all()
            for p in Stages.of(dead_channel(), config).params.table.values()
        )


# What stays float after all


def test_a_bias_beside_an_activation_without_range_stays_float() -> None:
    nothing = [{"x": np.zeros((1, 3, 8, 8), np.float32)}] * 3
    stages = Stages.of(conv_relu(), TENSOR, nothing)
    assert stages.plan.entry(Use("x")) == Keep(
        "it was zero throughout calibration: there is no range to measure"
    )
    assert stages.plan.entry(Use("b")) == Keep(
        "the activation or the weight beside it is not quantized"
    )
    Graph.of(stages.model)


@pytest.mark.parametrize("make", MODELS.values(), ids=list(MODELS))
def test_everything_that_is_quantized_has_a_scale(make: Factory) -> None:
    stages = Stages.of(make(), CHANNEL)
    wanted = {
        use
        for use, entry in stages.plan.entries.items()
        if isinstance(entry, Quantize | BiasOf)
    }
    assert stages.params.table.keys() == wanted


# A bias behind a MatMul


def worst(model: ModelProto, data: list[Any], config: QConfig) -> float:
    """The least SQNR of an output on a sample, optimized by onnxruntime and not."""
    done = quantize(model, data, portable(config).with_(search=0)).model
    found = list[float]()
    for optimize in (False, True):
        for feeds in data:
            for a, b in zip(
                run(model, feeds), run(done, feeds, optimize=optimize), strict=True
            ):
                noise = float(np.square(a - b, dtype=np.float64).sum())
                found.append(
                    float(np.square(a, dtype=np.float64).sum()) / (noise or 1e-30)
                )
    return 10 * float(np.log10(min(found)))


def test_another_sum_reads_the_float_value_of_a_bias() -> None:
    """onnxruntime takes codes of a bias for those of the product that they are added to."""
    model = parse(
        "g (float[4,8] x, float[8,8] a) => (float[4,8] u, float[4,8] y) { p = MatMul"
        " (x, w) u = Add (p, b) r = Relu (x) h = MatMul (r, a) y = Add (h, b) }",
        w=weight(8, 8),
        b=normal(8),
    )
    data = [
        {"x": normal(4, 8, seed=seed), "a": 30 * normal(8, 8, seed=seed)}
        for seed in range(8)
    ]
    assert worst(model, data, QConfig.of("A8W8")) > 30


@pytest.mark.parametrize("name", ["first", "last"])
def test_an_excluded_sum_reads_the_float_value_of_a_bias(name: str) -> None:
    model = parse(
        "g (float[4,8] x) => (float[4,8] y) { p = MatMul (x, w) [first] u = Add (p, b)"
        " r = Relu (u) h = MatMul (r, w) [last] y = Add (h, b) }",
        w=weight(8, 8),
        b=normal(8),
    )
    assert worst(model, samples(model), CHANNEL.with_(exclude=(name,))) > 30


@pytest.mark.parametrize("config", [CHANNEL, TENSOR], ids=["channel", "tensor"])
@pytest.mark.parametrize(
    "layer", ["h = MatMul (x, w) y = Add (h, b)", "y = Gemm (x, w, b)"]
)
@pytest.mark.parametrize("pruned", [3, 8])
def test_pruned_channels_keep_their_bias(
    pruned: int, layer: str, config: QConfig
) -> None:
    w = weight(16, 8) / 100
    w[:, :pruned] = 0
    model = parse(
        f"g (float[4,16] x) => (float[4,8] y) {{ {layer} }}", w=w, b=normal(8)
    )
    data = [{"x": 100 * normal(4, 16, seed=seed)} for seed in range(8)]
    done = quantize(model, data, config.with_(search=0)).model
    expected, found = (run(each, data[0])[0][:, :pruned] for each in (model, done))
    # A Gemm's result has a scale of its own, for the range of all channels.
    step = 0.05 if "Gemm" in layer else 1e-4
    assert np.abs(expected - found).max() < step


@pytest.mark.parametrize("value", [-1e6, -1e9])
def test_a_value_that_means_never_leaves_the_other_scores(value: float) -> None:
    b = normal(8)
    b[0] = value
    model = parse(
        "g (float[4,8] x) => (float[4,8] y) { h = MatMul (x, w) s = Add (h, b) y ="
        " Softmax (s) }",
        w=weight(8, 8),
        b=b,
    )
    for config in (TENSOR, CHANNEL):
        assert worst(model, samples(model), config) > 30
