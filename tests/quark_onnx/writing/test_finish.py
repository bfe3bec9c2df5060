"""finish: a model is checked, loaded and run before it gets its name, and its error is measured."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from quark_onnx import QConfig, quantize, quantize_weights
from quark_onnx.common.errors import AccuracyError, ModelError
from quark_onnx.graph import Graph
from quark_onnx.report.measure import OutputError
from quark_onnx.running.run import Reference
from quark_onnx.writing.finish import finish
from tests.models import conv_relu, normal, parse, residual, run, samples
from tests.pipeline import Stages


def broken() -> Graph:
    """A layer that no runtime knows."""
    graph = Graph.of(conv_relu())
    graph.add("NoSuchOperator", ["x"], ["z"])
    graph.set_input(graph.nodes[0], 0, "z")
    return graph


def no_sense() -> Graph:
    """Valid by its types, but a shape that cannot be run."""
    model = parse(
        "g (float[N,M] x) => (float[A,B] y) { y = Reshape (x, s) }", s=np.int64([7, 7])
    )
    return Graph.of(model)


@pytest.mark.parametrize(
    "settings", ["MaxPool <", "AveragePool <", "AveragePool <count_include_pad = 1, "]
)
def test_windows_that_onnx_counts_and_runtimes_do_not(settings: str) -> None:
    """onnx's check infers another shape than onnxruntime computes."""
    pool = (
        f"{settings}kernel_shape = [2,2], strides = [2,2], pads = [0,0,1,1], ceil_mode"
        " = 1> (x)"
    )
    model = parse(
        f"g (float[1,3,8,8] x) => (float[1,3,H,W] y) {{ p = {pool} y = Relu (p) }}"
    )
    sample = {
        "x": np.random.default_rng(0).normal(size=(1, 3, 8, 8)).astype(np.float32)
    }
    for target in ("", "stx"):
        result = quantize(
            model, [sample], QConfig.of("XINT8").with_(target=target)
        ).model
        assert (
            run(result, sample)[0].shape == run(model, sample)[0].shape == (1, 3, 4, 4)
        )


def test_what_is_returned_is_what_is_written(tmp_path: Path) -> None:
    model = residual()
    stages, data = Stages.of(model), samples(model)
    result, errors, _ = finish(
        Graph.of(stages.model), Reference(model), data, tmp_path / "q.onnx"
    )
    assert onnx.load(tmp_path / "q.onnx") == result and [e.name for e in errors] == [
        "y"
    ]
    again, same, _ = finish(Graph.of(stages.model), Reference(model), data, None)
    assert again == result and same == errors


def test_shapes_are_written_for_those_who_compile_the_model() -> None:
    model = residual()
    result, *_ = finish(
        Graph.of(Stages.of(model).model), Reference(model), samples(model), None
    )
    known = {value.name for value in (*result.graph.value_info, *result.graph.output)}
    assert {name for node in result.graph.node for name in node.output} <= known


@pytest.mark.parametrize("output", [True, False], ids=["file", "memory"])
def test_a_model_that_is_not_valid_is_not_written(tmp_path: Path, output: bool) -> None:
    model = conv_relu()
    with pytest.raises(
        ModelError, match="the quantized model does not pass onnx's check: "
    ):
        finish(
            broken(),
            Reference(model),
            samples(model),
            tmp_path / "q.onnx" if output else None,
        )
    assert not list(tmp_path.iterdir())


def test_a_model_that_does_not_run_is_not_written(tmp_path: Path) -> None:
    float_model = parse("g (float[N,M] x) => (float[A,B] y) { y = Neg (x) }")
    feeds = [{"x": np.ones((2, 3), np.float32)}]
    with pytest.raises(
        ModelError, match="the quantized model cannot be measured against the float one"
    ):
        finish(no_sense(), Reference(float_model), feeds, tmp_path / "q.onnx")
    assert not list(tmp_path.iterdir())


def test_a_float_model_that_shape_inference_rejects_may_be_quantized() -> None:
    model = conv_relu()
    model.graph.output[0].type.tensor_type.shape.dim[
        1
    ].dim_value = 5  # there are four; onnxruntime only warns
    result, errors, _ = finish(
        Graph.of(Stages.of(model).model), Reference(model), samples(model), None
    )
    assert errors[0].sqnr is not None and errors[0].sqnr > 25
    # The declared size contradicts the run: it is opened.
    sizes = result.graph.output[0].type.tensor_type.shape.dim
    assert [size.WhichOneof("value") for size in sizes][1] is None
    assert [size.dim_value for size in sizes][2:] == [8, 8]


