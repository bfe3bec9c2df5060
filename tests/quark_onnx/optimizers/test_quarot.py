"""QuaRot: the function stays, and outliers spread over all channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper

from calibrators.onnx_runtime.session import open_session
from quark_onnx import QConfig, QuaRot, SmoothQuant, quantize
from quark_onnx.common.errors import ConfigError
from quark_onnx.config import from_dict, to_dict
from quark_onnx.graph import Graph
from quark_onnx.patterns.norms import norms
from tests.cases import loop_over
from tests.models import MODELS as EVERY
from tests.models import parse, weight
from tests.models import samples as feeds_of
from tests.quark_onnx.optimizers.transformers import (
    Builder,
    bert,
    gpt,
    llama,
    samples,
    skipping,
)

B = Builder
#: Models, and what is rotated in them: a stream, and the heads of each attention.
MODELS: dict[str, tuple[Callable[[], ModelProto], int]] = {
    "llama": (llama, 3),
    "llama, normalizations in parts": (lambda: llama(B.rms_parts), 3),
    "llama, opset 18": (lambda: llama(B.rms_parts, opset=18), 3),
    "llama, opset 23": (lambda: llama(opset=23), 3),
    "llama, grouped queries": (lambda: llama(B.rms_parts, groups=2), 3),
    "llama, 44 channels, 11 in a head": (lambda: llama(hidden=44), 3),
    "llama, 50 channels, 5 in a head": (lambda: llama(hidden=50, heads=10), 3),
    "llama, 16 channels": (lambda: llama(hidden=16, loud=(3,)), 3),
    "gpt": (gpt, 3),
    "gpt, normalizations in parts": (lambda: gpt(B.layer_parts), 3),
    "gpt, opset 18": (lambda: gpt(B.layer_parts, opset=18), 3),
    "gpt, 54 channels": (lambda: gpt(hidden=54, heads=3), 3),
    "gpt, normalized by root mean squares": (lambda: gpt(B.rms_parts), 3),
    "sums and normalizations in one": (skipping, 1),
    "sums and root mean squares in one": (lambda: skipping(simplified=True), 1),
    "bert": (bert, 2),
}


def run(model: ModelProto, feeds: dict[str, np.ndarray]) -> np.ndarray:
    found: np.ndarray = open_session(model).run(None, feeds)[0]
    return found


def rotated(
    model: ModelProto, optimizer: QuaRot, count: int | None = None
) -> ModelProto:
    graph = Graph.of(model)
    found = optimizer(graph)
    assert count is None or found == count, found.notes
    graph.drop_unused()
    return graph.to_model()


@pytest.mark.parametrize("online", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_function_stays(name: str, online: bool) -> None:
    make, count = MODELS[name]
    model, optimizer = make(), QuaRot(online)
    result = rotated(model, optimizer, None if online else count)
    for feeds in samples(2):
        expected = run(model, feeds)
        error = np.linalg.norm(run(result, feeds) - expected) / np.linalg.norm(expected)
        assert error < 2e-5
    again = rotated(model, optimizer)
    assert result.SerializeToString(deterministic=True) == again.SerializeToString(
        deterministic=True
    )
    if not online and name != "bert":
        kinds = [node.op_type for node in result.graph.node]
        assert sum(kind == "MatMul" for kind in kinds) == sum(
            node.op_type == "MatMul" for node in model.graph.node
        )
    if online:
        products = sum(node.op_type == "MatMul" for node in result.graph.node)
        assert products > sum(node.op_type == "MatMul" for node in model.graph.node)


@pytest.mark.parametrize("shape", [(), (1,), (8,)])
def test_a_normalization_with_one_scale_and_shift_for_all_channels(
    shape: tuple[int, ...],
) -> None:
    model = parse(
        "g (float[2,8] x) => (float[2,8] y) { h = MatMul (x, u) n = LayerNormalization"
        " <axis = -1> (h, scale, shift) q = MatMul (n, v) y = MatMul (q, w) }",
        u=weight(8, 8),
        v=weight(8, 8, seed=1),
        w=weight(8, 8, seed=2),
        scale=np.full(shape, 1.5, np.float32),
        shift=np.full(shape, 0.5, np.float32),
    )
    result = rotated(model, QuaRot(), 1)
    for feeds in feeds_of(model, 2):
        np.testing.assert_allclose(
            run(result, feeds), run(model, feeds), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("online", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "llama, normalizations in parts",
        "llama, grouped queries",
        "gpt",
        "gpt, normalizations in parts",
    ],
)
def test_rounding_costs_less(name: str, online: bool) -> None:
    model = MODELS[name][0]()
    plain, better = (
        quantize(model, samples(), QConfig(optimizers=each))
        for each in ((), (QuaRot(online),))
    )
    assert any(note.startswith("quarot: ") for note in better.report.notes)
    assert "rolled back" not in str(better.report.notes)
    assert better.report.worst_sqnr > plain.report.worst_sqnr + 3


def test_behind_the_sums_only_the_model_itself_can_rotate() -> None:
    model = bert()
    plain, online = (
        quantize(model, samples(), QConfig(optimizers=each))
        for each in ((), "quarot:online=true")
    )
    heads = QuaRot()(Graph.of(model))
    assert heads == 2
    [note] = [note for note in heads.notes if "not rotated" in note]
    assert "reads 'LayerNormalization_2_0', which is normalized" in note
    assert online.report.worst_sqnr > plain.report.worst_sqnr + 3
    # what rotates is no layer: it reads floats, and its matrix keeps them
    floats = {
        tensor.name
        for tensor in online.model.graph.initializer
        if tensor.data_type == onnx.TensorProto.FLOAT
    }
    assert any(name.startswith("quarot_") for name in floats)


def test_an_outlier_is_spread() -> None:
    model = llama(layers=1)
    result = rotated(model, QuaRot(), 2)
    table = numpy_helper.to_array(
        result.graph.initializer[
            [t.name for t in result.graph.initializer].index("c0_rotated")
        ]
    )
    before = numpy_helper.to_array(model.graph.initializer[0])
    np.testing.assert_allclose(
        np.linalg.norm(table, axis=1), np.linalg.norm(before, axis=1), rtol=1e-5
    )
    assert np.abs(table).max() < 0.5 * np.abs(before).max()


def test_the_seed_decides() -> None:
    model = llama(layers=1)
    one, same, other = (
        rotated(model, QuaRot(seed=seed)).SerializeToString(deterministic=True)
        for seed in (0, 0, 1)
    )
    assert one == same != other


N = 12
NORM = "n = SimplifiedLayerNormalization (x, g) "
WRITE = "e = Gather (table, ids) a = MatMul (e, w) x = Add (e, a) "


def small(text: str, outputs: str = "y") -> ModelProto:
    random = np.random.default_rng(0)
    known: dict[str, Any] = {
        "g": np.ones(N) + 0.1 * random.normal(size=N),
        "beta": random.normal(size=N),
    }
    known |= {
        "table": random.normal(size=(20, N)),
        "w": random.normal(size=(N, N)),
        "v": random.normal(size=(N, 5)),
    }
    known |= {
        "two": np.float32(2),
        "tail": np.int64([-1]),
        "ones": np.int64([1]),
        "ends": np.int64([99]),
    }
    used = {
        name: np.asarray(
            value, np.int64 if np.asarray(value).dtype.kind == "i" else np.float32
        )
        for name, value in known.items()
        if any(f"{mark}{name}{end}" in text for mark in " (" for end in ",)")
    }
    declared = ", ".join(
        f"float[A{i}, B{i}, C{i}] {name}" for i, name in enumerate(outputs.split())
    )
    return parse(f"g (int64[B, S] ids) => ({declared}) {{ {text} }}", **used)


def check(model: ModelProto, count: int) -> ModelProto:
    result = rotated(model, QuaRot(), count)
    feeds = {"ids": np.random.default_rng(1).integers(0, 20, (3, 4))}
    np.testing.assert_allclose(
        run(result, feeds), run(model, feeds), rtol=1e-3, atol=1e-4
    )
    return result


@pytest.mark.parametrize(
    ("text", "outputs", "reason"),
    [
        (WRITE + NORM + "y = Relu (n)", "y", "reads 'n', which is normalized"),
        (
            WRITE + NORM + "m = MatMul (n, v) y = Identity (m) z = Relu (x)",
            "y z",
            "(Relu) reads it",
        ),
        (WRITE + NORM + "y = MatMul (n, v)", "y x", "'x' is an output of the model"),
        (
            WRITE + NORM + "y = MatMul (n, v)",
            "y n",
            "'n', which is normalized, is an output of the model",
        ),
        (
            "e = Gather (table, ids) x = Relu (e) " + NORM + "y = MatMul (n, v)",
            "y",
            "(Relu) writes to it",
        ),
    ],
)
def test_what_is_not_understood_is_left_alone(
    text: str, outputs: str, reason: str
) -> None:
    model = small(text, outputs)
    graph = Graph.of(model)
    before = graph.to_model().SerializeToString(deterministic=True)
    found = QuaRot()(graph)
    assert found == 0 and len(found.notes) == 1
    assert reason in found.notes[0]
    assert graph.to_model().SerializeToString(deterministic=True) == before


@pytest.mark.parametrize(
    "text",
    [
        WRITE + NORM + "y = MatMul (n, v)",
        "e = Gather (table, ids) x = Mul (e, two) " + NORM + "y = MatMul (n, v)",
        WRITE
        + "n = LayerNormalization (x, g, beta) t = Slice (n, tail, ends, ones) y ="
        " MatMul (t, v)",
        "e = Gather (table, ids) p = Slice (e, tail, ends, ones) x = Identity (p) "
        + NORM
        + "y = MatMul (n, v)",
        WRITE + "n = LayerNormalization (x, g, beta) y = MatMul (n, v)",
        WRITE
        + "n = LayerNormalization (x, g, beta) p = MatMul (n, w) q = MatMul (n, v) s ="
        " Identity (p) y = MatMul (s, v)",
        WRITE + NORM + "p = MatMul (n, v) q = MatMul (x, v) y = Add (p, q)",
        "e = Gather (table, ids) a = MatMul (e, w) b = MatMul (a, w) x = Sub (b, a) "
        + NORM
        + "y = MatMul (n, v)",
    ],
)
def test_ways_to_write_and_to_read(text: str) -> None:
    check(small(text), 1)


def test_a_table_that_is_the_last_layer_too() -> None:
    text = "e = Gather (table, ids) a = MatMul (e, w) x = Add (e, a) " + NORM
    model = small(
        text
        + "r = Reshape (n, flat) p = Gemm <transB = 1> (r, table) y = Unsqueeze (p,"
        " zero)"
    )
    model.graph.initializer.append(numpy_helper.from_array(np.int64([-1, N]), "flat"))
    model.graph.initializer.append(numpy_helper.from_array(np.int64([0]), "zero"))
    check(model, 1)


def test_a_shift_becomes_a_bias() -> None:
    result = check(
        small(WRITE + "n = LayerNormalization (x, g, beta) y = MatMul (n, v)"), 1
    )
    assert [node.op_type for node in result.graph.node][-2:] == ["MatMul", "Add"]


@pytest.mark.parametrize(
    "norm", [B.rms_parts, B.layer_parts, B.simplified, B.layer_norm]
)
def test_normalizations_are_recognized(norm: Callable[[Builder, str], str]) -> None:
    b = Builder()
    result = norm(b, b.embed())
    [found] = norms(Graph.of(b.model(result, b.hidden)))
    assert (found.sources, found.result) == (("Gather_0_0",), result)
    assert found.centered == (norm in (B.layer_parts, B.layer_norm))
    assert found.scale is not None and (found.shift is not None) == found.centered


def test_a_normalization_over_other_axes_is_none() -> None:
    model = small(
        WRITE + "n = LayerNormalization <axis = 1> (x, table2) y = MatMul (n, v)"
    )
    model.graph.initializer.append(
        numpy_helper.from_array(np.ones((4, N), np.float32), "table2")
    )
    assert norms(Graph.of(model)) == []


@loop_over(
    "optimizer",
    [QuaRot(), QuaRot(online=True), SmoothQuant("auto"), SmoothQuant(insert=True)],
)
@loop_over("name", tuple(EVERY))
def test_every_model_survives(name: str, optimizer: Any) -> None:
    model = EVERY[name]()
    graph = Graph.of(model)
    feeds = feeds_of(model)
    optimizer(graph, feeds)
    graph.drop_unused()
    expected, found = (
        open_session(each).run(None, feeds[0]) for each in (model, graph.to_model())
    )
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(
            np.asarray(other, float), np.asarray(one, float), rtol=1e-3, atol=1e-4
        )


def test_it_is_a_setting() -> None:
    config = QConfig.of("A8W8").with_(
        optimizers=(QuaRot(online=True, seed=3), QuaRot())
    )
    assert from_dict(to_dict(config)) == config
    assert config == QConfig.of("A8W8").with_(
        optimizers=("quarot:online=true,seed=3", "quarot")
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("quarot:online=2", "online of quarot is 2; it must be true or false"),
        (
            "quarot:seed=-1",
            "seed of quarot is -1; it must be a whole number, 0 or more",
        ),
        ("quarot:seed=true", "seed of quarot is True"),
        ("quarot:sed=1", "QuaRot has no setting 'sed'; did you mean 'seed'"),
    ],
)
def test_wrong_settings(settings: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        QConfig(optimizers=settings)


def test_a_node_that_stays_float_says_so_in_the_plan() -> None:
    result = quantize(
        bert(layers=1), samples(), QConfig(optimizers="quarot:online=true")
    )
    reasons = {
        name: why
        for name, why in result.plan.kept.items()
        if why.startswith("it rotates its input")
    }
    assert reasons
    assert {node.name for node in result.model.graph.node} >= reasons.keys()
