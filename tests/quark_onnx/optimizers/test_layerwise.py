"""Optimizers that choose the codes of layers, on whole models: nothing gets worse on samples held
out, the codes that are written are those that were chosen, and odd models and data are no obstacle.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper

from quark_onnx import QConfig, quantize, quantize_weights
from quark_onnx.common.errors import ConfigError
from quark_onnx.common.registry import DTYPES
from quark_onnx.config import QuantizationSpec
from quark_onnx.graph import Graph
from quark_onnx.job import Result
from quark_onnx.optimizers import GPTQ, AdaQuant, AdaRound, BiasCorrection
from quark_onnx.optimizers.problem import RoundingProblem, Solution
from quark_onnx.patterns.conv_and_gemm import Layer
from quark_onnx.refine.layer_problems import flat
from tests.models import Feeds, normal, parse, run, weight
from tests.quark_onnx.optimizers.networks import NETWORKS

QUICK = {
    "bias_correction": BiasCorrection(),
    "analytic": BiasCorrection("analytic"),
    "gptq": GPTQ(),
    "gptq damping": GPTQ(damping="auto"),
    "gptq asymmetric": GPTQ(asymmetric=True, act_order=False),
    "adaround": AdaRound(iterations=15),
    "adaquant": AdaQuant(iterations=15),
}
PRESETS = [
    "A8W8",
    "XINT8",
    "S8S8",
    "A8W4",
    "INT4",
    "UINT4",
    "FP8E4M3",
    "FP4E2M1",
    "U8U8",
    "A16W8",
    "DYNAMIC",
    "MX9_INT8",
]
CONFIGS = {name: QConfig.of(name) for name in PRESETS} | {
    "per tensor": QConfig.of("A8W8").with_(per_channel=False),
    "int32": QConfig.of("A8W8").with_(weight=QuantizationSpec(DTYPES["int32"])),
    "vendor": QConfig.of("XINT8").with_(form="vendor"),
    "codes": QConfig.of("A8W8").with_(form="operators"),
}
#: Where each optimizer is tried alone; elsewhere they run one after the other.
ALONE = ["A8W8"]
#: Whose weights are a DequantizeLinear away from their layer.
READABLE = [
    "A8W8",
    "XINT8",
    "A8W4",
    "FP8E4M3",
    "FP4E2M1",
    "U8U8",
    "MX9_INT8",
    "per tensor",
]

Seen = list[tuple[RoundingProblem, Solution]]


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Every problem that is solved, and what is chosen for it."""
    seen: Seen = []
    module = sys.modules[
        "quark_onnx.refine.refine"
    ]  # whose name in its package is the function's
    improved = module.best_solution

    def watched(problem: RoundingProblem, optimizers: Any) -> Any:
        solution, result = improved(problem, optimizers)
        seen.append((problem, solution))
        return solution, result

    monkeypatch.setattr(module, "best_solution", watched)
    return seen


def check_better(result: Result, count: int) -> None:
    layers = result.report.layers
    assert len(layers) == count
    assert all(0 <= layer.after <= layer.before for layer in layers)
    before, after = (
        np.array([getattr(layer, name) for layer in layers])
        for name in ("before", "after")
    )
    assert after.sum() < before.sum()


def quantized(network: str, preset: str, *optimizers: Any) -> Result:
    """The result of a network with optimizers, or with all, one after the other."""
    make, samples = NETWORKS[network]
    config = CONFIGS[preset].with_(optimizers=optimizers or tuple(QUICK.values()))
    return quantize(make(), samples(), config)


#: Results that several tests read.
with_all = cache(quantized)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("preset", CONFIGS)
def test_no_layer_gets_worse_and_the_model_runs(preset: str, network: str) -> None:
    _, samples = NETWORKS[network]
    for optimizers in (
        [(each,) for each in QUICK.values()]
        if preset in ALONE
        else [tuple(QUICK.values())]
    ):
        result = (
            quantized(network, preset, *optimizers)
            if preset in ALONE
            else with_all(network, preset)
        )
        check_better(result, 5 if network == "convolutional" else 6)
        for name in {optimizer.name for optimizer in optimizers}:
            kept = sum(layer.changed[name] > 0 for layer in result.report.layers)
            assert (
                f"{name}: kept in {kept} of {len(result.report.layers)} layers"
                in result.report.notes
            )
    run(result.model, samples()[0])


