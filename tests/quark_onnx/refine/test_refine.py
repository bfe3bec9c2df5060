"""refine: what a layer is shown, which activation lies behind it, and the same result on any number
of cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from quark_onnx import QConfig, QuantizationSpec, quantize
from quark_onnx.graph import Graph
from quark_onnx.optimizers import GPTQ
from quark_onnx.optimizers.problem import RoundingProblem, SampledRows
from quark_onnx.patterns.activation import activation_behind
from tests.models import normal, parse, run, weight

ROOT = Path(__file__).parents[3]

BEHIND = {
    "Relu (a)": ("clip", np.maximum),
    "LeakyRelu <alpha = 0.2> (a)": ("leaky", lambda x, _: np.where(x > 0, x, 0.2 * x)),
    "Clip (a, low, high)": ("clip", lambda x, _: x.clip(-1, 2)),
    "Clip (a, , high)": ("clip", lambda x, _: np.minimum(x, 2)),
    "Clip (a)": ("clip", lambda x, _: x),
    "HardSwish (a)": ("hardswish", lambda x, _: x * (x / 6 + 0.5).clip(0, 1)),
    "Sigmoid (a)": ("linear", lambda x, _: x),
    "Clip (a, computed, high)": ("linear", lambda x, _: x),
}


@pytest.mark.parametrize("call", BEHIND)
def test_the_function_behind_a_layer(call: str) -> None:
    low, high = np.float32(-1), np.float32(2)
    graph = Graph.of(
        parse(
            "g (float[N,4] x) => (float[N,4] y) { computed = ReduceMin <keepdims = 0>"
            f" (x) a = Abs (x) y = {call} }}",
            low=np.asarray(low),
            high=np.asarray(high),
        )
    )
    kind, function = BEHIND[call]
    found, x = activation_behind(graph, "a"), np.linspace(-5, 5, 101)
    assert found.kind == kind
    np.testing.assert_allclose(found.value(x), function(x, 0), atol=1e-12)


GATES = {
    "g = Sigmoid (a) y = Mul (a, g)": "silu",
    "g = Sigmoid (a) y = Mul (g, a)": "silu",
    "g = HardSigmoid <alpha = 0.1666666> (a) y = Mul (a, g)": "hardswish",
    "g = HardSigmoid (a) y = Mul (a, g)": "linear",
    "g = Sigmoid (a) h = Mul (a, g) y = Add (h, g)": "linear",
    "g = Sigmoid (x) y = Mul (a, g)": "linear",
    "g = Relu (a) y = Mul (a, g)": "linear",
    "g = Relu (a) h = Exp (a) k = Abs (a) l = Add (g, h) y = Add (k, l)": "linear",
}


@pytest.mark.parametrize("text", GATES)
def test_gates(text: str) -> None:
    graph = Graph.of(
        parse(f"g (float[N,4] x) => (float[N,4] y) {{ a = Abs (x) {text} }}")
    )
    assert activation_behind(graph, "a").kind == GATES[text]


def test_what_others_see_is_not_behind_a_function() -> None:
    graph = Graph.of(
        parse(
            "g (float[N,4] x) => (float[N,4] y, float[N,4] a) { a = Abs (x) y = Relu"
            " (a) }"
        )
    )
    assert activation_behind(graph, "a").linear


@pytest.fixture
def problems(monkeypatch: pytest.MonkeyPatch) -> list[RoundingProblem]:
    seen = list[RoundingProblem]()
    module = sys.modules["quark_onnx.refine.refine"]
    improved = module.best_solution

    def watched(problem: RoundingProblem, optimizers: Any) -> Any:
        gram, mean = problem.gram(), problem.mean()  # while the walks are there
        assert problem.learned is not None
        learned = problem.learned()
        train, held = (
            SampledRows(rows.inputs.copy(), rows.targets.copy())
            for rows in (problem.train, problem.held)
        )
        seen.append(
            replace(
                problem,
                gram=lambda: gram,
                learned=lambda: learned,
                mean=lambda: mean,
                train=train,
                held=held,
            )
        )
        return improved(problem, optimizers)

    monkeypatch.setattr(module, "best_solution", watched)
    monkeypatch.setattr(GPTQ, "reads_mean", True)
    return seen


def batches() -> list[dict[str, Any]]:
    """Twenty samples of four rows."""
    random = np.random.default_rng(0)
    return [{"x": random.normal(size=(4, 6)).astype(np.float32)} for _ in range(20)]


@pytest.mark.parametrize("sum_", ["Add (r, b)", "Add (b, r)"])
def test_what_a_sum_has_lost_is_made_good_by_the_layer_that_is_added(
    problems: list[RoundingProblem], sum_: str
) -> None:
    """The target is the float sum less what the quantized model adds to."""
    model = parse(
        "g (float[N,6] x) => (float[N,5] y) { a = Gemm (x, v) r = Relu (a) b = Gemm (r,"
        " w) y = " + sum_ + " }",
        v=weight(6, 5),
        w=weight(5, 5),
    )
    data = batches()
    config = QConfig.of("W8").with_(
        weight=QuantizationSpec("int4", per_channel=True), form="qdq", optimizers=GPTQ()
    )
    result = quantize(model, data, config)
    x = np.concatenate([sample["x"] for sample in data])
    floating, quantized = (
        Graph.of(each).copy().to_model() for each in (model, result.model)
    )
    for each in (floating, quantized):
        each.graph.output.append(
            helper.make_tensor_value_info("r", TensorProto.FLOAT, ["N", 5])
        )
    (wanted, _), (_, found) = (run(each, {"x": x}) for each in (floating, quantized))
    second = problems[1]
    assert second.activation.linear and np.abs(second.train.targets).max() > 0.01
    for row, target in zip(
        second.train.inputs[0], second.train.targets[0], strict=True
    ):
        alike = (
            np.abs(found - row).max(axis=1) < 1e-5
        )  # several where the Relu lets nothing pass
        assert np.abs(wanted[alike] - found[alike] - target).max(axis=1).min() < 1e-4


NO_SUMS = {
    "s = Add (b, c) y = Relu (s)": "a constant",
    "s = Mul (r, b) y = Relu (s)": "no sum",
    "s = Add (b, b) y = Relu (s)": "twice",
    "s = Add (r, b) t = Relu (b) y = Add (s, t)": "read elsewhere",
    "n = Gemm (r, w2) s = Add (n, b) y = Relu (s)": "a layer that is still to come",
    "m = ReduceMax <axes = [1], keepdims = 1> (r) y = Add (m, b)": "of another shape",
}


@pytest.mark.parametrize("text", NO_SUMS, ids=NO_SUMS.values())
def test_other_layers_compute_what_they_compute_in_float(
    problems: list[RoundingProblem], text: str
) -> None:
    model = parse(
        "g (float[N,6] x) => (float[N,5] y) { a = Gemm (x, v) r = Relu (a) b = Gemm"
        " (r, w) " + text + " }",
        v=weight(6, 5),
        w=weight(5, 5),
        **(
            {"w2": weight(5, 5, seed=1)}
            if "w2" in text
            else {"c": normal(1, 5)}
            if "c)" in text
            else {}
        ),
    )
    data = batches()
    quantize(
        model, data, QConfig.of("W8").with_(optimizers=GPTQ(), form="qdq", safe=False)
    )
    x = np.concatenate([sample["x"] for sample in data])
    wanted = np.maximum(x @ weight(6, 5), 0) @ weight(5, 5)
    wanted = wanted + (normal(1, 5) if "c)" in text and problems[1].bias.any() else 0)
    for target in problems[1].train.targets[0]:
        assert np.abs(wanted - target).max(axis=1).min() < 1e-4


def test_a_layer_is_shown_what_it_reads_and_what_it_should_compute(
    problems: list[RoundingProblem],
) -> None:
    """Rows of the quantized model in front, of samples apart.

    The targets are those of the float model.
    """
    model = parse(
        "g (float[N,6] x) => (float[N,3] y) { a = Gemm (x, v, c) r = Relu (a) y = Gemm"
        " (r, w) }",
        v=weight(6, 5),
        w=weight(5, 3),
        c=normal(5),
    )
    data = batches()
    quantize(model, data, QConfig.of("W8").with_(optimizers=GPTQ(), form="qdq"))
    first, second = problems
    used = np.concatenate([sample["x"] for sample in data])
    for rows, part in ((first.train, 14), (first.held, 2)):
        assert rows.inputs.shape[1] == rows.targets.shape[1] <= 4 * (part + 4)
        for x, target in zip(rows.inputs[0], rows.targets[0], strict=True):
            assert (used == x).all(axis=1).any()
            np.testing.assert_allclose(
                target, x @ weight(6, 5) + normal(5), rtol=1e-4, atol=1e-5
            )
    train, held = (
        {row.tobytes() for row in rows.inputs[0]} for rows in (first.train, first.held)
    )
    assert train and held and not train & held
    assert not first.activation.linear and second.activation.linear
    gathered = np.concatenate([first.train.inputs[0], first.held.inputs[0]]).astype(
        np.float64
    )
    assert len(gathered) == 76  # of 20 samples one measures the result
    gram, count = first.gram()
    assert count == len(gathered)
    np.testing.assert_allclose(gram[0], gathered.T @ gathered, rtol=1e-4, atol=1e-4)
    assert first.learned is not None
    gram, count = first.learned()
    learned = first.train.inputs[0].astype(np.float64)
    assert count == len(learned) < len(gathered), "those held out judge it"
    np.testing.assert_allclose(gram[0], learned.T @ learned, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        first.mean()[0], gathered.mean(axis=0), rtol=1e-4, atol=1e-5
    )
    relu = np.maximum(gathered @ weight(6, 5) + normal(5), 0)
    np.testing.assert_allclose(
        second.mean()[0], relu.mean(axis=0), rtol=1e-3, atol=1e-4
    )
    inputs = np.concatenate([second.train.inputs[0], second.held.inputs[0]])
    assert (
        0 < np.abs(np.sort(inputs.sum(axis=1)) - np.sort(relu.sum(axis=1))).max() < 0.2
    ), "what a layer before changed"


SCRIPT = """
import hashlib, sys
import numpy as np
from quark_onnx import QConfig, QuantizationSpec, quantize
from quark_onnx.optimizers import GPTQ, AdaQuant, AdaRound, BiasCorrection
from tests.models import normal, parse, run, weight
model = parse(
    '''g (float[N,T,160] x) => (float[N,T,160] y)
    { a = MatMul (x, v) s = Add (a, b) r = Relu (s) c = MatMul (r, w) y = Add (c, x) }''',
    v=weight(160, 300), w=weight(300, 160), b=normal(300),
)
random = np.random.default_rng(0)
data = [{"x": random.normal(size=(1, 60, 160)).astype(np.float32)} for _ in range(10)]
for optimizer in (GPTQ(), GPTQ(asymmetric=True), AdaRound(iterations=4), AdaQuant(iterations=4), BiasCorrection()):
    result = quantize(model, data, QConfig.of("A8W8").with_(optimizers=optimizer))
    print(hashlib.sha256(result.model.SerializeToString(deterministic=True)).hexdigest(), result.report.layers)
