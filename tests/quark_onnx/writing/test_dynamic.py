"""Dynamic activations are rounded where an integer operator reads them, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, numpy_helper

from quark_onnx import QConfig, QuantizationSpec, quantize, quantize_dynamic
from quark_onnx.graph import Graph
from quark_onnx.plan import explain
from quark_onnx.planning.make_plan import make_plan
from tests.endtoend.random_graphs import draw
from tests.models import MODELS, Array, normal, parse, run, samples, weight
from tests.settings import portable

DYNAMIC = portable(QConfig.of("DYNAMIC"))
INTEGER = {"MatMulInteger", "ConvInteger"}
PAIRS = {"QuantizeLinear", "DequantizeLinear"}


def graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """A graph and the bodies in it."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield from graphs(attribute.g)


def check_readers(model: ModelProto) -> int:
    """Assert the rule for every DynamicQuantizeLinear of a model; return how many there are."""
    found = 0
    for graph in graphs(model.graph):
        makers = [
            node for node in graph.node if node.op_type == "DynamicQuantizeLinear"
        ]
        sources = [node.input[0] for node in makers]
        assert len(sources) == len(set(sources)), "one for each tensor"
        for maker in makers:
            readers = {
                node.op_type for node in graph.node if maker.output[0] in node.input
            }
            assert readers and readers <= INTEGER, f"{maker.name} is read by {readers}"
        found += len(makers)
    return found


def exact(x: Array, w: Array) -> Array:
    """Return the product of dynamic uint8 codes, as the ONNX specification defines them, and a
    matrix, in float64.
    """
    low, high = min(0.0, float(x.min())), max(0.0, float(x.max()))
    scale = np.float32((np.float32(high) - np.float32(low)) / np.float32(255))
    zero = np.clip(np.rint(np.float32(0 - np.float32(low) / scale)), 0, 255)
    codes = np.clip(np.rint(x / scale) + zero, 0, 255) - zero
    return codes.astype(np.float64) * float(scale) @ w.astype(np.float64)


def stored(model: ModelProto) -> dict[str, Array]:
    """Initializers by name."""
    return {
        tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer
    }


@pytest.mark.parametrize("name", MODELS)
def test_only_integer_operators_read_dynamic_codes(name: str) -> None:
    """DynamicQuantizeLinear stands once for each tensor, and operators on integers alone read what
    it computes.
    """
    check_readers(quantize(MODELS[name](), None, DYNAMIC).model)


def test_nor_does_anything_else_in_random_graphs() -> None:
    """The same for sixty random graphs.

    And every MatMul, Gemm and Conv of theirs becomes an integer one.
    """
    for seed in range(7000, 7060):
        model = quantize(draw(seed)[0], None, DYNAMIC).model
        assert check_readers(model)
        assert not {"MatMul", "Gemm", "Conv"} & {
            node.op_type for node in model.graph.node
        }


#: Weights that no integer operator is written for: the model, how they are quantized, and in which
#: form.
FLOAT_PRODUCTS = {
    "4 bits": ("transformer_block", QConfig.of("INT4").weight, "qdq"),
    "float weights": ("transformer_block", None, "operators"),
    "a stack of matrices": ("matmul_3d", DYNAMIC.weight, "operators"),
    "a scaled Gemm": ("gemm_scaled", DYNAMIC.weight, "operators"),
    "a transposed convolution": ("convtranspose_groups", DYNAMIC.weight, "operators"),
}


@pytest.mark.parametrize("name", FLOAT_PRODUCTS)
def test_activations_of_float_products_stay_float(name: str) -> None:
    """No integer operator is written for such weights, so that nothing rounds the activations."""
    make, weights, form = FLOAT_PRODUCTS[name]
    result = quantize(
        MODELS[make](), None, DYNAMIC.with_(weight=weights, form=form)
    ).model
    assert check_readers(result) == 0


@pytest.mark.parametrize("name", ["conv_relu", "depthwise"])
def test_zero_points_of_channels(name: str) -> None:
    """A Conv asked for zero points of channels gets symmetric codes, and the plan says so."""
    free = QuantizationSpec("uint8", symmetric=False, per_channel=True)
    config = DYNAMIC.with_(weight=free)
    result = quantize(MODELS[name](), None, config).model
    assert check_readers(result) == 1
    shown = explain(make_plan(Graph.of(MODELS[name]()), config))
    assert (
        "quantize uint8 symmetric axis 0" in shown
        and "uint8 asymmetric axis" not in shown
    )


@pytest.mark.parametrize("per_channel", [True, False])
def test_scale_and_bias_of_channels_are_applied_in_one_pass(per_channel: bool) -> None:
    """A ConvInteger is followed by one operator over its values besides the Cast."""
    model = MODELS["conv_relu"]()
    config = DYNAMIC.with_(per_channel=per_channel)
    result = quantize(model, None, config).model
    kinds = [node.op_type for node in result.graph.node]
    assert kinds.count("ConvInteger") == kinds.count("BatchNormalization") == 1
    assert "Add" not in kinds and kinds.count("Mul") == 1
    codes = quantize(model, None, config.with_(form="qdq")).model
    [feeds] = samples(model, 1)
    np.testing.assert_allclose(
        run(result, feeds)[0], run(codes, feeds)[0], rtol=1e-5, atol=1e-5
    )