@pytest.mark.parametrize("preset", ["XINT8", "INT4"])
@pytest.mark.parametrize("network", NETWORKS)
def test_the_same_again_is_the_same_model(network: str, preset: str) -> None:
    first, second = (
        result.model.SerializeToString(deterministic=True)
        for result in (with_all(network, preset), quantized(network, preset))
    )
    assert first == second


@pytest.mark.parametrize("preset", READABLE)
@pytest.mark.parametrize("network", NETWORKS)
def test_what_is_written_is_what_was_chosen(
    network: str, preset: str, chosen: Seen
) -> None:
    """onnxruntime reads the very weights, and the biases to within their own step, that the loss
    was measured with.
    """
    make, samples = NETWORKS[network]
    config = CONFIGS[preset].with_(
        optimizers=(GPTQ(), AdaQuant(iterations=20), BiasCorrection())
    )
    model = onnx.shape_inference.infer_shapes(quantize(make(), samples(), config).model)
    nodes = {node.name: node for node in model.graph.node}
    constants = {tensor.name for tensor in model.graph.initializer}
    assert len(chosen) in (5, 6)
    for problem, solution in chosen:
        node = nodes[problem.name]
        read = [node.input[1], *node.input[2:3]]
        if node.op_type == "MatMul":
            read += [
                name
                for add in nodes.values()
                if add.op_type == "Add"
                for name in _added(add, node, nodes)
            ]
        probe = ModelProto()
        probe.CopyFrom(model)
        probe.graph.output.extend(
            helper.make_tensor_value_info(n, 1, None)
            for n in read
            if n not in constants
        )
        found = dict(
            zip(
                [value.name for value in probe.graph.output],
                run(probe, samples()[0]),
                strict=True,
            )
        )
        values = [
            (
                found[name]
                if name in found
                else onnx.numpy_helper.to_array(_constant(model, name))
            )
            for name in read
        ]
        arranged = flat(
            Layer.stored(Graph.of(_alone(node)).nodes[0]).arranged(values[0])
        )
        np.testing.assert_array_equal(arranged, solution.weight)
        if len(values) > 1:
            step = 2e-2 if preset == "MX9_INT8" else 1e-6 + _half_step(model, read[1])
            np.testing.assert_allclose(
                values[1].reshape(solution.bias.shape), solution.bias, atol=step
            )


def _half_step(model: ModelProto, tensor: str) -> float:
    """How far rounding moves a bias at most; 0 where it is stored in float."""
    maker = next((node for node in model.graph.node if tensor in node.output), None)
    if maker is None or maker.op_type != "DequantizeLinear":
        return 0.0
    return float(onnx.numpy_helper.to_array(_constant(model, maker.input[1])).max()) / 2


def _added(add: Any, product: Any, nodes: dict[str, Any]) -> list[str]:
    """What an Add adds to a product, through whatever quantizes it."""
    makers = {output: node for node in nodes.values() for output in node.output}

    def origin(name: str) -> str:
        while name in makers and makers[name].op_type.endswith(
            ("QuantizeLinear", "QuantizeDequantize", "Min")
        ):
            name = makers[name].input[0]
        while name in makers and makers[name].op_type.endswith("DequantizeLinear"):
            name = origin(makers[name].input[0])
        return name

    if product.output[0] not in map(origin, add.input):
        return []
    return [name for name in add.input if origin(name) != product.output[0]]


def _constant(model: ModelProto, name: str) -> onnx.TensorProto:
    return next(tensor for tensor in model.graph.initializer if tensor.name == name)


def _alone(node: onnx.NodeProto) -> ModelProto:
    inputs = [
        helper.make_tensor_value_info(name, 1, None)
        for name in dict.fromkeys(filter(None, node.input))
    ]
    graph = helper.make_graph(
        [node], "g", inputs, [helper.make_tensor_value_info(node.output[0], 1, None)]
    )
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )


