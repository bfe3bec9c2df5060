"""Damage that another quantizer does without a word, by its optimizers and on the way to them.

None of it is done here.

Each test is a model on which that was seen, and says what came of it there.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper

from quark_onnx import QConfig, compare, quantize
from quark_onnx.common.registry import DTYPES
from quark_onnx.config import QuantizationSpec
from quark_onnx.optimizers import (
    CLE,
    GPTQ,
    AdaQuant,
    AdaRound,
    AutoMixedPrecision,
    BiasCorrection,
    SmoothQuant,
)
from tests.models import Feeds, normal, parse, run, weight

#: As good as float; where nothing at all were quantized, the result would be the model as it came.
FINE = QConfig(None, QuantizationSpec(DTYPES["int16"], per_channel=True))
LEARNED = (AdaRound(iterations=60), AdaQuant(iterations=60))


def batches(
    *shape: int, count: int = 10, seed: int = 0, mean: float = 0.0
) -> list[Feeds]:
    random = np.random.default_rng(seed)
    return [
        {"x": random.normal(mean, 1, shape).astype(np.float32)} for _ in range(count)
    ]


def sqnr(
    model: ModelProto, other: ModelProto, data: list[Feeds], output: int = 0
) -> float:
    pairs = [
        [run(each, sample)[output].astype(np.float64) for each in (model, other)]
        for sample in data
    ]
    noise = sum(float(np.square(a - b).sum()) for a, b in pairs)
    return 10 * float(
        np.log10(sum(float(np.square(a).sum()) for a, _ in pairs) / max(noise, 1e-300))
    )


def uneven(*shape: int, seed: int = 0) -> np.ndarray:
    """Weights whose outputs differ by orders of magnitude, which CLE levels."""
    by = 10.0 ** np.random.default_rng(seed).uniform(
        -1.5, 1.5, [shape[0], *[1] * (len(shape) - 1)]
    )
    return (weight(*shape, seed=seed) * by).astype(np.float32)


# CLE


def equalized(
    body: str, outputs: str = "float y", **constants: Any
) -> tuple[ModelProto, ModelProto]:
    model = parse(f"g (float[N,3,8,8] x) => ({outputs}) {{ {body} }}", **constants)
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    data = batches(2, 3, 8, 8, count=4)
    return model, quantize(model, data, FINE.with_(optimizers=CLE())).model


K, BIAS, L = uneven(6, 3, 3, 3, seed=1), normal(6), weight(4, 6, 3, 3, seed=2)
CLE_CASES = {
    "a pad with ones": (
        "a = Conv (x, k, b) r = Relu (a) p = Pad (r, pads, one) y = Conv (p, l)",
        {
            "k": K,
            "b": BIAS,
            "l": L,
            "pads": np.int64([0, 0, 1, 1, 0, 0, 1, 1]),
            "one": np.float32(1),
        },
    ),
    "a mean over channels": (
        (
            "a = Conv (x, k, b) r = Relu (a) m = ReduceMean <axes = [1]> (r) y = Conv"
            " (m, one)"
        ),
        {"k": K, "b": BIAS, "one": weight(4, 1, 3, 3)},
    ),
    "a weight that two layers read": (
        (
            "a = Conv (x, k, b) r = Relu (a) c = Conv <pads = [1,1,1,1]> (r, s) d ="
            " Relu (c) y = Conv (d, s)"
        ),
        {"k": K, "b": BIAS, "s": uneven(6, 6, 3, 3, seed=3)},
    ),
    "no attribute group": (
        "a = Conv (x, k) r = Relu (a) y = Conv (r, l)",
        {"k": K, "l": L},
    ),
}


@pytest.mark.parametrize("case", CLE_CASES)
def test_equalization_keeps_the_function(case: str) -> None:
    """There: 28 dB, a model that does not load, an exception, and nothing done without a word."""
    body, constants = CLE_CASES[case]
    model, result = equalized(
        body, **{name: np.asarray(value) for name, value in constants.items()}
    )
    assert sqnr(model, result, batches(2, 3, 8, 8, seed=5)) > 75
    assert ("equalized" in str(result)) == (case == "no attribute group")


def test_equalization_keeps_what_is_handed_out_on_the_way() -> None:
    """There: that output has 0.9 dB."""
    body = "a = Conv (x, k, b) m = Relu (a) y = Conv (m, l)"
    model, result = equalized(body, "float y, float m", k=K, b=BIAS, l=L)
    for output in range(2):
        assert sqnr(model, result, batches(2, 3, 8, 8, seed=5), output) > 75


# SmoothQuant


def test_channels_that_the_data_leaves_at_zero_keep_their_weights() -> None:
    """There: their row of the weight becomes zero, and the float model drops to 16.6 dB on other
    data.
    """
    model = parse(
        "g (float[N,T,8] x) => (float[N,T,4] y) { n = LayerNormalization <axis = -1>"
        " (x, g, b) m = Mul (n, dead) r = Relu (m) y = MatMul (r, w) }",
        g=np.ones(8, np.float32),
        b=np.zeros(8, np.float32),
        dead=np.ones(8, np.float32),
        w=weight(8, 4),
    )
    quiet = [
        {"x": np.concatenate([s["x"][..., :7], -9 + 0 * s["x"][..., 7:]], axis=-1)}
        for s in batches(2, 5, 8)
    ]
    for alpha in (0.5, "auto"):
        config = FINE.with_(optimizers=SmoothQuant(alpha, insert=True))
        result = quantize(model, quiet, config).model
        assert sqnr(model, result, batches(2, 5, 8, seed=4)) > 60


# Layers


def gemms(size: int = 24) -> ModelProto:
    return parse(
        f"g (float[N,{size}] x) => (float[N,{size}] y) {{ a = Gemm (x, v, b) r = Relu"
        " (a) y = Gemm (r, w) }",
        v=weight(size, size, seed=1),
        b=normal(size),
        w=weight(size, size, seed=2),
    )


def test_gptq_sees_all_the_data_and_the_bits_that_were_asked_for() -> None:
    """There: bits=2 gives what bits=8 does, the group size is ignored, and one sample is looked at."""  # noqa: E501
    model, found = gemms(), []
    random = np.random.default_rng(0)
    mixing = [random.normal(size=(24, 24)).astype(np.float32) for _ in range(2)]
    # the first sample knows one half of the inputs only
    data = [
        {"x": random.normal(size=(60, 24)).astype(np.float32) @ mixing[place > 0] / 5}
        for place in range(12)
    ]
    for name, block in (("int2", 0), ("int4", 0), ("int4", 16), ("int8", 0)):
        if name not in DTYPES:
            continue
        spec = QuantizationSpec(DTYPES[name], block_size=block, per_channel=not block)
        config = QConfig(None, spec)
        plain, better = (
            quantize(model, data, config.with_(optimizers=chosen)).model
            for chosen in ((), (GPTQ(),))
        )
        found.append(sqnr(model, better, data[1:]))
        assert found[-1] > sqnr(model, plain, data[1:]) + 0.5
    assert found[-1] > found[-3] + 15
    for before, after in pairwise(found):
        assert after > before + 0.3, "more bits, and more scales, are better"


def test_a_product_and_a_sum_are_optimized_whether_or_not_they_could_be_one_node() -> (
    None
):
    """There: with a fixed batch both become a Gemm first, which SmoothQuant and GPTQ do not know,
    without a word.
    """
    for batch in ("4", "N"):
        model = parse(
            f"g (float[{batch},8] x) => (float[{batch},8] y) {{ a = MatMul (x, w) y ="
            " Add (a, b) }",
            w=weight(8, 8),
            b=normal(8),
        )
        mixing = normal(8, 8, seed=7)
        data = [{"x": sample["x"] @ mixing} for sample in batches(4, 8, count=40)]
        result = quantize(model, data, QConfig.of("INT4").with_(optimizers=GPTQ()))
        assert [layer.changed["gptq"] > 0 for layer in result.report.layers] == [True]


def test_a_ragged_last_batch_is_data_like_any_other() -> None:
    """There: every layer fails on it, nothing is learned, and the run reports success."""
    data = [*batches(16, 24), *batches(5, 24, count=1, seed=9)]
    for optimizer in LEARNED:
        result = quantize(gemms(), data, QConfig.of("A8W8").with_(optimizers=optimizer))
        assert all(layer.changed[optimizer.name] > 0 for layer in result.report.layers)


def test_settings_reach_the_optimizer() -> None:
    """There: seven settings of AdaRound are never passed on, and a changed one of CLE keeps its
    first value.
    """
    data = batches(16, 24)
    base = quantize(
        gemms(), data, QConfig.of("INT4").with_(optimizers=AdaRound(iterations=40))
    ).model
    for changed in (
        {"rate": 0.02},
        {"push": 0.0},
        {"rows": 8},
        {"warm": 0.9},
        {"iterations": 3},
    ):
        other = AdaRound(**{"iterations": 40, **changed})  # type: ignore[arg-type]
        assert (
            quantize(gemms(), data, QConfig.of("INT4").with_(optimizers=other)).model
            != base
        )
    assert (
        quantize(
            gemms(), data, QConfig.of("INT4").with_(optimizers="adaround:iterations=40")
        ).model
        == base
    )


def test_optimizers_keep_their_order_and_none_is_dropped() -> None:
    """There: the order goes through a set, and of AdaRound and AdaQuant the second is left out."""
    result = quantize(
        gemms(), batches(16, 24), QConfig.of("INT4").with_(optimizers=LEARNED)
    )
    notes = [
        note.partition(":")[0] for note in result.report.notes if ": kept in " in note
    ]
    assert notes == ["adaround", "adaquant"]


@pytest.mark.parametrize("seed", range(6))
def test_a_corrected_bias_is_stored_with_the_scale_that_it_is_read_with(
    seed: int,
) -> None:
    """There: for 2 of 25 seeds the bias is halved, 34.1 -> 11.5 dB."""
    model = parse(
        "g (float[N,3,8,8] x) => (float[N,6,8,8] y) { a = Conv <pads = [1,1,1,1]> (x,"
        " k, b) y = Relu (a) }",
        k=weight(6, 3, 3, 3, seed=seed),
        b=normal(6, seed=seed, scale=3),
    )
    data = batches(2, 3, 8, 8, seed=seed)
    plain, better = (
        sqnr(
            model,
            quantize(model, data, QConfig.of("XINT8").with_(optimizers=chosen)).model,
            data,
        )
        for chosen in ((), (BiasCorrection(),))
    )
    assert better > plain - 0.3


def test_a_bias_beyond_its_integers_raises_the_scale_of_the_weight() -> None:
    """There: scales move and the codes of the weight do not: weights times 128, 46.3 -> 6.0 dB; and
    an int32 bias overflows.
    """
    model = parse(
        "g (float[N,8] x) => (float[N,8] y) { y = Gemm (x, w, b) }",
        w=weight(8, 8) * np.float32(2e-4),
        b=normal(8, scale=55),
    )
    for preset in ("XINT8", "A8W8", "A16W8"):
        for optimizers in ((), (GPTQ(), BiasCorrection()), LEARNED):
            result = quantize(
                model, batches(4, 8), QConfig.of(preset).with_(optimizers=optimizers)
            ).model
            assert sqnr(model, result, batches(4, 8, seed=3)) > 35


def test_a_normalization_without_epsilon_has_the_epsilon_of_onnx() -> None:
    """There: 1e-10 is taken for 1e-5 when it is folded into the convolution behind it: -7.3 dB."""
    model = parse(
        "g (float[N,3,8,8] x) => (float[N,4,8,8] y) { n = BatchNormalization (x, s, b,"
        " m, v) y = Conv <pads = [1,1,1,1]> (n, k) }",
        s=np.ones(3, np.float32),
        b=normal(3),
        m=normal(3, seed=1),
        v=np.float32([1e-6, 1e-9, 1]),
        k=weight(4, 3, 3, 3),
    )
    for optimizers in ((), (CLE(), GPTQ())):
        result = quantize(
            model, batches(2, 3, 8, 8), QConfig.of("A16W8").with_(optimizers=optimizers)
        ).model
        assert sqnr(model, result, batches(2, 3, 8, 8, seed=2)) > 35


def test_more_bits_are_given_to_the_float_weights() -> None:
    """There: "int16" weights are the int8 ones encoded again, 25.4 dB where 36.8 are to be had."""
    model, data = gemms(), batches(16, 24)
    mixed = QConfig.of("A8W8").with_(optimizers=AutoMixedPrecision(target=1000.0))
    direct = QConfig.of("A16W8")
    assert (
        compare(model, quantize(model, data, mixed).model, data).sqnr
        > compare(model, quantize(model, data, direct).model, data).sqnr - 1
    )


def test_a_second_run_is_like_the_first() -> None:
    """There: presets and options are changed by their first use."""
    config, data = (
        QConfig.of("XINT8").with_(optimizers=(CLE(), *LEARNED)),
        batches(16, 24),
    )
    first = quantize(gemms(), data, config)
    quantize(gemms(), data, "A8W8")
    assert quantize(gemms(), data, config).model == first.model
    weights = [numpy_helper.to_array(tensor) for tensor in gemms().graph.initializer]
    assert all(np.isfinite(value).all() for value in weights)
