"""QEmbedLayerNormalization looks up codes, where it computes the same as the float operator."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto

from quark_onnx import QConfig
from quark_onnx.api import quantize
from tests.models import normal, parse

TABLES = {
    "t": normal(32, 16),
    "p": normal(8, 16, seed=1),
    "s": normal(2, 16, seed=2),
    "g": 1 + normal(16, seed=3) / 8,
    "b": normal(16, seed=4),
}
HEAD = '<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>'
FEEDS = {
    "i": np.arange(10, dtype=np.int32).reshape(2, 5),
    "j": np.array([[0, 0, 0, 1, 1], [0, 1, 1, 1, 1]], np.int32),
}


def embedding(call: str) -> ModelProto:
    """Return a model with one embedding and a product."""
    text = f"""{HEAD} g (int32[2,5] i, int32[2,5] j) => (float[2,5,4] y) {{
        [op] {call}
        y = MatMul (h, w)
    }}"""
    return parse(text, w=normal(16, 4, seed=5), **TABLES)


def run(model: ModelProto) -> Any:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    names = [value.name for value in session.get_inputs()]
    return session.run(["y"], {name: FEEDS[name] for name in names})[0]


def types(model: ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


@pytest.mark.parametrize(
    "call",
    [
        "h, m = com.microsoft.EmbedLayerNormalization (i, j, t, p, s, g, b)",
        "h, m = com.microsoft.EmbedLayerNormalization <epsilon = 0.1> (i, j, t, p, s, g, b)",
        "h, m = com.microsoft.EmbedLayerNormalization (i, , t, p, , g, b)",
        "h, m = com.microsoft.EmbedLayerNormalization (i, j, t, p, s, g, b, j)",
        "h, m = com.microsoft.EmbedLayerNormalization <mask_index_type = 0> (i, j, t, p, s, g, b)",
    ],
    ids=["all", "epsilon", "without segments", "mask", "no index"],
)
def test_codes_are_looked_up(call: str) -> None:
    model = embedding(call)
    quantized = quantize(model, None, QConfig.of("DYNAMIC")).model
    assert "QEmbedLayerNormalization" in types(quantized)
    assert "DequantizeLinear" not in types(quantized)
    wanted, found = run(model), run(quantized)
    assert np.abs(found - wanted).max() < 0.05 * np.abs(wanted).max()


@pytest.mark.parametrize(
    "call",
    [
        "h, m, e = com.microsoft.EmbedLayerNormalization (i, j, t, p, s, g, b)\n"
        "        z = Identity (e)",
        "h, m = com.microsoft.EmbedLayerNormalization (i, j, t, p, s, g, b, , j)",
    ],
    ids=["sum", "positions"],
)
def test_what_the_operator_lacks_stays(call: str) -> None:
    model = embedding(call)
    if "z = " in call:
        model.graph.output.add(name="z").type.tensor_type.elem_type = 1
    quantized = quantize(model, None, QConfig.of("DYNAMIC")).model
    assert "QEmbedLayerNormalization" not in types(quantized)
    assert "EmbedLayerNormalization" in types(quantized)
    wanted, found = run(model), run(quantized)
    assert np.abs(found - wanted).max() < 0.05 * np.abs(wanted).max()
