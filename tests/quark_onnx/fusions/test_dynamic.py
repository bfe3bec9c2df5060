"""MatMulInteger and ConvInteger compute what DynamicQuantizeLinear, DQ and a float operator do."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto

from quark_onnx import QConfig
from quark_onnx.api import quantize
from tests.models import (
    Factory,
    conv_1d,
    conv_relu,
    depthwise,
    gemm,
    gemm_scaled,
    kinds,
    matmul_3d,
    normal,
    parse,
    run,
    samples,
    weight,
)
from tests.settings import portable

DYNAMIC = portable(QConfig.of("DYNAMIC"))


def grouped() -> ModelProto:
    return parse(
        """g (float[N,4,8,8] x) => (float[N,6,4,4] y) {
            y = Conv <group = 2, strides = [2,2], auto_pad = "SAME_UPPER", dilations = [1,1]> (x, w, b)
        }""",
        w=weight(6, 2, 3, 3),
        b=normal(6),
    )


def matmul() -> ModelProto:
    return parse("g (float[N,5,6] x) => (float[N,5,3] y) { y = MatMul (x, w) }", w=weight(6, 3))


FUSED = {
    "matmul": (matmul, "MatMulInteger"),
    "gemm": (gemm, "MatMulInteger"),
    "gemm transposed": (lambda: gemm(trans_b=1), "MatMulInteger"),
    "conv": (conv_relu, "ConvInteger"),
    "conv 1d": (conv_1d, "ConvInteger"),
    "depthwise": (depthwise, "ConvInteger"),
    "conv of groups": (grouped, "ConvInteger"),
}
WEIGHTS = {
    "tensor": DYNAMIC.with_(per_channel=False),
    "channel": DYNAMIC,
    "asymmetric": DYNAMIC.with_(weight=DYNAMIC.weight.with_(symmetric=False, narrow=False)),  # type: ignore[union-attr]
}


@pytest.mark.parametrize("config", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("name", FUSED)
def test_products(name: str, config: QConfig) -> None:
    make, expected = FUSED[name]
    float_model = make()
    pairs = quantize(float_model, None, config.with_(form="qdq")).model
    fused = quantize(float_model, None, config.with_(form="operators")).model
    kernel_has_zeros = expected == "ConvInteger" and config is WEIGHTS["asymmetric"]
    assert (expected in kinds(fused)) != kernel_has_zeros
    assert {"Conv", "Gemm", "MatMul"} & set(kinds(fused)) == ({"Conv"} if kernel_has_zeros else set())
    for feeds in samples(float_model, 3):
        [plain] = run(pairs, feeds)
        for optimize in (False, True):
            [found] = run(fused, feeds, optimize=optimize)
            np.testing.assert_allclose(found, plain, atol=1e-5 * np.abs(plain).max())


@pytest.mark.parametrize("make", [gemm_scaled, matmul_3d])
def test_what_stays_between_its_pairs(make: Factory) -> None:
    float_model = make()
    fused = quantize(float_model, None, DYNAMIC).model
    assert {"Gemm", "MatMul"} & set(kinds(fused))
    run(fused, samples(float_model, 1)[0])