def test_the_gate(tmp_path: Path) -> None:
    model = conv_relu()
    graph = Graph.of(Stages.of(model).model)
    (error,) = finish(graph, Reference(model), samples(model), None).errors
    assert error.sqnr is not None
    finish(graph, Reference(model), samples(model), None, min_sqnr=error.sqnr - 0.1)
    with pytest.raises(AccuracyError, match="Nothing was written"):
        finish(
            graph,
            Reference(model),
            samples(model),
            tmp_path / "q.onnx",
            min_sqnr=error.sqnr + 0.1,
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("lost", "told"), [(5.0, True), (0.5, False)])
def test_what_a_processor_that_saturates_loses_is_told(
    lost: float,
    told: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The errors in the report are those of the model as ONNX defines it."""
    module, found = sys.modules["quark_onnx.writing.finish"], list[OutputError]()
    compare = module.measure_with_states

    def worse(*arguments: Any) -> list[OutputError]:
        """The second time, as such a processor may find."""
        errors: list[OutputError] = compare(*arguments)
        found.append(
            errors[0]
            if not found
            else replace(found[0], sqnr=(found[0].sqnr or 0) - lost)
        )
        return found[-1:]

    monkeypatch.setattr(module, "saturates", lambda: True)
    monkeypatch.setattr(module, "measure_with_states", worse)
    model = residual()
    graph, reference, data = (
        Graph.of(Stages.of(model).model),
        Reference(model),
        samples(model),
    )
    _, (error,), notes = finish(graph, reference, data, tmp_path / "q.onnx")
    assert len(found) == 2 and error == found[0] and error.sqnr is not None
    if told:
        [note] = notes
        assert (
            f"output 'y' has {error.sqnr - lost:.1f} dB there, {error.sqnr:.1f} dB"
            " elsewhere; reduce_range" in note
        )
    assert bool(notes) == told and caplog.messages == notes


@pytest.mark.parametrize(("here", "told"), [(0.9, True), (0.995, False)])
def test_what_it_loses_of_values_that_are_no_floats_is_told(
    here: float, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, shares = sys.modules["quark_onnx.writing.finish"], iter((1.0, here))
    monkeypatch.setattr(module, "saturates", lambda: True)
    monkeypatch.setattr(
        module,
        "measure_with_states",
        lambda *_: [OutputError("i", None, None, None, next(shares))],
    )
    model = residual()
    _, _, notes = finish(
        Graph.of(Stages.of(model).model), Reference(model), samples(model), None
    )
    assert [
        note
        for note in notes
        if "output 'i' agrees in 90.0% there, in 100.0% elsewhere" in note
    ] == notes
    assert bool(notes) == told


def test_pairs_that_are_kept_apart_are_said_to_be_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, ratios = sys.modules["quark_onnx.writing.finish"], iter((30.0, 20.0))
    monkeypatch.setattr(module, "saturates", lambda: True)
    monkeypatch.setattr(module, "is_defined", lambda _: True)
    monkeypatch.setattr(
        module,
        "measure_with_states",
        lambda *_: [OutputError("y", next(ratios), None, None, None)],
    )
    model = residual()
    _, _, [note] = finish(
        Graph.of(Stages.of(model).model), Reference(model), samples(model), None
    )
    assert (
        "output 'y' has 20.0 dB there, 30.0 dB elsewhere without fused kernels" in note
    )


def test_nothing_is_said_where_activations_stay_float(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are in no sum of 8-bit products; the model is measured once."""
    model = residual()
    weights = Graph.of(quantize_weights(model, "INT4"))
    module, ratios = sys.modules["quark_onnx.writing.finish"], iter((30.0,))
    monkeypatch.setattr(module, "saturates", lambda: True)
    monkeypatch.setattr(
        module,
        "measure_with_states",
        lambda *_: [OutputError("y", next(ratios), None, None, None)],
    )
    assert not finish(weights, Reference(model), samples(model), None).notes


@pytest.mark.parametrize(
    ("preset", "target"),
    [("A8W8", "cpu"), ("A8W8", "openvino"), ("S8S8", "tensorrt"), ("XINT8", "stx")],
)
def test_large_weights_that_stay_float_for_a_target(
    tmp_path: Path, preset: str, target: str
) -> None:
    """Large weights of a file are held beside the message, which the target's rules read."""
    model = parse(
        "g (float[1,512] x) => (float[1,512] y) { a = MatMul (x, v) y = MatMul (a, w) }",
        v=normal(512, 512, scale=0.05),
        w=normal(512, 512, seed=1, scale=0.05),
    )
    float_node = model.graph.node[1].name = "stays_float"
    onnx.save(model, tmp_path / "model.onnx")
    config = QConfig.of(preset).with_(exclude=(float_node,), target=target)
    data = samples(model, 12)
    quantize(tmp_path / "model.onnx", data, config, tmp_path / "result.onnx")
    result = onnx.load(tmp_path / "result.onnx")
    stored = {
        array.name: onnx.numpy_helper.to_array(array)
        for array in result.graph.initializer
    }
    np.testing.assert_array_equal(
        stored["w"], onnx.numpy_helper.to_array(model.graph.initializer[1])
    )
    [expected], [found] = run(model, data[0]), run(result, data[0])
    noise = np.square(found - expected).mean() / np.square(expected).mean()
    assert noise < 1e-2
