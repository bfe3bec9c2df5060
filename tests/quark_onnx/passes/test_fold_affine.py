"""fold_affine: Mul, Div, Add and Sub with constants go into the layer next to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper

from quark_onnx import QConfig, quantize
from quark_onnx.graph import Graph
from quark_onnx.passes import fold_affine
from tests.cases import loop_over
from tests.models import Feeds, kinds, normal, parse, run, samples, weight
from tests.quark_onnx.passes.test_passes import applied

#: Input, output, layer, shape of the weight, channels of the input, and shape of a vector.
LAYERS = {
    "conv": ("1,6,5,5", "1,4,3,3", "Conv (a, w{b})", (4, 6, 3, 3), (1, 1)),
    "conv 1d": ("1,6,5", "1,4,3", "Conv (a, w{b})", (4, 6, 3), (1,)),
    "groups": ("1,6,5,5", "1,4,3,3", "Conv <group=2> (a, w{b})", (4, 3, 3, 3), (1, 1)),
    "transposed groups": (
        "1,6,5,5",
        "1,4,7,7",
        "ConvTranspose <group=2> (a, w{b})",
        (6, 2, 3, 3),
        (1, 1),
    ),
    "gemm": ("3,6", "3,4", "Gemm (a, w{b})", (6, 4), ()),
    "gemm transposed": ("3,6", "3,4", "Gemm <transB=1> (a, w{b})", (4, 6), ()),
}
#: Steps with a vector c of the channels, and a scalar s.
CHAINS = {
    "batch norm": "m = Mul ({x}, c) {y} = Add (m, d)",
    "statistics": "m = Sub ({x}, c) n = Div (m, d) {y} = Mul (n, s)",
    "from a constant": "m = Sub (c, {x}) {y} = Mul (s, m)",
}


def constants(channels: int, tail: tuple[int, ...]) -> dict[str, Any]:
    return {
        "c": normal(channels, *tail, seed=2),
        "d": normal(channels, *tail, seed=3) + 3,
        "s": np.float32(-0.7) * np.ones(1, np.float32),
    }


@loop_over("bias", {"plain": False, "bias": True})
@loop_over("chain", tuple(CHAINS))
@loop_over("layer", tuple(LAYERS))
def test_steps_behind_a_layer(layer: str, chain: str, bias: bool) -> None:
    x, y, call, shape, tail = LAYERS[layer]
    steps = CHAINS[chain].format(x="h", y="y")
    arrays = constants(4, tail) | ({"b": normal(4, seed=5)} if bias else {})
    model = parse(
        f"g (float[{x}] a) => (float[{y}] y)"
        f"{{ h = {call.format(b=', b' if bias else '')} {steps} }}",
        w=weight(*shape),
        **arrays,
    )
    count, after = applied(fold_affine, model)
    assert count == len(model.graph.node) - 1 and len(after.graph.node) == 1


def similar(channels: int, tail: tuple[int, ...]) -> np.ndarray:
    """Factors of both signs that differ by less than two."""
    factors = np.linspace(0.8, 1.2, channels, dtype=np.float32)
    factors[::2] *= -1
    return factors.reshape(channels, *tail)


#: Steps of a chain before a shift, which only layers on images take.
BEFORE_SHIFT = {"batch norm": 0, "statistics": 2, "from a constant": 1}


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("layer", [name for name in LAYERS if name[:5] != "trans"])
def test_steps_in_front_of_a_layer(layer: str, chain: str) -> None:
    x, y, call, shape, tail = LAYERS[layer]
    steps = CHAINS[chain].format(x="x", y="a")
    model = parse(
        f"g (float[{x}] x) => (float[{y}] y) {{ {steps} y = {call.format(b='')} }}",
        w=weight(*shape),
        **constants(6, tail) | dict.fromkeys("cd", similar(6, tail)),
    )
    before = len(model.graph.node)
    expected = before - 1 if len(shape) == 4 else BEFORE_SHIFT[chain]
    count, after = applied(fold_affine, model)
    assert count == expected and len(after.graph.node) == before - expected


def error(model: ModelProto, data: list[Feeds], preset: str) -> float:
    """The noise of the quantized model, as a share of the signal."""
    config = QConfig.of(preset)
    quantized = quantize(model, data if config.measures else None, config).model
    noise = signal = 0.0
    for feeds in data:
        [expected], [found] = run(model, feeds), run(quantized, feeds)
        noise += float(np.square(expected - found).sum())
        signal += float(np.square(expected).sum())
    return noise / signal


@pytest.mark.parametrize("preset", ["W8", "DYNAMIC"])
def test_features_of_unlike_scales_are_standardized_in_float(preset: str) -> None:
    """Folded into the weight, the standardization leaves most features no codes: -11 dB."""
    scales = np.array([1e-2, 1e-1, 1, 1, 10, 100], np.float32)
    model = parse(
        """g (float[32,6] x) => (float[32,4] y)
        { m = Sub (x, mean) n = Div (m, scale) y = Gemm (n, w, b) }""",
        mean=5 * scales,
        scale=scales,
        w=weight(6, 4),
        b=normal(4, seed=1),
    )
    data = [{"x": (normal(32, 6, seed=seed) + 5) * scales} for seed in range(4)]
    assert error(model, data, preset) < 1e-3


@pytest.mark.parametrize("preset", ["W8", "DYNAMIC"])
def test_a_mean_far_above_the_variation_is_subtracted_in_float(preset: str) -> None:
    model = parse(
        "g (float[32,6] x) => (float[32,4] y) { m = Sub (x, mean) y = Gemm (m, w) }",
        mean=np.float32(300),
        w=weight(6, 4),
    )
    data = [{"x": normal(32, 6, seed=seed) + np.float32(300)} for seed in range(4)]
    assert error(model, data, preset) < 1e-3


@pytest.mark.parametrize("least", [-1e9, -np.inf])
def test_a_mask_stays_an_addition(least: float) -> None:
    model = parse(
        "g (float[8,6] x) => (float[8,4] y) { h = Gemm (x, w) m = Add (h, c) y = Softmax (m) }",
        w=weight(6, 4),
        c=np.array([0, least, 0, 0], np.float32),
    )
    assert fold_affine(Graph.of(model)) == 0


def padded(line: str) -> ModelProto:
    return parse(
        f"g (float[1,3,6,6] x) => (float[1,4,6,6] y) {{ a = {line} (x, c)"
        " y = Conv <pads=[1,1,1,1]> (a, w) }",
        c=similar(3, (1, 1)),
        w=weight(4, 3, 3, 3),
    )


def test_a_factor_passes_padding_and_a_shift_does_not() -> None:
    assert kinds(applied(fold_affine, padded("Mul"))[1]) == ["Conv"]
    assert applied(fold_affine, padded("Add"))[0] == 0


def test_an_add_after_a_matmul_is_its_bias() -> None:
    """The bias stays an Add; what follows is folded into both."""
    model = parse(
        """g (float[2,3,6] x) => (float[2,3,4] y)
        { h = MatMul (x, w) i = Add (b, h) j = Mul (i, c) k = Sub (j, d) y = Div (k, c) }""",
        w=weight(6, 4),
        b=normal(4, seed=1),
        c=normal(4, seed=2),
        d=normal(1, 4, seed=3),
    )
    count, after = applied(fold_affine, model)
    assert count == 3 and kinds(after) == ["MatMul", "Add"]


UNTOUCHED = {
    "another reader": "h = Conv (x, w) y = Mul (h, c) z = Neg (h)",
    "an output": "z = Conv (x, w) y = Mul (z, c)",
    "positions": "h = Conv (x, w) y = Add (h, p) z = Neg (y)",
    "a shared weight": "h = Conv (x, w) y = Mul (h, c) z = Conv (x, w)",
    "a computed divisor": "h = Conv (x, w) y = Div (c, h) z = Neg (y)",
    "zero": "h = Conv (x, w) y = Div (h, o) z = Neg (y)",
}


@pytest.mark.parametrize("name", UNTOUCHED)
def test_what_stays(name: str) -> None:
    model = parse(
        "g (float[1,3,4,4] x) => (float[1,3,4,4] y, float[1,3,4,4] z)"
        f"{{ {UNTOUCHED[name]} }}",
        w=weight(3, 3, 1, 1),
        c=normal(3, 1, 1, seed=2),
        p=normal(1, 3, 4, 4, seed=3),
        o=np.zeros(1, np.float32),
    )
    assert fold_affine(Graph.of(model)) == 0


def test_the_affine_part_of_a_normalization_stays() -> None:
    """onnxruntime fuses it with the decomposed LayerNorm."""
    model = parse(
        """g (float[2,3,6] x) => (float[2,3,4] y) {
        m = ReduceMean <axes=[-1]> (x) e = Sub (x, m) q = Mul (e, e)
        v = ReduceMean <axes=[-1]> (q) u = Add (v, s) r = Sqrt (u) n = Div (e, r)
        a = Mul (n, c) f = Add (a, d) h = MatMul (f, w) y = Add (h, b) }""",
        w=weight(6, 4),
        b=normal(4, seed=1),
        c=normal(6, seed=2),
        d=normal(6, seed=3),
        s=np.array([1e-5], np.float32),
    )
    assert fold_affine(Graph.of(model)) == 0


def test_a_broadcast_single_channel_stays() -> None:
    model = parse(
        "g (float[1,1,4,4] x) => (float[1,4,4,4] y) { a = Mul (x, c) y = Conv (a, w) }",
        c=normal(3, 1, 1),
        w=weight(4, 3, 1, 1),
    )
    assert fold_affine(Graph.of(model)) == 0


def reader(depth: int = 6) -> ModelProto:
    """A converted network whose BatchNormalizations are written out."""
    lines, source, arrays = list[str](), "x", dict[str, Any]()
    for place in range(depth):
        arrays[f"w{place}"] = weight(8, 8, 3, 3, seed=place)
        arrays[f"g{place}"] = np.exp2(normal(8, 1, 1, seed=20 + place))
        arrays[f"b{place}"] = normal(8, 1, 1, seed=40 + place)
        lines.append(
            f"h{place} = Conv <pads=[1,1,1,1]> ({source}, w{place})"
            f" m{place} = Mul (h{place}, g{place}) a{place} = Add (m{place}, b{place})"
            f" r{place} = Relu (a{place})"
        )
        source = f"r{place}"
    return parse(
        "g (float[1,8,12,12] x) => (float[1,8,12,12] y)"
        f" {{ {' '.join(lines)} y = Neg ({source}) }}",
        **arrays,
    )


def test_a_folded_network_is_nearer_to_the_float_model() -> None:
    model = reader()
    data = samples(model, 8)

    def quality(config: QConfig) -> float:
        quantized = quantize(model, data, config).model
        noise = signal = 0.0
        for feeds in samples(model, 8, seed=1):
            [expected], [found] = run(model, feeds), run(quantized, feeds)
            noise += float(np.square(expected - found).sum())
            signal += float(np.square(expected).sum())
        return float(10 * np.log10(signal / noise))

    config = QConfig.of("A8W8")
    assert quality(config) > quality(config.with_(prepare=False)) + 2


def test_the_folded_weight_in_float64() -> None:
    model = reader(depth=1)
    graph = Graph.of(model)
    assert fold_affine(graph) == 2
    after = graph.to_model()
    stored = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    folded = {t.name: numpy_helper.to_array(t) for t in after.graph.initializer}
    [conv] = [node for node in after.graph.node if node.op_type == "Conv"]
    expected = stored["w0"].astype(np.float64) * stored["g0"].reshape(-1, 1, 1, 1)
    np.testing.assert_array_equal(folded[conv.input[1]], expected.astype(np.float32))
    np.testing.assert_array_equal(folded[conv.input[2]], stored["b0"].reshape(-1))
    onnx.checker.check_model(after, full_check=True)
