"""``isolate=True``: the same results, and a native crash is an error or is worked around."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_all_start_methods, get_context
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from calibrators.errors import RuntimeCrash
from calibrators.onnx_runtime.isolation import isolated
from calibrators.onnx_runtime.session import open_session
from quark_onnx import (
    analyze,
    calibrate,
    compare,
    convert,
    npu,
    quantize,
    quantize_dynamic,
    quantize_static,
    quantize_to_accuracy,
    quantize_weights,
    search,
)
from quark_onnx.common.errors import ConfigError, ModelError, RuntimeCrashError
from quark_onnx.plan import Keep, Use
from tests.models import MODELS, normal, parse, run, samples, weight
from tests.native_faults import (
    captured_mover,
    crashing_inference,
    endless,
    kill_runs_of,
)

POSIX = pytest.mark.skipif(os.name == "nt", reason="there are no signals to send")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary folder, in which nothing may be left."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    yield folder
    assert [
        path for path in folder.iterdir() if path.name != ".ses"
    ] == []  # which onnxruntime writes


def convolutions() -> onnx.ModelProto:
    return parse(
        """g (float[N, 3, 8, 8] x) => (float[N, 4] y) {
            [first] a = Conv <pads = [1, 1, 1, 1]> (x, w) [clip] b = Relu (a)
            [pool] c = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (b)
            [second] d = Conv (c, u) [mean] e = GlobalAveragePool (d) [flat] f = Flatten (e) [head] y = Gemm (f, v)
        }""",  # noqa: E501
        w=weight(6, 3, 3, 3),
        u=weight(6, 6, 3, 3),
        v=weight(6, 4),
    )


@pytest.mark.parametrize(
    "config",
    ["A8W8", "XINT8", "BF16", {"preset": "A8W8", "optimizers": ["adaround"]}],
    ids=str,
)
def test_the_bytes_are_the_same(config: Any) -> None:
    """Where onnxruntime runs is not seen in the result, whichever steps run it."""
    model = convolutions()
    here, apart = (
        quantize(model, samples(model, 24), config, isolate=flag)
        for flag in (False, True)
    )
    assert apart.model.SerializeToString(
        deterministic=True
    ) == here.model.SerializeToString(deterministic=True)
    assert apart.report.outputs == here.report.outputs
    assert apart.report.notes == here.report.notes


@pytest.mark.parametrize("name", ["branches", "loop", "inner_output"])
def test_bodies_are_played_apart(name: str) -> None:
    model = MODELS[name]()
    here, apart = (
        quantize(model, samples(model, 4), isolate=flag) for flag in (False, True)
    )
    assert apart.model.SerializeToString(
        deterministic=True
    ) == here.model.SerializeToString(deterministic=True)


def executors() -> Iterator[tuple[str, Executor]]:
    yield "threads", ThreadPoolExecutor(2)
    yield "spawned", ProcessPoolExecutor(1, get_context("spawn"))
    if "fork" in get_all_start_methods():
        yield "forked", ProcessPoolExecutor(1, get_context("fork"))


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_executors_get_the_same_model() -> None:
    """Threads use the process of the run, twice in a row.

    Processes, which are apart already, do not touch it.
    """
    model = convolutions()
    expected = quantize_static(model, samples(model, 12)).SerializeToString(
        deterministic=True
    )
    for name, executor in executors():
        with executor:
            for _ in range(2):
                found = quantize_static(
                    model, samples(model, 12), executor=executor, isolate=True
                )
                assert found.SerializeToString(deterministic=True) == expected, name
    assert (
        quantize_static(model, samples(model, 12)).SerializeToString(deterministic=True)
        == expected
    )


def test_every_function_takes_it() -> None:
    for function in (
        quantize,
        quantize_weights,
        compare,
        analyze,
        calibrate,
        search,
        convert,
        quantize_to_accuracy,
    ):  # quantize_dynamic has two spellings
        assert inspect.signature(function).parameters["isolate"].default is False
    dense = parse(
        "g (float[N, 2] x) => (float[N, 2] y) { y = MatMul (x, w) }", w=weight(2, 2)
    )
    assert quantize_weights(dense, isolate=True) == quantize_weights(dense)
    assert quantize_dynamic(dense, isolate=True) == quantize_dynamic(dense)
    data = samples(dense, 4)
    assert analyze(dense, quantize_static(dense, data), data, isolate=True).samples == 4
    with pytest.raises(ConfigError, match="isolate is 'yes'; it must be True or False"):
        quantize(dense, data, isolate="yes")  # type: ignore[arg-type]


def feeds() -> list[dict[str, Any]]:
    return [
        {"x": normal(1, 3, 8, 8, seed=seed), "cond": np.array(seed % 2 == 0)}
        for seed in range(4)
    ]


def test_the_error_of_a_crash_names_models_and_step(tmp_path: Path) -> None:
    """It is a ModelError, and says how the process ended and what to do."""
    before, after = tmp_path / "float.onnx", tmp_path / "quantized.onnx"
    onnx.save(captured_mover(quantized=False), before)
    onnx.save(captured_mover(quantized=True), after)
    assert compare(before, before, feeds(), isolate=True).sqnr == np.inf
    with pytest.raises(RuntimeCrashError) as crash:
        compare(before, after, feeds(), isolate=True)
    words = (
        "float.onnx, ",
        "quantized.onnx: ",
        "SIGABRT",
        "while loading the other model",
        "another version of it",
    )
    assert isinstance(crash.value, ModelError)
    assert all(word in str(crash.value) for word in words), crash.value


@POSIX
@pytest.mark.parametrize("which", ["float", "other"])
def test_a_crash_while_samples_are_run(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while it is busy; the message says with which of the models."""
    ends, endures = endless(conditional=True), endless()
    data = [{"x": np.ones((1, 4), np.float32)}]
    kill_runs_of(f"the {which} model", monkeypatch)
    with (
        isolated(),
        pytest.raises(RuntimeCrashError, match=r"SIGKILL .*memory runs out") as crash,
    ):
        if which == "float":
            quantize(endures, data)
        else:
            compare(ends, endures, data)
    assert f"while running the {which} model" in str(crash.value)


