"""SmoothQuant: the function stays, channels that are much larger than others do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from calibrators.onnx_runtime.session import open_session
from quark_onnx import QConfig, SmoothQuant, compare, quantize
from quark_onnx.common.errors import ConfigError, DataError
from quark_onnx.config import from_dict, to_dict
from quark_onnx.graph import Graph
from quark_onnx.optimizers.smoothquant import factors
from tests.models import parse

N, M, K = 16, 24, 8
#: Two channels a hundred times larger than the others.
LOUD = np.where(np.isin(np.arange(N), [3, 11]), 100.0, 1.0).astype(np.float32)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


CONSTANTS: dict[str, Any] = {
    "gamma": LOUD * (1 + 0.1 * normal(N, seed=1)),
    "beta": LOUD * normal(N, seed=2),
    "w": normal(N, M, seed=3) / LOUD[:, None],
    "w2": normal(N, M, seed=4) / LOUD[:, None],
    "wt": normal(M, N, seed=5) / LOUD,
    "b": normal(M, seed=6),
    "loud": normal(K, N, seed=7) * LOUD,
    "loudbias": normal(N, seed=8) * LOUD,
    "in": normal(N, K, seed=9),
    "half": np.float32(0.5),
    "one": np.float32(1),
    "two": np.float32(2),
    "eps": np.float32(1e-5),
    "last": np.int64([-1]),
    "flat": np.int64([-1, N]),
}
LN = "n = LayerNormalization <axis = -1> (x, gamma, beta) "
PLAIN = "k = MatMul (x, in) a = MatMul (k, loud) h = Add (a, loudbias) "
MODELS = {
    "norm": LN + "y = MatMul (n, w)",
    "norm without shift": "n = LayerNormalization (x, gamma) y = MatMul (n, w)",
    "gemm": LN + "r = Reshape (n, flat) y = Gemm <transB = 1> (r, wt, b)",
    "two readers": LN + "p = MatMul (n, w) q = MatMul (n, w2) y = Add (p, q)",
    "parts": (
        "m = ReduceMean <axes = [-1]> (x) d = Sub (x, m) s = Pow (d, two) v ="
        " ReduceMean <axes = [-1]> (s) e = Add (v, eps) r = Sqrt (e) u = Div (d, r) g ="
        " Mul (gamma, u) n = Add (g, beta) y = MatMul (n, w)"
    ),
    "root mean square": (
        "s = Mul (x, x) v = ReduceMean <axes = [-1]> (s) e = Add (v, eps) r = Sqrt (e) "
        "i = Reciprocal (r) u = Mul (x, i) n = Mul (gamma, u) y = MatMul (n, w)"
    ),
    "relu": PLAIN + "r = Relu (h) y = MatMul (r, w)",
    "gelu": (
        PLAIN
        + "q = Mul (h, half) f = Erf (q) o = Add (f, one) g = Mul (h, o) t = Mul (g,"
        " half) y = MatMul (t, w)"
    ),
    "gate": (
        PLAIN + "z = MatMul (k, w3) s = Sigmoid (z) g = Mul (s, h) y = MatMul (g, w)"
    ),
    "transposed": PLAIN + "t = Transpose <perm = [1, 0, 2]> (h) y = MatMul (t, w)",
}


#: Where two layers with something in between are smoothed, what the middle one reads is another
#: group.
GROUPS = {"relu": 2, "gelu": 2, "gate": 2, "transposed": 2}


def model_of(text: str, opset: int = 17, **more: np.ndarray) -> ModelProto:
    known = {**CONSTANTS, "w3": normal(K, N, seed=10), **more}
    used = {
        name: value
        for name, value in known.items()
        if f" {name}," in text or f" {name})" in text or f"({name}," in text
    }
    result = "C, D" if "Gemm" in text else "C, D, E"
    return parse(
        f"g (float[B, S, {N}] x) => (float[{result}] y) {{ {text} }}",
        opset=opset,
        **used,
    )


def samples(count: int = 6) -> list[dict[str, np.ndarray]]:
    return [{"x": normal(2, 5 + seed, N, seed=100 + seed)} for seed in range(count)]


def run(model: ModelProto, feeds: dict[str, np.ndarray]) -> np.ndarray:
    found: np.ndarray = open_session(model).run(None, feeds)[0]
    return found


def smoothed(model: ModelProto, optimizer: SmoothQuant, count: int = 1) -> ModelProto:
    graph = Graph.of(model)
    assert optimizer(graph, samples()) == count
    graph.drop_unused()
    result = graph.to_model()
    onnx.checker.check_model(result)
    return result


@pytest.mark.parametrize("alpha", [0, 0.5, 1.0, "auto"])
@pytest.mark.parametrize("name", MODELS)
def test_the_function_stays(name: str, alpha: float | str) -> None:
    model = model_of(MODELS[name])
    optimizer = SmoothQuant(alpha)
    result = smoothed(model, optimizer, count=GROUPS.get(name, 1))
    for feeds in samples(2):
        expected = run(model, feeds)
        np.testing.assert_allclose(
            run(result, feeds), expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max()
        )
    assert len(result.graph.node) == len(model.graph.node)
    again = smoothed(model, optimizer, count=GROUPS.get(name, 1))
    assert result.SerializeToString(deterministic=True) == again.SerializeToString(
        deterministic=True
    )


@pytest.mark.parametrize(
    "name", ["norm", "gemm", "two readers", "parts", "root mean square", "relu", "gate"]
)
@pytest.mark.parametrize("alpha", [0.5, "auto"])
def test_rounding_costs_less(name: str, alpha: float | str) -> None:
    model, config = (
        model_of(MODELS[name]),
        QConfig.of("A8W8").with_(calibrator="minmax"),
    )
    plain = quantize(model, samples(24), config)
    better = quantize(
        model, samples(24), config.with_(optimizers=(SmoothQuant(alpha),))
    )
    assert f"smoothquant: {GROUPS.get(name, 1)}" in better.report.notes
    assert better.report.worst_sqnr > plain.report.worst_sqnr + 20


RESIDUAL = LN + "p = MatMul (n, w) q = MatMul (p, back) y = Add (q, n)"


def test_what_others_read_too_is_left_alone_unless_a_mul_is_wanted() -> None:
    model = model_of(RESIDUAL, back=normal(M, N, seed=11))
    graph = Graph.of(model)
    found = SmoothQuant(alpha=0.9)(graph, samples())
    assert found == 1  # p alone, which the first layer computes
    assert found.notes == (
        (
            "1 tensor has nothing in front to fold factors into; insert=true puts a Mul"
            " there"
        ),
    )
    result = smoothed(model, SmoothQuant(insert=True), count=2)
    assert sorted(node.op_type for node in result.graph.node).count("Mul") == 1
    [feeds] = samples(1)
    expected = run(model, feeds)
    np.testing.assert_allclose(
        run(result, feeds), expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max()
    )


def test_an_inserted_mul_stays_float_and_pays() -> None:
    model = model_of("y = MatMul (x, w)")
    data = [{"x": feeds["x"] * LOUD} for feeds in samples(24)]
    plain, better = (
        quantize(model, data, QConfig(optimizers=each))
        for each in ((), "smoothquant:insert=true")
    )
    assert better.report.worst_sqnr > plain.report.worst_sqnr + 15
    kinds = [node.op_type for node in better.model.graph.node]
    assert kinds.index("Mul") < kinds.index("QuantizeLinear")
    assert quantize(model, data, QConfig(optimizers="smoothquant")).report.notes[
        :1
    ] == ["smoothquant: nothing to do"]


def test_dead_channels_and_zero_weights_are_left_alone() -> None:
    gamma, beta, w = (
        CONSTANTS["gamma"].copy(),
        CONSTANTS["beta"].copy(),
        CONSTANTS["w"].copy(),
    )
    gamma[[0, 3]] = beta[[0, 3]] = 0
    w[[1, 11]] = 0
    text = "n = LayerNormalization (x, dead, shift) y = MatMul (n, sparse)"
    model = model_of(text, dead=gamma, shift=beta, sparse=w)
    for alpha in (0, 0.5, 1, "auto"):
        result = smoothed(model, SmoothQuant(alpha))
        for tensor in result.graph.initializer:
            assert np.isfinite(onnx.numpy_helper.to_array(tensor)).all()
        [feeds] = samples(1)
        np.testing.assert_allclose(
            run(result, feeds), run(model, feeds), rtol=1e-4, atol=1e-4
        )
    found = factors(np.array([0, 2, 1e30, 4.0]), np.array([1, 0, 1e-30, 1.0]), 0.5)
    assert (
        found[0] == found[1] == 1
        and np.isfinite(found).all()
        and found.max() <= 1.001e4
    )


def test_a_model_that_never_saw_a_value_stays() -> None:
    text = "z = LayerNormalization (x, none, none) y = MatMul (z, w)"
    assert (
        SmoothQuant()(Graph.of(model_of(text, none=np.zeros(N, np.float32))), samples())
        == 0
    )


def test_shared_weights() -> None:
    text = (
        LN
        + "k = LayerNormalization (x, beta, gamma) p = MatMul (n, w) q = MatMul (k, w)"
        " y = Add (p, q)"
    )
    assert SmoothQuant()(Graph.of(model_of(text)), samples()) == 0
    model = model_of(LN + "p = MatMul (n, w) q = MatMul (n, w) y = Add (p, q)")
    result = smoothed(model, SmoothQuant())
    assert sum(tensor.dims[:] == [N, M] for tensor in result.graph.initializer) == 1
    [feeds] = samples(1)
    np.testing.assert_allclose(
        run(result, feeds), run(model, feeds), rtol=1e-4, atol=1e-4
    )


def test_outputs_of_the_model_are_not_touched() -> None:
    model = model_of(LN + "y = MatMul (n, w)")
    model.graph.output.append(onnx.helper.make_tensor_value_info("n", 1, ["B", "S", N]))
    assert SmoothQuant()(Graph.of(model), samples()) == 0
    result = smoothed(model, SmoothQuant(insert=True))
    [feeds] = samples(1)
    for found, expected in zip(
        open_session(result).run(None, feeds),
        open_session(model).run(None, feeds),
        strict=True,
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("opset", [13, 17, 21, 23])
def test_opsets(opset: int) -> None:
    kind = "RMSNormalization" if opset >= 23 else "SimplifiedLayerNormalization"
    model = model_of(
        f"n = {kind} <axis = -1> (x, gamma) y = MatMul (n, w)", opset=opset
    )
    graph = Graph.of(model)
    assert SmoothQuant()(graph, samples()) == 1
    [feeds] = samples(1)
    np.testing.assert_allclose(
        run(graph.to_model(), feeds), run(model, feeds), rtol=1e-4, atol=1e-4
    )


def test_it_is_a_setting() -> None:
    config = QConfig.of("A8W8").with_(optimizers=(SmoothQuant("auto", insert=True),))
    assert from_dict(to_dict(config)) == config
    assert config == QConfig.of("A8W8").with_(
        optimizers="smoothquant:alpha=auto,insert=true"
    )
    assert "optimizers: smoothquant:alpha=0.7" in str(
        QConfig(optimizers="smoothquant:alpha=0.7")
    )


def test_samples_that_do_not_fit_are_named() -> None:
    with pytest.raises(DataError, match="sample 0"):
        SmoothQuant()(
            Graph.of(model_of(MODELS["norm"])),
            [{"x": np.zeros((1, 2, N + 1), np.float32)}],
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("smoothquant:alpha=1.5", "alpha of smoothquant is 1.5"),
        (
            "smoothquant:alpha=best",
            (
                "alpha of smoothquant is 'best'; it must be a number from 0 to 1, or"
                " 'auto'"
            ),
        ),
        ("smoothquant:alpha=true", "alpha of smoothquant is True"),
        ("smoothquant:alpha=nan", "alpha of smoothquant is nan"),
        ("smoothquant:insert=2", "insert of smoothquant is 2"),
        (
            "smoothquant:alfa=1",
            "SmoothQuant has no setting 'alfa'; did you mean 'alpha'",
        ),
    ],
)
def test_wrong_settings(settings: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        QConfig(optimizers=settings)


@pytest.mark.parametrize("per_channel", [True, False])
def test_the_search_comes_near_to_the_best_alpha(per_channel: bool) -> None:
    """A factor that makes the weights of one output large costs that output alone, or all outputs.

    Every alpha is tried beside.
    """
    random = np.random.default_rng(1)
    loud, w = np.ones(N), random.normal(size=(N, M)).astype(np.float32)
    loud[3], w[3], w[3, 0] = 40.0, 0.0, 3.0
    model = parse(
        f"g (float[B,{N}] x) => (float[B,{M}] y) {{ y = MatMul (x, w) }}", w=w
    )
    data = [
        {"x": (random.normal(size=(32, N)) * loud).astype(np.float32)} for _ in range(8)
    ]
    config = QConfig.of("A8W8").with_(per_channel=per_channel)

    def sqnr(alpha: float | str) -> float:
        smooth = SmoothQuant(alpha=alpha, insert=True)
        found = quantize(model, data, config.with_(optimizers=(smooth,))).model
        return float(compare(model, found, data).sqnr)

    assert sqnr("auto") >= max(map(sqnr, np.linspace(0.05, 0.95, 19))) - 0.5
