"""The experts of a MoE have a scale per output; the oracle is the operator in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

from quark_onnx import QConfig, quantize
from tests.models import Array, Feeds, normal, parse, run

EXPERTS, WIDTH, INNER, CHOSEN = 4, 16, 32, 2


def mixture(ratio: float) -> tuple[ModelProto, dict[str, Any]]:
    """A MoE whose output channels differ in range by a factor."""
    constants: dict[str, Any] = {
        "up": normal(EXPERTS, INNER, WIDTH, scale=WIDTH**-0.5),
        "up_bias": normal(EXPERTS, INNER, scale=0.1),
        "down": normal(EXPERTS, WIDTH, INNER, seed=1, scale=INNER**-0.5),
    }
    constants["down"] *= np.geomspace(1, 1 / ratio, WIDTH, dtype=np.float32)[:, None]
    model = parse(
        f"""<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
        g (float[N,{WIDTH}] x, float[N,{EXPERTS}] p) => (float[N,{WIDTH}] y) {{
        y = com.microsoft.MoE <k={CHOSEN}, activation_type="relu"> (x, p, up, up_bias, down) }}""",
        **constants,
    )
    return model, constants


def in_float64(feeds: Feeds, constants: dict[str, Any]) -> Array:
    up, bias, down = (
        constants[name].astype(np.float64) for name in ("up", "up_bias", "down")
    )
    logits = feeds["p"].astype(np.float64)
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    result = np.zeros(feeds["x"].shape)
    for token, x in enumerate(feeds["x"].astype(np.float64)):
        for expert in np.argsort(-logits[token])[:CHOSEN]:
            hidden = np.maximum(up[expert] @ x + bias[expert], 0)
            result[token] += shares[token, expert] * (down[expert] @ hidden)
    return result


def samples() -> list[Feeds]:
    return [
        {"x": normal(20, WIDTH, seed=seed), "p": normal(20, EXPERTS, seed=seed)}
        for seed in range(4)
    ]


def relative_sqnr(preset: str, ratio: float) -> float:
    """SQNR in dB, where each output channel counts relative to its own values."""
    model, constants = mixture(ratio)
    config = QConfig.of(preset)
    data = samples() if config.measures else None
    quantized = quantize(model, data, config).model
    signal = noise = np.zeros(WIDTH)
    for feeds in samples():
        expected = in_float64(feeds, constants)
        [plain], [found] = run(model, feeds), run(quantized, feeds)
        np.testing.assert_allclose(plain, expected, rtol=1e-4, atol=1e-5)
        signal = signal + np.square(expected).sum(axis=0)
        noise = noise + np.square(found - expected).sum(axis=0)
    return float(-10 * np.log10(np.mean(noise / signal)))


@pytest.mark.parametrize(
    ("preset", "least"), [("W8", 38), ("INT4", 15), ("A8W8", 38), ("DYNAMIC", 38)]
)
def test_outputs_of_unequal_range(preset: str, least: float) -> None:
    even, uneven = relative_sqnr(preset, 1.0), relative_sqnr(preset, 200.0)
    assert even > least and uneven > even - 2


def test_an_engine_of_integers_rounds_input_and_result() -> None:
    model, _ = mixture(1.0)
    quantized = quantize(model, samples(), "XINT8").model
    assert quantized.ByteSize() < 0.6 * model.ByteSize()
    kinds = [node.op_type for node in quantized.graph.node]
    assert kinds.count("QuantizeLinear") == 2