def crashing_once(
    monkeypatch: pytest.MonkeyPatch, times: int = 1
) -> list[onnx.ModelProto]:
    """Let onnxruntime crash, really, in place of verifying the first quantized model.

    What was to be verified.
    """
    module, asked = sys.modules["quark_onnx.job"], list[onnx.ModelProto]()
    finish = module.finish

    def crash(graph: Any, *arguments: Any, **options: Any) -> Any:
        asked.append(graph.to_model())
        if len(asked) > times:
            return finish(graph, *arguments, **options)
        try:
            open_session(captured_mover(quantized=True), what="the quantized model")
        except Exception as error:
            raise ModelError(
                f"onnxruntime cannot load the quantized model: {error}"
            ) from error

    monkeypatch.setattr(module, "finish", crash)
    return asked


@pytest.mark.parametrize("config", ["A8W8", "XINT8"])
def test_a_crash_on_the_result_is_worked_around(
    config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second result has no pair before an operator that moves values, and is about as good.

    A note says so.
    """
    model = convolutions()
    data = samples(model, 24)
    usual = quantize(model, data, config)
    asked = crashing_once(monkeypatch)
    found = quantize(model, data, config, isolate=True)
    first, second = asked
    assert first.graph != second.graph
    producers = {
        name: node.op_type for node in second.graph.node for name in node.output
    }
    readers = {name: node.op_type for node in second.graph.node for name in node.input}
    for node in second.graph.node:
        if node.op_type in ("MaxPool", "Flatten"):
            assert producers[node.input[0]] != "DequantizeLinear"
    assert readers["b"] == "MaxPool"
    assert producers["a"] == "Conv"
    assert sum(node.op_type == "QuantizeLinear" for node in second.graph.node) >= 3
    [note] = [note for note in found.report.notes if "crashed" in note]
    assert note.endswith(
        "operators that move values were then left float: 1 Flatten, 1 MaxPool"
    )
    assert isinstance(found.plan.entries[Use("b", "pool")], Keep)
    assert "onnxruntime crashed" in found.report.kept_nodes["pool"]
    expected = [run(model, each)[0].astype(np.float64) for each in data]
    computed = [run(found.model, each)[0] for each in data]
    noise = sum(
        float(np.square(a - b).sum()) for a, b in zip(expected, computed, strict=True)
    )
    sqnr = 10 * np.log10(sum(float(np.square(a).sum()) for a in expected) / noise)
    assert usual.report.worst_sqnr is not None
    assert sqnr > usual.report.worst_sqnr - 3


def test_what_crashes_again_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = convolutions()
    crashing_once(monkeypatch, times=2)
    with pytest.raises(RuntimeCrashError, match="while loading the quantized model"):
        quantize(model, samples(model, 4), output=tmp_path / "out.onnx", isolate=True)
    assert not (tmp_path / "out.onnx").exists()


def test_a_process_that_was_killed_is_no_reason_to_plan_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory that runs out says nothing of operators that move values."""
    asked = []

    def kill(*_: Any, **__: Any) -> None:
        asked.append(True)
        raise RuntimeCrash("onnxruntime's process was ended by SIGKILL", killed=True)

    monkeypatch.setattr(sys.modules["quark_onnx.job"], "finish", kill)
    model = convolutions()
    with pytest.raises(RuntimeCrashError, match="memory runs out"):
        quantize(model, samples(model, 4), isolate=True)
    assert asked == [True]


def test_a_search_goes_on_after_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate that crashes has failed; the float model is loaded again for the next one."""
    model = parse(
        "g (float[N, 4] x) => (float[N, 4] y) { y = MatMul (x, w) }", w=weight(4, 4)
    )
    crashing_once(
        monkeypatch
    )  # nothing moves values here: there is nothing to try again with
    space = {"presets": ["A8W8", "A16W8"], "calibrators": [], "optimizers": []}
    found = search(model, samples(model, 8), space=space, isolate=True)
    assert [candidate.score is None for candidate in found.candidates] == [False, True]
    assert "SIGABRT" in found.candidates[1].error


SPACE = {"presets": ["A8W8"], "calibrators": [], "optimizers": []}
DATA = [{"x": normal(2, 4, seed=seed)} for seed in range(4)]
#: Every public function that takes a model, as a call with a model's path or proto.
CALLS: dict[str, Callable[..., Any]] = {
    "quantize": lambda model, **how: quantize(model, DATA, **how),
    "quantize_static": lambda model, **how: quantize_static(model, DATA, **how),
    "quantize_dynamic": lambda model, **how: quantize_dynamic(model, **how),
    "quantize_weights": lambda model, **how: quantize_weights(model, **how),
    "calibrate": lambda model, **how: calibrate(model, DATA, **how),
    "compare": lambda model, **how: compare(model, model, DATA, **how),
    "analyze": lambda model, **how: analyze(model, model, DATA, **how),
    "convert": lambda model, **how: convert(model, "float16", **how),
    "search": lambda model, **how: search(model, DATA, space=SPACE, **how),
    "quantize_to_accuracy": lambda model, **how: quantize_to_accuracy(
        model, DATA, "10dB", **how
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_impossible_attribute_is_an_error_before_native_code_reads_it(
    call: Callable[..., Any],
) -> None:
    """Without isolation, too: onnx's inference reads other memory at such a value."""
    with pytest.raises(
        ModelError,
        match=r"'gather' \(GatherND\): attribute 'batch_dims' is -2147483648",
    ):
        call(crashing_inference())


@POSIX
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_crash_of_shape_inference_is_an_error(
    call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Native code on fields that no rule knows runs in the isolated process, in every function.

    The fault is injected: the check of the fields is left out.
    """
    monkeypatch.setattr("quark_onnx.check.model.check_fields", lambda _: None)
    path = tmp_path / "crashing.onnx"
    onnx.save(crashing_inference(), path)
    with pytest.raises(RuntimeCrashError) as crash:
        call(path, isolate=True)
    words = ("crashing.onnx: ", "onnx's process was ended by SIG", "a defect of onnx:")
    assert all(word in str(crash.value) for word in words), crash.value


@POSIX
def test_a_calibration_that_crashes_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "endless.onnx"
    onnx.save(endless(), path)
    kill_runs_of("the float model", monkeypatch)
    with pytest.raises(RuntimeCrashError, match=r"endless\.onnx: .*SIGKILL"):
        calibrate(path, [{"x": np.ones((1, 4), np.float32)}], isolate=True)


@POSIX
@pytest.mark.parametrize(
    "call, what",
    [
        (quantize_weights, "the float model"),
        (lambda model: convert(model, "float16"), "the model"),
        (lambda model: convert(model, "qdq-to-qoperator"), "the model"),
        (npu.cut, "the float model"),
        (npu.legalize, "the float model"),
    ],
    ids=["quantize_weights", "float16", "qdq-to-qoperator", "cut", "legalize"],
)
def test_a_crash_on_a_random_sample_is_an_error(
    call: Callable[..., Any], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without data, a model that ends its process is not one that runs on no random input."""
    kill_runs_of(what, monkeypatch)
    with (
        isolated(),
        pytest.raises(ModelError, match=rf"SIGKILL.* while running {what}"),
    ):
        call(endless())


def test_configurations_go_on_after_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that crashes has failed, and the next one is tried, in a new process."""
    model = parse(
        "g (float[N, 4] x) => (float[N, 4] y) { y = MatMul (x, w) }", w=weight(4, 4)
    )
    crashing_once(monkeypatch)
    found = quantize_to_accuracy(model, DATA, "10dB", isolate=True)
    assert "SIGABRT" in found.attempts[0].error
    assert found.attempts[-1].sqnr is not None and found.attempts[-1].sqnr > 10


def test_results_of_the_other_functions_are_the_same(tmp_path: Path) -> None:
    model = crashing_inference(0)
    for flag in False, True:
        calibrate(model, DATA, tmp_path / f"{flag}.json", isolate=flag)
    texts = [(tmp_path / f"{flag}.json").read_bytes() for flag in (False, True)]
    assert texts[0] == texts[1]
    converted = [
        convert(model, ["opset", "float16"], opset=21, isolate=flag).model
        for flag in (False, True)
    ]
    assert converted[0] == converted[1]
    found = [
        quantize_to_accuracy(model, DATA, "10dB", isolate=flag)
        for flag in (False, True)
    ]
    assert found[0].result.model == found[1].result.model
    scores = [
        [
            each.score
            for each in search(model, DATA, space=SPACE, isolate=flag).candidates
        ]
        for flag in (False, True)
    ]
    assert scores[0] == scores[1] and scores[0]
