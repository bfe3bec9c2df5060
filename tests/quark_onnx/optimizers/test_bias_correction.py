"""BiasCorrection: the mean of what a layer computes is what it was in float."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

from quark_onnx import QConfig, compare, quantize, quantize_weights
from quark_onnx.common.registry import DTYPES
from quark_onnx.config import QuantizationSpec
from quark_onnx.kernels.levels import Levels
from quark_onnx.optimizers import BiasCorrection
from quark_onnx.optimizers.problem import RoundingProblem, SampledRows
from quark_onnx.patterns.activation import Activation
from tests.models import normal, parse, run, weight

ACTIVATIONS = [
    Activation(),
    Activation("clip", low=0.0),
    Activation("clip", low=0.0, high=1.0),
    Activation("leaky", slope=0.1),
    Activation("silu"),
    Activation("hardswish"),
    Activation("gelu"),
]


def problem_of(activation: Activation, groups: int = 2) -> RoundingProblem:
    random = np.random.default_rng(0)
    matrix, bias = random.normal(size=(groups, 3, 5)), random.normal(size=(groups, 3))
    x = random.normal(0.7, 1, size=(groups, 4000, 5)).astype(np.float32)
    targets = (x @ matrix.swapaxes(1, 2) + bias[:, None]).astype(np.float32)
    shape = (groups, 3, 5)
    scale, least, greatest = (
        np.full(shape, value, np.float32) for value in (0.5, -8, 7)
    )
    lattice = Levels(scale, np.zeros(0, np.float32), least, greatest)
    rows = SampledRows(x, targets)
    mean = x.mean(axis=1, dtype=np.float64)
    return RoundingProblem(
        "n",
        matrix,
        bias,
        lattice,
        True,
        activation,
        rows,
        rows,
        lambda: mean,
        lambda: (np.zeros(1), 0),
    )


@pytest.mark.parametrize(
    "activation", ACTIVATIONS, ids=lambda a: f"{a.kind} {a.high:g}"
)
def test_means_behind_the_activation_are_met(activation: Activation) -> None:
    problem = problem_of(activation)
    plain = problem.nearest()
    found = BiasCorrection()(problem, plain)
    np.testing.assert_array_equal(found.weight, plain.weight)

    def off(solution: Any) -> np.ndarray:
        computed = (
            problem.train.inputs @ solution.weight.swapaxes(1, 2)
            + solution.bias[:, None]
        )
        error = activation.value(computed) - activation.value(problem.train.targets)
        return np.abs(error.mean(axis=1, dtype=np.float64))

    assert (off(found) < 2e-3).all() and off(plain).max() > 0.05


def test_the_analytic_shift_is_that_of_the_mean_input() -> None:
    problem = problem_of(Activation())
    plain = problem.nearest()
    found = BiasCorrection("analytic")(problem, plain)
    expected = (
        problem.bias
        - ((plain.weight - problem.weight) @ problem.mean()[:, :, None])[..., 0]
    )
    np.testing.assert_allclose(found.bias, expected, rtol=1e-5)
    np.testing.assert_allclose(
        found.bias, BiasCorrection()(problem, plain).bias, atol=1e-3
    )


LAYERS = {
    "Conv": ("y = Conv <pads = [1,1,1,1]> (x, w)", weight(6, 3, 3, 3)),
    "grouped": ("y = Conv <group = 3> (x, w)", weight(6, 1, 3, 3)),
    "ConvTranspose": ("y = ConvTranspose <strides = [2,2]> (x, w)", weight(3, 6, 2, 2)),
    "ConvTranspose in groups": (
        "y = ConvTranspose <strides = [3,3], group = 3> (x, w)",
        weight(3, 2, 3, 3),
    ),
}


def network(name: str) -> tuple[ModelProto, list[dict[str, np.ndarray]]]:
    call, matrix = LAYERS[name]
    model = parse(f"g (float[N,3,H,W] x) => (float[N,6,A,B] y) {{ {call} }}", w=matrix)
    random = np.random.default_rng(0)
    return model, [
        {"x": random.normal(1, 0.3, (2, 3, 12, 12)).astype(np.float32)}
        for _ in range(10)
    ]


@pytest.mark.parametrize("method", ["empirical", "analytic"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_means_of_the_model_are_nearer(name: str, method: str) -> None:
    """Weights of four bits shift every output by the mean of what it reads.

    Also where strides spread that thin.
    """
    model, data = network(name)
    config = QConfig.of("INT4").with_(
        weight=QuantizationSpec(DTYPES["int4"]), form="qdq"
    )
    found = []
    for optimizers in ((), (BiasCorrection(method),)):
        result = quantize(model, data, config.with_(optimizers=optimizers)).model
        errors = [run(result, sample)[0] - run(model, sample)[0] for sample in data]
        found.append(np.abs(np.concatenate(errors).mean(axis=(0, 2, 3))).max())
    assert found[1] < 0.35 * found[0]


def test_layers_without_a_bias_get_one_and_those_that_cannot_are_left() -> None:
    model = parse(
        "g (float[N,8] x) => (float[N,8] y) { a = Gemm (x, v) r = Relu (a) y = MatMul (r, w) }",
        v=weight(8, 8),
        w=weight(8, 8, seed=1),
    )
    data = [{"x": normal(4, 8, seed=place) + np.float32(0.5)} for place in range(10)]
    result = quantize(
        model, data, QConfig.of("A8W8").with_(optimizers=BiasCorrection())
    )
    [gemm] = [node for node in result.model.graph.node if node.op_type == "Gemm"]
    assert len(gemm.input) == 3
    first, second = result.report.layers
    assert first.changed["bias_correction"] and not second.changed["bias_correction"]


def layers() -> ModelProto:
    """Layers without biases, on inputs whose mean is far from zero."""
    return parse(
        "g (float[N, 32] x) => (float[N, 8] y) { h = Gemm (x, v) r = Relu (h) y = Gemm (r, w) }",
        v=weight(32, 32),
        w=weight(32, 8, seed=1),
    )


def shifted(count: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    return [{"x": 2 + normal(8, 32, seed=seed + place)} for place in range(count)]


@pytest.mark.parametrize("preset", ["A8W4", "A16W4"])
def test_four_bits_come_with_it(preset: str) -> None:
    config = QConfig.of(preset)
    plain, found = (
        quantize(layers(), shifted(40), each)
        for each in (config.with_(optimizers=()), config)
    )
    others = shifted(20, seed=100)
    assert (
        compare(layers(), found.model, others).sqnr
        > compare(layers(), plain.model, others).sqnr + 1
    )
    assert (
        "bias_correction: cost both models one more run over 36 samples, layer by layer"
        in found.report.notes
    )


def test_without_data_no_layer_gets_a_bias() -> None:
    model = quantize_weights(layers(), "A8W4")
    assert all(
        len(node.input) == 2 for node in model.graph.node if node.op_type == "Gemm"
    )