@pytest.mark.parametrize("preset", ["BFP16", "MXINT8", "BF16", "FP16"])
def test_formats_without_a_scale_are_left_alone_and_named(preset: str) -> None:
    make, samples = NETWORKS["convolutional"]
    plain, result = (
        quantize(make(), samples(4), QConfig.of(preset).with_(optimizers=chosen))
        for chosen in ((), (GPTQ(),))
    )
    assert plain.model.graph == result.model.graph
    assert (
        "not optimized: first (Conv): its format has no scale of its own"
        in result.report.notes
    )
    assert "no layer has codes to be chosen" in result.report.notes


def test_without_data_they_are_left_out() -> None:
    make, _ = NETWORKS["attentive"]
    result = quantize(
        make(), None, QConfig.of("INT4").with_(optimizers=("gptq", "adaround"))
    )
    assert (
        "gptq, adaround: left out, there is no calibration data" in result.report.notes
    )
    with_gptq = QConfig.of("INT4").with_(optimizers="gptq")
    result = quantize_weights(make(), with_gptq)
    assert result.graph == quantize_weights(make(), "INT4").graph


# Odd models


def rows(*shape: int, count: int = 8) -> list[Feeds]:
    random = np.random.default_rng(shape)
    return [{"x": random.normal(size=shape).astype(np.float32)} for _ in range(count)]


def with_more(samples: list[Feeds], **others: Callable[[int], Any]) -> list[Feeds]:
    return [
        {**sample, **{name: make(place) for name, make in others.items()}}
        for place, sample in enumerate(samples)
    ]


A, B, C = weight(8, 8, seed=1), weight(8, 8, seed=2), weight(8, 3, seed=3)
BIAS = normal(8, seed=4)
DEAD = weight(8, 3, seed=5) * np.array([1, 0, 1], np.float32)
IF = """h = If (c) <then_branch = t () => (float[N,8] p) { q = Relu (a) p = MatMul (q, b) },
    else_branch = e () => (float[N,8] p) { p = MatMul (a, b) }>"""
LOOP = """h = Loop (n, , a) <body = l (int64 i, bool go, float[N,8] s) => (bool on, float[N,8] t)
    { on = Identity (go) m = MatMul (s, b) t = Add (m, a) }>"""