#: A tensor that an integer product reads, and that something else reads as well; the other reader
#: is float.
SHARED = {
    "a residual": ("y = Add (p, x)", lambda x, p, q: p + x),
    "a constant factor": ("y = Mul (p, c)", lambda x, p, q: p * CONSTANT),
    "a constant summand": (
        "s = Add (x, c) y = Mul (s, p)",
        lambda x, p, q: (x + CONSTANT) * p,
    ),
    "a numerator": ("e = Exp (p) y = Div (x, e)", lambda x, p, q: x / np.exp(p)),
    "a rearrangement": (
        "t = Transpose <perm = [1,0]> (x) y = MatMul (t, p)",
        lambda x, p, q: x.T @ p,
    ),
    "a second product": (
        "q = MatMul (x, v) r = Add (p, q) y = Add (r, x)",
        lambda x, p, q: p + q + x,
    ),
}
CONSTANT = normal(16, 16, seed=5)


@pytest.mark.parametrize("name", SHARED)
def test_float_readers_read_the_float_tensor(name: str) -> None:
    """Against float64: the one rounding is that of what the integer product reads."""
    text, expected = SHARED[name]
    constants = {
        "w": weight(16, 16, seed=1),
        "v": weight(16, 16, seed=2),
        "c": CONSTANT,
    }
    model = parse(
        f"g (float[16,16] x) => (float[16,16] y) {{ p = MatMul (x, w) {text} }}",
        **{
            key: array
            for key, array in constants.items()
            if key == "w" or f", {key})" in text
        },
    )
    result = quantize(model, None, DYNAMIC).model
    assert check_readers(result) == 1
    x = normal(16, 16, seed=9, scale=0.1)
    arrays = stored(result)
    products = [
        exact(x, arrays[f"{key}_quantized"] * arrays[f"{key}_scale"].astype(np.float64))
        for key in ("w", "v")
        if f"{key}_quantized" in arrays
    ]
    wanted = expected(x.astype(np.float64), products[0], products[-1])
    [found] = run(result, {"x": x})
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())


def half_quantized(preset: str, keep: str) -> ModelProto:
    """A network of which all but one layer are quantized, with biases and operands beside the
    pairs.
    """
    model = parse(
        """g (float[N,16] x) => (float[N,16] y) {
            [first] a = MatMul (x, w0) [bias] b = Add (a, c0) r = Relu (b) [scaled] s = Mul (r, c1)
            [second] d = Gemm (s, w1, c2) [third] e = MatMul (d, w2) [shift] f = Sub (e, c3) y = Add (f, x)
        }""",  # noqa: E501
        **{f"w{place}": weight(16, 16, seed=place) for place in range(3)},
        **{f"c{place}": normal(16, seed=10 + place) for place in range(4)},
    )
    config = QConfig.of(preset).with_(exclude=(keep,) if keep else ())
    return quantize(model, samples(model, 4) if config.measures else None, config).model


@pytest.mark.parametrize("keep", ["", "first", "second", "third", "shift", "scaled"])
@pytest.mark.parametrize("preset", ["A8W8", "S8S8", "DYNAMIC", "W8"])
def test_keep_existing_changes_layers_with_float_weights_alone(
    preset: str, keep: str
) -> None:
    """Of a model that is quantized in part, every float constant and every pair stays, but for
    weights of layers.
    """
    once = half_quantized(preset, keep)
    config = DYNAMIC.with_(keep_existing=True)
    again = quantize(once, None, config).model
    before, after = stored(once), stored(again)
    layers = [
        node
        for node in once.graph.node
        if node.op_type in ("MatMul", "Gemm") and node.input[1] in before
    ]
    weights = {node.input[1] for node in layers}
    for name, array in before.items():
        if name not in weights:
            np.testing.assert_array_equal(after[name], array, name)
    assert pairs(again) == pairs(once)
    if not weights:
        for feeds in samples(once, 3):
            np.testing.assert_array_equal(run(again, feeds)[0], run(once, feeds)[0])


def pairs(model: ModelProto) -> list[NodeProto]:
    """The nodes between float tensors and codes."""
    return [node for node in model.graph.node if node.op_type in PAIRS]


@pytest.mark.parametrize("name", MODELS)
def test_what_is_quantized_stays_as_it_is(name: str) -> None:
    """DYNAMIC with keep_existing on what DYNAMIC has made: the same function, to the bit."""
    once = quantize(MODELS[name](), None, DYNAMIC).model
    again = quantize(once, None, DYNAMIC.with_(keep_existing=True)).model
    for feeds in samples(once, 2):
        for found, expected in zip(run(again, feeds), run(once, feeds), strict=True):
            np.testing.assert_array_equal(found, expected)
    assert integers(again) == integers(once)


def integers(model: ModelProto) -> list[str]:
    """The names of operators on integers."""
    return [
        node.name
        for graph in graphs(model.graph)
        for node in graph.node
        if node.op_type in INTEGER
    ]


def test_a_weight_that_is_moved_has_no_range_of_its_own() -> None:
    """A dynamic configuration measures nothing, so a rearranged weight that is not folded stays
    float.

    Nothing is folded where the model runs on no random sample, as this one does on no random ids.
    """
    model = parse(
        """g (int64[N,3] ids) => (float[N,3,7] y) {
            far = Add (ids, beyond) e = Gather (table, far) t = Transpose <perm = [1,0]> (table) y = MatMul (e, t)
        }""",  # noqa: E501
        table=weight(7, 4),
        beyond=np.int64(100),
    )
    result = quantize_dynamic(model)
    ids = np.int64([[-100, -97, -94]])
    expected, found = run(model, {"ids": ids})[0], run(result, {"ids": ids})[0]
    np.testing.assert_allclose(found, expected, atol=0.05 * np.abs(expected).max())
