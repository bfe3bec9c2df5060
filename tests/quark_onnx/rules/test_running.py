"""Quantized recurrent, fused and contributed operators run in onnxruntime, and compute what the
float ones do.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

from quark_onnx import QConfig, quantize
from quark_onnx.report.measure import decibels
from tests.models import normal, parse, run, samples, weight

HEADER = '<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]>'
CASES: dict[str, Callable[[], ModelProto]] = {}


def case(name: str, text: str, opset: int = 21, **constants: Any) -> None:
    CASES[name] = lambda: parse(HEADER.format(opset=opset) + text, **constants)


for kind, gates in (("LSTM", 4), ("GRU", 3), ("RNN", 1)):
    for directions in (1, 2):
        direction = "bidirectional" if directions == 2 else "forward"
        case(
            f"{kind}-{direction}",
            f"""g (float[5,2,32] x) => (float[5,{directions},2,64] y, float[{directions},2,64] h) {{
                y, h = {kind} <hidden_size = 64, direction = "{direction}"> (x, w, r, b) }}""",
            w=weight(directions * gates * 64, 32).reshape(directions, gates * 64, 32),
            r=weight(directions * gates * 64, 64).reshape(directions, gates * 64, 64),
            b=normal(directions, 2 * gates * 64, scale=0.1),
        )
FMAP = "float[1,32,8,8]"
case(
    "FusedConv",
    f"""g ({FMAP} x, {FMAP} z) => ({FMAP} y) {{
        y = com.microsoft.FusedConv <activation = "Relu", pads = [1,1,1,1]> (x, w, b, z) }}""",
    w=weight(32, 32, 3, 3),
    b=normal(32),
)
case(
    "FusedGemm",
    "g (float[4,32] x) => (float[4,16] y) { y = com.microsoft.FusedGemm <activation ="
    ' "Relu"> (x, w, b) }',
    w=weight(32, 16),
    b=normal(16),
)
for attributes, shape in (
    ("transB = 0", (32, 16)),
    ("transB = 1", (16, 32)),
    ("transBatchB = 1", (32, 2, 16)),
):
    case(
        f"FusedMatMul {attributes}",
        "g (float[2,4,32] x) => (float[2,4,16] y) { y = com.microsoft.FusedMatMul"
        f" <{attributes}> (x, w) }}",
        w=weight(*shape) if len(shape) == 2 else normal(*shape, scale=0.2),
    )
case(
    "Einsum",
    "g (float[2,5,32] x) => (float[2,4,5,8] y) { y = Einsum <equation ="
    ' "btk,hkd->bhtd"> (x, w) }',
    w=normal(4, 32, 8, scale=0.2),
)
case(
    "Einsum of an ellipsis",
    "g (float[2,5,32] x) => (float[2,5,8] y) { y = Einsum <equation ="
    ' "...ij,...jk->...ik"> (x, w) }',
    w=normal(1, 32, 8, scale=0.2),
)
case(
    "Attention",
    "g (float[2,8,32] x) => (float[2,8,32] y) { y = com.microsoft.Attention <num_heads"
    " = 4> (x, w, b) }",
    w=weight(32, 96),
    b=normal(96),
)
QKV = "float[2,8,32] q, float[2,8,32] k, float[2,8,32] v"
TURNS = np.outer(np.arange(8), 2.0 ** -np.arange(8))
case(
    "MultiHeadAttention",
    f"g ({QKV}) => (float[2,8,32] y) {{ y = com.microsoft.MultiHeadAttention <num_heads"
    " = 4> (q, k, v) }",
)
case(
    "RotaryEmbedding",
    """g (float[2,8,64] x) => (float[2,8,64] y) {
        y = com.microsoft.RotaryEmbedding <num_heads = 4, rotary_embedding_dim = 16> (x, i, c, s) }""",  # noqa: E501
    i=np.tile(np.arange(8), (2, 1)),
    c=np.cos(TURNS).astype(np.float32),
    s=np.sin(TURNS).astype(np.float32),
)
SKIP = "g (float[2,8,32] x, float[2,8,32] z) => (float[2,8,32] y)"
case(
    "SkipLayerNormalization",
    f"{SKIP} {{ y = com.microsoft.SkipLayerNormalization (x, z, k, b) }}",
    k=normal(32),
    b=normal(32),
)
case(
    "SkipSimplifiedLayerNormalization",
    f"{SKIP} {{ y = com.microsoft.SkipSimplifiedLayerNormalization (x, z, k) }}",
    k=normal(32),
)
case(
    "SimplifiedLayerNormalization",
    "g (float[2,8,32] x) => (float[2,8,32] y) { y = SimplifiedLayerNormalization (x,"
    " k) }",
    k=normal(32),
)
case(
    "EmbedLayerNormalization",
    """g (int32[2,5] i, int32[2,5] j) => (float[2,5,32] y, int32[2] m) {
        y, m = com.microsoft.EmbedLayerNormalization (i, j, t, p, s, k, b) }""",
    t=normal(9, 32),
    p=normal(8, 32, seed=1),
    s=normal(2, 32, seed=2),
    k=normal(32),
    b=normal(32, seed=1),
)
for op in ("BiasGelu", "QuickGelu", "FastGelu"):
    call = "(x, b)" if op != "QuickGelu" else "(x)"
    constants = {"b": normal(32)} if op != "QuickGelu" else {}
    case(
        op,
        f"g (float[2,8,32] x) => (float[2,8,32] y) {{ y = com.microsoft.{op} {call} }}",
        **constants,
    )
case(
    "GatherND",
    "g (float[4,32] x) => (float[2,32] y) { h = Relu (x) y = com.microsoft.GatherND (h,"
    " i) }",
    i=np.int64([[0], [2]]),
)
case(
    "Trilu",
    "g (float[4,4] x) => (float[4,4] y) { h = Relu (x) y = com.microsoft.Trilu (h) }",
)

#: Formats, and the least SQNR in dB that a layer of them has.
FORMATS = {
    "A8W8": 25,
    "S8S8": 20,
    "A16W8": 30,
    "XINT8": 18,
    "BF16": 35,
    "BFP16": 25,
    "DYNAMIC": 25,
    "INT4": 12,
}


@pytest.mark.parametrize("preset", FORMATS)
@pytest.mark.parametrize("name", CASES)
def test_it_runs_and_computes_the_same(name: str, preset: str) -> None:
    model = CASES[name]()
    data = samples(model, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = quantize(model, data, QConfig.of(preset)).model
    for feeds in data[:2]:
        for expected, found in zip(
            run(model, feeds), run(quantized, feeds, optimize=True), strict=True
        ):
            assert found.shape == expected.shape and found.dtype == expected.dtype
            if expected.dtype.kind == "f":
                error = found.astype(np.float64) - expected
                sqnr = decibels(
                    float(np.sum(expected.astype(np.float64) ** 2)),
                    float(np.sum(error**2)),
                )
                assert sqnr > FORMATS[preset]


@pytest.mark.parametrize("preset", ["A8W8", "XINT8", "DYNAMIC"])
@pytest.mark.parametrize(
    "name", [name for name in CASES if name.split("-")[0] in ("LSTM", "GRU", "RNN")]
)
def test_recurrent_weights_are_stored_in_8_bits(name: str, preset: str) -> None:
    model = CASES[name]()
    quantized = quantize(model, samples(model, 4), QConfig.of(preset)).model
    stored = {tensor.name for tensor in quantized.graph.initializer}
    # DynamicQuantizeLSTM has a layout of its own.
    is_dynamic = preset == "DYNAMIC" and name.startswith("LSTM")
    codes = (
        {"w_quantized_gates", "r_quantized_gates"}
        if is_dynamic
        else {"w_quantized", "r_quantized"}
    )
    assert not stored & {"w", "r"} and codes <= stored
    assert quantized.ByteSize() < model.ByteSize() / 2