"""  # noqa: E501


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere a process cannot be held to one core"
)
def test_the_result_does_not_depend_on_the_number_of_cores() -> None:
    found = set()
    for command in (["taskset", "-c", str(min(os.sched_getaffinity(0)))], []):
        names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        environment = {
            **os.environ,
            **dict.fromkeys(names, "1" if command else "2"),
            "PYTHONPATH": str(ROOT),
        }
        run = subprocess.run(
            [*command, sys.executable, "-c", SCRIPT],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        found.add(run.stdout)
    assert len(found) == 1


@pytest.mark.parametrize("optimizer", ["adaquant:iterations=5", "gptq"])
@pytest.mark.parametrize(
    ("size", "layers", "weights"),
    [
        (
            (40, 4),
            ("MatMul (x, w)", "MatMul (r, v)"),
            (weight(4, 3), weight(4, 3, seed=1)),
        ),
        (
            (3, 4, 5, 5),
            (
                "Conv <pads = [1,1,1,1]> (x, w)",
                "Conv <pads = [1,1,1,1], group = 2> (r, v)",
            ),
            (weight(3, 4, 3, 3), weight(6, 2, 3, 3, seed=1)),
        ),
    ],
    ids=["products", "convolutions"],
)
def test_a_layer_that_reads_nothing_on_any_sample_keeps_its_codes(
    size: tuple[int, ...],
    layers: tuple[str, str],
    weights: tuple[Any, Any],
    optimizer: str,
) -> None:
    dims = ",".join(["N", *map(str, size[1:])])
    model = parse(
        f"""g (float[{dims}] x) => (y, z) {{
            m = ReduceMax <axes = {list(range(1, len(size)))}, keepdims = 0> (x)
            k = Greater (m, big)
            r = Compress <axis = 0> (x, k)
            [front] y = {layers[0]}
            [behind] z = {layers[1]}
        }}""",
        w=weights[0],
        v=weights[1],
        big=np.float32(9),
    )
    samples = [{"x": normal(*size, seed=seed)} for seed in range(9)]
    notes = quantize(
        model, samples, QConfig.of("A8W8").with_(optimizers=(optimizer,), safe=False)
    ).report.notes
    assert [note for note in notes if note.startswith("not optimized")] == [
        "not optimized: behind: the data has too few rows for it"
    ]
