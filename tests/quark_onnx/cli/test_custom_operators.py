"""Models with custom operators: what can be run is run, and what was not verified is said.

A model is refused for an operator that onnxruntime lacks only where it has to be run: for static
ranges and comparisons. Every command that runs models takes the library of the operator.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextvars import Context
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto

from calibrators.onnx_runtime import extensions
from calibrators.onnx_runtime.custom_operators import current_libraries
from calibrators.onnx_runtime.session import open_session
from quark_onnx import (
    QConfig,
    calibrate,
    custom_op_libraries,
    quantize,
    quantize_dynamic,
    quantize_weights,
)
from quark_onnx.common.errors import (
    AccuracyError,
    ConfigError,
    QuarkError,
    UnknownOperatorError,
)
from tests.models import normal, parse, weight
from tests.quark_onnx.cli.conftest import CommandLine


def model(operator: str = "my.own.Sine", domain: str = "my.own") -> ModelProto:
    """A model with a custom operator between two layers."""
    return parse(
        f"""<ir_version: 8, opset_import: ["" : 17, "{domain}" : 1]>
        g (float[64,64] x) => (float[64,64] y) {{
            [first] h = MatMul (x, w)
            [odd] p = {operator} (h)
            [second] y = MatMul (p, v)
        }}""",
        w=weight(64, 64),
        v=weight(64, 64, seed=1),
    )


def in_onnx(custom: ModelProto) -> ModelProto:
    """The model with ONNX's operator in place of ``my.own.Sine``."""
    result = ModelProto()
    result.CopyFrom(custom)
    [odd] = [node for node in result.graph.node if node.name == "odd"]
    odd.op_type, odd.domain = "Sin", ""
    return result


def sqnr(expected: np.ndarray[Any, Any], found: np.ndarray[Any, Any]) -> float:
    noise = np.square(expected - found).sum()
    return float(10 * np.log10(np.square(expected).sum() / noise))


DATA = [{"x": normal(64, 64, seed=seed)} for seed in range(4)]
#: Options of a run without data, and the least SQNR in dB of the result.
WITHOUT_A_RUN = {
    "W8": (["--preset", "W8"], 35.0),
    "INT4": (["--preset", "INT4"], 12.0),
    "DYNAMIC": (["--dynamic"], 30.0),
    "BFP16": (["--preset", "BFP16"], 30.0),
    "ranges": (["--ranges", "ranges.cache"], 25.0),
    "data that is not needed": (["--preset", "W8", "--data", "d.npz"], 35.0),
}


@pytest.mark.parametrize("case", WITHOUT_A_RUN)
def test_what_needs_no_run_is_written(
    case: str, cli: CommandLine, folder: Path
) -> None:
    """The report says that the result was neither loaded nor run, and names the operator."""
    options, least = WITHOUT_A_RUN[case]
    onnx.save(model(), "m.onnx")
    np.savez("d.npz", x=DATA[0]["x"])
    # By name: ranges of this package belong to a model.
    calibrate(in_onnx(model()), DATA, "ranges.cache", format="tensorrt")
    finished = cli("quantize", "m.onnx", "-o", "o.onnx", *options)
    assert finished.code == 0, finished.err
    for text in (finished.out, finished.err):
        assert "the result was neither loaded nor run" in text
        assert "my.own:Sine" in text
        assert "(node 'odd')" in text
        assert "--custom-op-library" in text
    result = onnx.load("o.onnx")
    onnx.checker.check_model(result)
    [odd] = [node for node in result.graph.node if node.name == "odd"]
    assert (odd.domain, odd.op_type) == ("my.own", "Sine")
    expected, found = (
        open_session(in_onnx(each)).run(None, DATA[0])[0] for each in (model(), result)
    )
    assert sqnr(expected, found) > least


def test_no_gate_is_passed_without_a_run(folder: Path) -> None:
    with pytest.raises(AccuracyError, match="nothing was written"):
        quantize(model(), None, QConfig.of("W8").with_(min_sqnr=10.0), "o.onnx")
    assert not Path("o.onnx").exists()


@pytest.mark.parametrize("call", [quantize_weights, quantize_dynamic])
def test_the_same_holds_in_python(call: Callable[..., ModelProto]) -> None:
    assert "Sine" in [node.op_type for node in call(model()).graph.node]


#: Commands that run the model, without the option of the library.
RUNS = {
    "quantize": "quantize m.onnx -o o.onnx --data d.npz",
    "quantize by workers": "quantize m.onnx -o o.onnx --data d.npz --workers 2",
    "accuracy": "quantize m.onnx -o o.onnx --data d.npz --accuracy 5dB --budget 60s",
    "calibrate": "calibrate m.onnx -o r.json --data d.npz",
    "compare": "compare m.onnx q.onnx --data d.npz",
    "compare in time": "compare m.onnx q.onnx --data d.npz --time",
    "analyze": "analyze m.onnx q.onnx --data d.npz",
    "search": "search m.onnx --data d.npz --trials 1",
    "legalize": "npu legalize m.onnx -o o.onnx",
    "deploy": "npu deploy m.onnx -o bundle --data d.npz --preset A8W8 --min-sqnr 1",
}


def write_files(operator: str, domain: str) -> None:
    custom = model(operator, domain)
    onnx.save(custom, "m.onnx")
    onnx.save(quantize_weights(custom), "q.onnx")
    np.savez("d.npz", x=np.stack([sample["x"] for sample in DATA]))


