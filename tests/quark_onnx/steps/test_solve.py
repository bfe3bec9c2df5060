"""solve: scales against numpy in float64, and biases that always fit into 32 bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quark_onnx import QConfig
from quark_onnx.graph import Graph
from quark_onnx.plan import BiasOf, Keep, Quantize, Use
from quark_onnx.steps import Params
from tests.models import (
    MODELS,
    Array,
    Factory,
    conv_relu,
    convtranspose,
    dead_channel,
    gemm,
    parse,
    samples,
    shared_bias,
    tiny_weight_big_bias,
    weight,
)
from tests.pipeline import Stages
from tests.settings import ALL, CHANNEL, POW2, SIGNED, TENSOR

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
    first, second = params.table[Use("b")].scale, params.table[Use("b", "second")].scale
    assert second / first == pytest.approx(100, rel=0.01)


# A bias that 32 bits do not hold


def codes(stages: Stages, tensor: str) -> Array:
    """The exact codes of a bias, before any clipping."""
    bias = stages.graph.constant(tensor)
    assert bias is not None
    return np.abs(bias / scale(stages.params, tensor))


@pytest.mark.parametrize(
    ("config", "count"),
    [(CHANNEL, 2), (TENSOR, 2), (POW2, 2)],
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


def test_a_channel_of_grouped_transposed_convolution_serves_every_group() -> None:
    w = weight(4, 2, 1, 1)
    w[:, 1] *= 1e-9
    model = parse(
        "g (float[N,4,4,4] x) => (float[N,4,4,4] y) { y = ConvTranspose <group = 2> (x, w, b) }",
        w=w,
        b=np.float32([1, 2, 3, -50]),
    )
    stages = Stages.of(model, CHANNEL)
    assert stages.params.raised == {"w": 1} and codes(stages, "b").max() <= 2**31 - 1


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
