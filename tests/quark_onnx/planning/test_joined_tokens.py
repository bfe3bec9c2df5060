"""joined_tokens: a class token stays float with the residual stream that it is joined to."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto

from quark_onnx import QConfig, quantize
from quark_onnx.graph import Graph
from quark_onnx.planning.make_plan import make_plan
from tests.models import normal, parse, run, weight
from tests.settings import POW2, TENSOR, WIDE

WIDTH = 16
NORM = "n = LayerNormalization (s, ones)  y = MatMul (n, u)"
DECOMPOSED = (
    "q = Mul (s, s)  v = ReduceMean <axes = [-1]> (q)  e = Add (v, small)  r = Sqrt (e)"
    "  n = Div (s, r)  y = MatMul (n, u)"
)
STREAMS = {
    "class token": f"[join] s = Concat <axis = 1> (token, t)  {NORM}",
    "decomposed normalization": f"[join] s = Concat <axis = 1> (token, t)  {DECOMPOSED}",
    "positions": (
        f"[join] c = Concat <axis = 1> (token, t)  [sum] s = Add (c, places)  {NORM}"
    ),
    "moved": (
        "[join] c = Concat <axis = 1> (token, t)  m = Transpose <perm = [0, 2, 1]> (c)"
        f"  s = Transpose <perm = [0, 2, 1]> (m)  {NORM}"
    ),
    "several sums": (
        "[join] c = Concat <axis = 1> (token, t)  [sum] a = Add (c, places)"
        f"  [more] s = Add (a, c)  {NORM}"
    ),
}
OTHERS = {
    "convolution": (
        "[join] c = Concat <axis = 1> (token, t)  [sum] s = Add (c, places)  r = Relu"
        " (s)  y = MatMul (r, u)"
    ),
    "product before": (
        f"[join] c = Concat <axis = 1> (token, t)  s = MatMul (c, square)  {NORM}"
    ),
}


def block(text: str) -> ModelProto:
    """Tokens t of an image, a class token, and a layer behind their normalization."""
    return parse(
        f"""g (float[2,5,{WIDTH}] x, float[2,1,{WIDTH}] z) => (float[2,6,8] y) {{
            t = MatMul (x, w)
            token = Relu (z)
            {text}
        }}""",
        w=weight(WIDTH, WIDTH),
        u=weight(WIDTH, 8, seed=1),
        square=weight(WIDTH, WIDTH, seed=2),
        places=normal(1, 6, WIDTH, seed=3, scale=0.1),
        ones=np.ones(WIDTH, np.float32),
        small=np.float32(1e-6),
    )


def kept(text: str, config: QConfig) -> dict[str, str]:
    return dict(make_plan(Graph.of(block(text)), config).kept)


@pytest.mark.parametrize("config", [TENSOR, POW2], ids=["8", "pow2"])
@pytest.mark.parametrize("text", STREAMS.values(), ids=list(STREAMS))
def test_a_concat_in_a_residual_stream_stays_float(text: str, config: QConfig) -> None:
    assert "residual stream" in kept(text, config)["join"]


@pytest.mark.parametrize("text", STREAMS.values(), ids=list(STREAMS))
def test_16_bits_hold_a_residual_stream(text: str) -> None:
    assert "join" not in kept(text, WIDE)


@pytest.mark.parametrize("text", OTHERS.values(), ids=list(OTHERS))
def test_a_concat_in_front_of_a_layer_is_quantized(text: str) -> None:
    assert "join" not in kept(text, TENSOR)


def test_a_sum_whose_parts_are_joined_again_stays_float() -> None:
    text = (
        "[sum] a = Add (t, t)  f = Slice (a, zero, one, one)  [join] s = Concat <axis ="
        f" 1> (f, a)  {NORM}"
    )
    model = block(text)
    model.graph.initializer.extend(
        parse(
            "g (float[1] i) => (float[1] o) { o = Neg (i) }",
            zero=np.int64([0]),
            one=np.int64([1]),
        ).graph.initializer
    )
    assert "residual stream" in make_plan(Graph.of(model), TENSOR).kept["sum"]


def test_a_small_token_beside_large_ones_keeps_its_signal() -> None:
    """The class token is a hundredth of the tokens of the image."""
    model = block(STREAMS["positions"])

    def feeds(seed: int) -> dict[str, np.ndarray]:
        image = 300 * normal(2, 5, WIDTH, seed=seed)
        return {"x": image, "z": normal(2, 1, WIDTH, seed=seed)}

    config = TENSOR.with_(search=0)
    done = quantize(model, [feeds(seed) for seed in range(8)], config).model
    given = feeds(99)
    expected = run(model, given)[0][:, 0].astype(np.float64)
    error = run(done, given)[0][:, 0] - expected
    assert np.square(error).sum() < 1e-3 * np.square(expected).sum()