@pytest.mark.parametrize("command", RUNS)
def test_what_needs_a_run_is_refused_with_the_way_out(
    command: str, cli: CommandLine, folder: Path
) -> None:
    """One error names the operator, its domain and the option."""
    write_files("my.own.Sine", "my.own")
    finished = cli(*RUNS[command].split())
    assert finished.code == 2
    assert "it lacks the operator my.own:Sine" in finished.error
    assert "--custom-op-library FILE" in finished.error
    assert not Path("o.onnx").exists()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> str:
    """A library whose domain is not known, so that it has to be given."""
    try:
        file = extensions.library()
    except ImportError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(extensions, "DOMAINS", frozenset[str]())
    # Random samples are for operators of any library but that one, which decodes images.
    module = sys.modules["quark_onnx.measuring.random_sample"]
    monkeypatch.setattr(module, "DOMAINS", frozenset[str]())
    return file


INVERSE = "ai.onnx.contrib.Inverse", "ai.onnx.contrib"


@pytest.mark.images
@pytest.mark.parametrize("isolation", [[], ["--no-isolation"]])
@pytest.mark.parametrize(
    "command",
    {
        **{name: words for name, words in RUNS.items() if name != "deploy"},
        "weights": "quantize m.onnx -o o.onnx --preset W8",
        "convert": "convert m.onnx -o o.onnx --to opset --opset 18",
        "cut": "npu cut m.onnx --at h -o a.onnx b.onnx",
    }.values(),
)
def test_every_command_that_runs_models_takes_the_library(
    command: str, isolation: list[str], library: str, cli: CommandLine, folder: Path
) -> None:
    """Also in isolated processes and in workers.

    ``npu deploy`` legalizes and quantizes; its rules ask for a batch of 1, which is no matrix.
    """
    write_files(*INVERSE)
    finished = cli(*command.split(), *isolation, "--custom-op-library", library)
    assert finished.code == 0, finished.err
    assert "neither loaded nor run" not in finished.out + finished.err
    assert "could be verified" not in finished.out + finished.err


@pytest.mark.images
def test_the_float_model_is_computed_by_the_library(library: str) -> None:
    custom = model(*INVERSE)
    with custom_op_libraries(library):
        [found] = open_session(custom).run(None, DATA[0])
    w, v = weight(64, 64), weight(64, 64, seed=1)
    expected = np.linalg.inv(DATA[0]["x"].astype(np.float64) @ w) @ v
    assert sqnr(expected, found) > 60
    assert current_libraries() == ()


class OtherProcess(Executor):
    """Runs tasks as another process does: with copies, and without context variables."""

    def submit(self, task: Any, /, *arguments: Any, **_: Any) -> Future[Any]:
        task, arguments = pickle.loads(pickle.dumps((task, arguments)))
        future = Future[Any]()
        future.set_result(Context().run(task, *arguments))
        return future


@pytest.mark.images
def test_processes_that_calibrate_know_the_library(library: str) -> None:
    custom = model(*INVERSE)
    with custom_op_libraries(library):
        serial = quantize(custom, DATA, "A8W8")
        sharded = quantize(custom, DATA, "A8W8", executor=OtherProcess())
    assert sharded.model == serial.model


def register_extensions(options: Any) -> None:
    """Register the library as an application does, on the options of its sessions."""
    options.register_custom_ops_library(extensions.library())


@pytest.mark.images
@pytest.mark.parametrize("isolate", [False, True])
def test_options_of_the_application_register_operators(
    isolate: bool, library: str
) -> None:
    """In this process, in an isolated one and in workers: the file is the same."""
    custom = model(*INVERSE)
    with pytest.raises(UnknownOperatorError):
        quantize(custom, DATA, "A8W8", isolate=isolate)
    with custom_op_libraries(library):
        expected = quantize(custom, DATA, "A8W8").model
    with custom_op_libraries(session_options=register_extensions):
        found = quantize(custom, DATA, "A8W8", isolate=isolate).model
        sharded = quantize(custom, DATA, "A8W8", executor=OtherProcess()).model
    assert found == sharded == expected
    assert current_libraries() == ()


def test_options_of_the_application_reach_every_session() -> None:
    seen = list[Any]()
    with custom_op_libraries(session_options=seen.append):
        quantize(in_onnx(model()), DATA, "A8W8")
    assert len(seen) > 2
    assert {type(options).__name__ for options in seen} == {"SessionOptions"}


def test_wrong_options_of_the_application_are_one_error() -> None:
    def fail(_: Any) -> None:
        raise OSError("no such device")

    for options, message in {
        onnxruntime.SessionOptions(): "session_options is .*; it must be a function of the",
        fail: "cannot be registered: .*no such device",
    }.items():
        with (
            pytest.raises(ConfigError, match=message),
            custom_op_libraries(session_options=options),  # type: ignore[arg-type]
        ):
            pass
    with (
        custom_op_libraries(session_options=lambda _: None),
        pytest.raises(QuarkError, match=r"lambda.*, which another process cannot"),
    ):
        quantize(in_onnx(model()), DATA, "A8W8", isolate=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "there is no file"), ("no library", "cannot be registered: .*lib.so")],
)
def test_a_wrong_library_is_one_error_before_any_work(
    text: str | None, message: str, cli: CommandLine, folder: Path
) -> None:
    if text is not None:
        Path("lib.so").write_text(text)
    with pytest.raises(ConfigError, match=message), custom_op_libraries("lib.so"):
        pass
    finished = cli("explain", "model.onnx", "--custom-op-library", "lib.so")
    assert finished.code == 2
    assert "lib.so" in finished.error


def test_the_error_is_a_model_error_of_its_own() -> None:
    with pytest.raises(UnknownOperatorError, match=r"my\.own:Sine"):
        quantize(model(), DATA, "A8W8")