#: Inputs, body, constants, data, and how many layers there are to choose codes for.
ODD: dict[str, tuple[str, str, dict[str, Any], list[Feeds], int]] = {
    "a weight read twice": (
        "float[N,8] x",
        "a = MatMul (x, w) r = Relu (a) y = MatMul (r, w)",
        {"w": A},
        rows(4, 8),
        0,
    ),
    "a bias read twice": (
        "float[N,8] x",
        "a = Gemm (x, a1, b1) r = Relu (a) y = Gemm (r, b, b1)",
        {"a1": A, "b": B, "b1": BIAS},
        rows(4, 8),
        2,
    ),
    "a bias that others read": (
        "float[N,8] x",
        "a = MatMul (x, w) s = Add (a, v) y = Mul (s, v)",
        {"w": A, "v": BIAS},
        rows(4, 8),
        1,
    ),
    "Gemm with beta": (
        "float[N,8] x",
        "y = Gemm <beta = 0.5> (x, w, v)",
        {"w": A, "v": BIAS},
        rows(4, 8),
        0,
    ),
    "Gemm with transA": (
        "float[8,4] x",
        "y = Gemm <transA = 1> (x, w, v)",
        {"w": A, "v": BIAS},
        rows(8, 4),
        0,
    ),
    "Gemm with a matrix": (
        "float[N,8] x",
        "y = Gemm (x, w, v)",
        {"w": A, "v": BIAS[None]},
        rows(4, 8),
        0,
    ),
    "one output": (
        "float[N,8] x",
        "y = Gemm (x, w)",
        {"w": A[:, :1].copy()},
        rows(4, 8),
        1,
    ),
    "a vector": ("float[8] x", "y = MatMul (x, w)", {"w": A}, rows(8), 1),
    "four axes": (
        "float[2,3,4,8] x",
        "y = MatMul (x, w)",
        {"w": C},
        rows(2, 3, 4, 8),
        1,
    ),
    "one sample": ("float[N,8] x", "y = Gemm (x, w)", {"w": C}, rows(5, 8, count=1), 1),
    "one row": ("float[N,8] x", "y = Gemm (x, w)", {"w": C}, rows(1, 8, count=1), 1),
    "two rows": ("float[N,8] x", "y = Gemm (x, w)", {"w": C}, rows(1, 8, count=2), 1),
    "weights of zero": ("float[N,8] x", "y = Gemm (x, w)", {"w": C * 0}, rows(3, 8), 1),
    "a channel of zeros": (
        "float[N,8] x",
        "y = Gemm (x, w)",
        {"w": DEAD},
        rows(3, 8),
        1,
    ),
    "inputs of zero": (
        "float[N,8] x",
        "r = Mul (x, o) y = Gemm (r, w)",
        {"w": C, "o": BIAS * 0},
        rows(3, 8),
        1,
    ),
    "values beyond squares": (
        "float[N,8] x",
        "s = Mul (x, o) a = Gemm (s, a1) y = Gemm (a, w)",
        {"a1": A, "w": C, "o": np.float32(1e25)},
        rows(3, 8),
        2,
    ),
    "values that are no numbers": (
        "float[N,8] x",
        "l = Log (x) a = Gemm (l, a1) r = Relu (x) s = Add (a, r) y = Gemm (s, w)",
        {"a1": A, "w": C},
        rows(3, 8),
        2,
    ),
    "If around": (
        "float[N,8] x, bool c",
        f"a = Gemm (x, a1) {IF} y = Gemm (h, w)",
        {"a1": A, "b": B, "w": C},
        with_more(rows(3, 8), c=lambda place: np.array(place % 2 == 0)),
        2,
    ),
    "Loop around": (
        "float[N,8] x",
        f"a = Gemm (x, a1) {LOOP} y = Gemm (h, w)",
        {"a1": A, "b": B, "w": C, "n": np.array(3)},
        rows(3, 8),
        2,
    ),
    "a sequence": (
        "float[N,8] x",
        """a = Gemm (x, a1) r = Relu (a) s = SequenceConstruct (r, a) z = Constant <value_int = 0> () u = MatMul (a, b)
        e = SequenceAt (s, z) f = Add (e, u) y = Gemm (f, w)""",  # noqa: E501
        {"a1": A, "b": B, "w": C},
        rows(3, 8),
        3,
    ),
    "two inputs": (
        "float[N,8] x, float[N,2] u",
        "j = Concat <axis = 1> (x, u) y = Gemm (j, w)",
        {"w": weight(10, 3)},
        with_more(rows(3, 8), u=lambda place: normal(3, 2, seed=place)),
        1,
    ),
    "integer inputs": (
        "int64[N,T] i",
        "e = Gather (t, i) y = MatMul (e, w)",
        {"t": normal(10, 8), "w": C},
        [
            {"i": np.random.default_rng(place).integers(0, 10, (2, 5))}
            for place in range(6)
        ],
        1,
    ),
    "a ragged last batch": (
        "float[N,3,H,W] x",
        "y = Conv <pads = [1,1,1,1]> (x, w)",
        {"w": weight(4, 3, 3, 3)},
        [*rows(4, 3, 8, 8, count=3), *rows(1, 3, 5, 9, count=1)],
        1,
    ),
    "three axes of space": (
        "float[N,2,5,5,5] x",
        "y = Conv (x, w)",
        {"w": weight(3, 2, 2, 3, 2)},
        rows(1, 2, 5, 5, 5),
        1,
    ),
}


def odd(name: str) -> tuple[ModelProto, list[Feeds], int]:
    inputs, body, constants, data, count = ODD[name]
    model = parse(
        f"g ({inputs}) => (float y) {{ {body} }}",
        **{k: np.asarray(v) for k, v in constants.items()},
    )
    model.graph.output[0].type.tensor_type.ClearField("shape")
    return model, data, count


@pytest.mark.parametrize("preset", ["A8W8", "XINT8", "INT4"])
@pytest.mark.parametrize("name", ODD)
@pytest.mark.filterwarnings("error")
def test_odd_models_and_data(name: str, preset: str) -> None:
    model, data, count = odd(name)
    optimizers = (*QUICK.values(), GPTQ())  # one of them twice
    result = quantize(model, data, QConfig.of(preset).with_(optimizers=optimizers))
    layers = result.report.layers
    left = [note for note in result.report.notes if note.startswith("not optimized")]
    if name != "values that are no numbers" or preset == "INT4":
        assert len(layers) == count and (count or left)
    assert all(0 <= layer.after <= layer.before for layer in layers)
    if name == "one row":
        assert any("too few rows" in note for note in left)
        assert layers[0].changed == {}
    run(result.model, data[0])


