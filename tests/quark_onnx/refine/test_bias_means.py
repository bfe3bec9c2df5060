"""means: biases that make good for what rounded weights add to the mean of each output."""

from __future__ import annotations

import numpy as np
import pytest

from calibrators.onnx_runtime.session import open_session
from quark_onnx import quantize
from quark_onnx.refine.bias_means import InputMeans, correct_biases
from tests.models import Feeds, parse, weight
from tests.pipeline import Stages
from tests.settings import POW2


def positive(count: int, *shape: int) -> list[Feeds]:
    random = np.random.default_rng(0)
    return [
        {"x": random.uniform(0.5, 1.5, shape).astype(np.float32)} for _ in range(count)
    ]


MODELS = {
    "conv": parse(
        "g (float[1,4,6,6] x) => (float[1,6,6,6] y) { y = Conv (x, w, b) }",
        w=weight(6, 4, 1, 1), b=weight(6),
    ),
    "groups": parse(
        "g (float[1,4,6,6] x) => (float[1,4,6,6] y) { y = Conv <group = 4> (x, w, b) }",
        w=weight(4, 1, 1, 1), b=weight(4),
    ),
    "gemm": parse(
        "g (float[3,4] x) => (float[3,6] y) { y = Gemm (x, w, b) }",
        w=weight(4, 6), b=weight(6),
    ),
    "matmul": parse(
        "g (float[2,3,4] x) => (float[2,3,6] y) { p = MatMul (x, w) y = Add (p, b) }",
        w=weight(4, 6), b=weight(6),
    ),
}  # fmt: skip
SHAPES = {
    "conv": (1, 4, 6, 6),
    "groups": (1, 4, 6, 6),
    "gemm": (3, 4),
    "matmul": (2, 3, 4),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_mean_of_each_output_is_that_of_the_float_layer(name: str) -> None:
    """Beside float64 arithmetic with the rounded weight."""
    data = positive(5, *SHAPES[name])
    stages = Stages.of(MODELS[name], POW2, data)
    scale = {
        use: params.scale
        for use, params in stages.params.table.items()
        if use.tensor == "w"
    }
    [step] = scale.values()
    corrected = correct_biases(stages.graph, stages.plan, stages.params, data)
    stored = stages.graph.constant("w").astype(np.float64)
    rounded = np.clip(np.rint(stored / step), -128, 127) * step
    x = np.concatenate([each["x"] for each in data]).astype(np.float64)

    def results(matrix: np.ndarray, bias: np.ndarray) -> np.ndarray:
        if name == "conv":
            return np.einsum("oi,nihw->no", matrix[:, :, 0, 0], x) / 36 + bias
        if name == "groups":
            return np.einsum("i,nihw->ni", matrix[:, 0, 0, 0], x) / 36 + bias
        return (x @ matrix).reshape(-1, 6) + bias

    float_mean = results(stored, stages.graph.constant("b").astype(np.float64)).mean(
        axis=0
    )
    before = results(rounded, stages.graph.constant("b").astype(np.float64)).mean(
        axis=0
    )
    after = results(rounded, corrected.constant("b").astype(np.float64)).mean(axis=0)
    np.testing.assert_allclose(after, float_mean, atol=1e-5)
    assert np.abs(before - float_mean).max() > 1e-3


def test_a_depthwise_layer_whose_small_channels_are_rounded_away_gets_its_mean_back() -> (
    None
):
    """Channels of 1 to 1/1000 under one scale: without a correction the small ones are lost with
    their means.
    """
    model = parse(
        """g (float[1,8,6,6] x) => (float[1,8,1,1] y) {
            a = Conv <group = 8> (x, w, b) m = Mul (a, k) y = GlobalAveragePool (m)
        }""",
        w=(10.0 ** -np.linspace(0, 3, 8)).astype(np.float32).reshape(8, 1, 1, 1),
        b=np.zeros(8, np.float32),
        k=(10.0 ** np.linspace(0, 3, 8)).astype(np.float32).reshape(1, 8, 1, 1),
    )
    data = positive(40, 1, 8, 6, 6)
    # The Mul, which would be folded into the weight, keeps its channels apart.
    config = POW2.with_(activation=None, exclude=("Mul_m",), prepare=False)
    plain, searched = (
        quantize(model, data, config.with_(search=count)).report for count in (0, 8)
    )
    assert searched.worst_sqnr > plain.worst_sqnr + 10
    assert any("biases corrected" in note for note in searched.notes)


def test_without_samples_or_beside_an_optimizer_of_layers_biases_stay() -> None:
    from quark_onnx.optimizers import AdaRound

    data = positive(5, 1, 4, 6, 6)
    stages = Stages.of(MODELS["conv"], POW2, data)
    assert correct_biases(stages.graph, stages.plan, stages.params, []) is stages.graph
    assert (
        correct_biases(stages.graph, stages.plan, stages.params, data, [AdaRound()])
        is stages.graph
    )


@pytest.mark.parametrize("name", MODELS)
def test_means_of_another_run_are_those_of_a_run_of_its_own(name: str) -> None:
    data = positive(5, *SHAPES[name])
    stages = Stages.of(MODELS[name], POW2, data)
    means = InputMeans(stages.graph)
    session = open_session(means.graph.to_model())
    for position in (3, 0, 4, 1, 2):  # calibration has several lanes
        values = session.run(means.names, data[position])
        means.observe(position, dict(zip(means.names, values, strict=True)))
    alone, known = (
        correct_biases(stages.graph, stages.plan, stages.params, data, known=each)
        for each in (None, means.over(5))
    )
    np.testing.assert_array_equal(alone.constant("b"), known.constant("b"))


def test_means_need_every_sample() -> None:
    stages = Stages.of(MODELS["gemm"], POW2, positive(5, 3, 4))
    means = InputMeans(stages.graph)
    (name,) = means.names
    means.observe(0, {name: np.ones((1, 4, 1), np.float32)})
    assert means.over(2) == {}
    assert means.over(1)["x", False].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("limit", [3.0, 1e9])
def test_a_layer_may_read_nothing(
    limit: float, caplog: pytest.LogCaptureFixture
) -> None:
    """As the second stage of a detector does on a picture without objects.

    Calibration passes, the biases stay, and a warning says so.
    """
    model = parse(
        """g (float[N, 4] x) => (float[M, 4] y) {
            a = Gemm (x, w, b) h = Relu (a)
            total = ReduceSum <keepdims = 0> (h, axis) found = Greater (total, limit)
            places = NonZero (found) rows = Transpose <perm = [1, 0]> (places)
            chosen = GatherND (h, rows) c = Gemm (chosen, v, d) y = Relu (c)
        }""",
        w=weight(4, 4),
        b=weight(4),
        v=weight(4, 4, seed=3),
        d=weight(4, seed=2),
        axis=np.array([1]),
        limit=np.float32(limit),
    )
    random = np.random.default_rng(0)
    data = [
        {"x": (random.normal(size=(3, 4)) * size).astype(np.float32)}
        for size in (1, 0.01, 1, 1)
    ]
    found = quantize(model, data, "XINT8")
    assert found.report.outputs[0].broken == 0
    assert "the biases are not corrected" in caplog.text