def test_weights_and_biases_that_are_outputs_stay_what_they_are() -> None:
    model = parse(
        "g (float[N,8] x) => (float[N,8] y, float[8] v) { y = Gemm (x, w, v) }",
        w=A,
        v=BIAS,
    )
    result = quantize(
        model, rows(4, 8), QConfig.of("A8W8").with_(optimizers=tuple(QUICK.values()))
    )
    np.testing.assert_array_equal(run(result.model, rows(4, 8)[0])[1], BIAS)
    assert len(result.report.layers) == 1
    model = parse(
        "g (float[N,8] x) => (float[N,8] y, float[8,8] w) { y = Gemm (x, w) }", w=A
    )
    result = quantize(
        model, rows(4, 8), QConfig.of("A8W8").with_(optimizers=tuple(QUICK.values()))
    )
    assert not result.report.layers
    assert any(note.startswith("not optimized: ") for note in result.report.notes)


def test_data_that_is_read_only_once_and_refills_its_arrays() -> None:
    make, samples = NETWORKS["attentive"]
    config = QConfig.of("A8W8").with_(optimizers=(GPTQ(), BiasCorrection()))

    def once() -> Any:
        buffers = dict[tuple[int, ...], np.ndarray]()
        for sample in samples():
            buffer = buffers.setdefault(sample["x"].shape, np.empty_like(sample["x"]))
            buffer[...] = sample["x"]
            yield {"x": buffer}
            buffer[...] = 0

    assert (
        quantize(make(), once(), config).model
        == quantize(make(), samples(), config).model
    )


def test_a_bias_too_large_for_its_weights_is_minded_before_codes_are_chosen(
    chosen: Seen,
) -> None:
    """The scale of the weight has to be raised, and what was chosen for the smaller one would be
    rounded once more.
    """
    tiny = weight(8, 8, seed=1) * np.float32(1e-7)
    model = parse(
        "g (float[N,8] x) => (float[N,8] y) { [fc] y = Gemm (x, w, v) }",
        w=tiny,
        v=BIAS * np.float32(1e4),
    )
    result = quantize(model, rows(4, 8), QConfig.of("A8W8").with_(optimizers=GPTQ()))
    assert any("raised to hold its bias" in note for note in result.report.notes)
    [(_, solution)] = chosen
    probe = ModelProto()
    probe.CopyFrom(result.model)
    name = next(node.input[1] for node in probe.graph.node if node.name == "fc")
    probe.graph.output.append(helper.make_tensor_value_info(name, 1, None))
    np.testing.assert_array_equal(run(probe, rows(4, 8)[0])[1].T, solution.weight[0])


def test_a_scale_is_never_above_what_one_layer_alone_needs() -> None:
    """A MatMul and the vector behind it are one layer, also where the vector is rounded to eight
    bits.
    """
    make, samples = NETWORKS["attentive"]
    result = quantize(
        make(), samples(), QConfig.of("XINT8").with_(optimizers=BiasCorrection())
    )
    changed = {
        layer.name: layer.changed["bias_correction"] for layer in result.report.layers
    }
    assert changed["k"] == changed["v"] == 0, "there is nothing that could be moved"
    assert sum(changed.values()) > 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GPTQ(damping=2), "damping of gptq"),
        (lambda: GPTQ(damping=10**400), "damping of gptq is 1000.*must be a number"),
        (lambda: GPTQ(scales=2), "scales of gptq is 2; it must be true or false"),
        (lambda: GPTQ(damping=float("nan")), "damping of gptq"),
        (
            lambda: GPTQ(damping="car"),
            "damping of gptq is 'car'; it must be a number from 0 to 1, or 'auto'",
        ),
        (lambda: GPTQ(act_order=1), "act_order of gptq"),  # type: ignore[arg-type]
        (lambda: BiasCorrection("magic"), "method of bias_correction"),
        (lambda: QConfig.of("A8W8").with_(optimizers="gptq:bits=4"), "bits"),
        (
            lambda: QConfig.of("A8W8").with_(optimizers="adaround:rate=fast"),
            "rate of adaround",
        ),
    ],
)
def test_bad_settings(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
