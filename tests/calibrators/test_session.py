"""Sessions on models of any origin and size."""

from __future__ import annotations

import inspect
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime import InferenceSession

from calibrators.onnx_runtime import session, tensors
from calibrators.onnx_runtime.session import open_session, run_uncopied
from calibrators.onnx_runtime.worker import native_session


def doubling() -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[n] x) => (float[n] y) { y = Mul (x, w) }'
    )
    model.graph.initializer.append(
        onnx.numpy_helper.from_array(np.full(3, 2, np.float32), "w")
    )
    return model


def run(opened: object) -> list[float]:
    (y,) = opened.run(None, {"x": np.float32([1, 2, 3])})  # type: ignore[attr-defined]
    return y.tolist()  # type: ignore[no-any-return]


def test_a_model_its_bytes_or_a_file(tmp_path: Path) -> None:
    model, path = doubling(), tmp_path / "модель.onnx"
    onnx.save(model, path)
    for source in (model, model.SerializeToString(), path):
        assert run(open_session(source)) == [2, 4, 6]


@pytest.mark.parametrize("optimize", [True, False])
@pytest.mark.parametrize("threads", [0, 1, 3])
def test_options(threads: int, optimize: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without the one thread that sessions of tests have.
    monkeypatch.setattr(
        InferenceSession, "__init__", inspect.unwrap(InferenceSession.__init__)
    )
    opened = open_session(doubling(), threads=threads, optimize=optimize)
    assert run(opened) == [2, 4, 6]
    assert opened.get_providers() == ["CPUExecutionProvider"]
    assert opened.get_session_options().intra_op_num_threads == threads


@pytest.mark.parametrize("integers", [None, False, True])
def test_threads_rest_after_a_run(integers: bool | None) -> None:
    opened = open_session(doubling(), integers=integers)
    assert run(opened) == [2, 4, 6]
    options = opened.get_session_options()
    assert options.get_session_config_entry("session.force_spinning_stop") == "1"


def test_a_file_with_external_data(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save_model(
        doubling(),
        path,
        save_as_external_data=True,
        location="m.data",
        size_threshold=0,
    )
    assert run(open_session(path)) == [2, 4, 6]


def test_a_model_above_the_limit_goes_through_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(session, "PROTOBUF_LIMIT", 1)
    monkeypatch.setattr(tensors, "SMALL_TENSOR", 1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path)
    Path("temporary").mkdir()
    Path("model.onnx.data").touch()  # of the user, and in the way of nothing
    model = doubling()
    before = model.SerializeToString(deterministic=True)
    assert run(open_session(model)) == [2, 4, 6]
    assert model.SerializeToString(deterministic=True) == before
    assert not list(Path("temporary").iterdir())


@pytest.mark.images
def test_operators_of_onnxruntime_extensions() -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17, "ai.onnx.contrib": 1]>
    g (string[n] x) => (string[n] y) { y = ai.onnx.contrib.StringUpper (x) }""")
    for source in (model, model.SerializeToString()):
        (y,) = open_session(source).run(None, {"x": np.array(["a", "b"], object)})
        assert y.tolist() == ["A", "B"]


def test_an_operator_nobody_knows() -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17, "some.domain": 1]>
    g (float[n] x) => (float[n] y) { y = some.domain.Magic (x) }""")
    with pytest.raises(Exception, match="Magic"):
        open_session(model)


def test_onnxruntime_does_not_print(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr("onnxruntime.InferenceSession._create_inference_session", fail)
    with pytest.raises(RuntimeError, match="no luck"):
        open_session(doubling())
    assert capsys.readouterr().out == ""  # where it announces what it falls back to


@pytest.mark.parametrize(
    "x",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.arange(6, dtype=np.float32).reshape(3, 2).T,
        np.zeros((0, 3), np.float32),
        np.array(3, np.float32),
    ],
    ids=["rows", "transposed", "empty", "scalar"],
)
def test_outputs_without_copies_are_those_of_run(x: np.ndarray) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float x) => (float y, int64 s, bool b) '
        "{ y = Add (x, x) s = Shape (x) b = Greater (y, x) }"
    )
    del model.graph.input[0].type.tensor_type.shape.dim[:]
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.ClearField("shape")
    opened = open_session(model)
    names = ["s", "y", "b"]
    found = run_uncopied(opened, names, {"x": x})
    del opened  # the arrays outlive the session
    for value, expected in zip(
        found, open_session(model).run(names, {"x": x}), strict=True
    ):
        assert value.dtype == expected.dtype and value.shape == expected.shape
        assert np.array_equal(value, expected)


def test_outputs_without_copies_of_text() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> '
        "g (string[n] x) => (string[n] y) { y = Identity (x) }"
    )
    (y,) = run_uncopied(open_session(model), ["y"], {"x": np.array(["a", "b"], object)})
    assert y.tolist() == ["a", "b"]


def test_outputs_without_copies_need_every_input() -> None:
    with pytest.raises(ValueError, match=r"Required inputs .*x.* are missing"):
        run_uncopied(open_session(doubling()), ["y"], {})


@pytest.mark.parametrize("where", ["memory", "file"])
def test_inputs_of_a_caller_stay_as_they_are(where: str, tmp_path: Path) -> None:
    """Also where onnxruntime computes a running mean in the memory of the mean that it is given."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 15]>
        g (float[2, 3, 4] x, float[3] s, float[3] b, float[3] m, float[3] v) => (float[2, 3, 4] y) {
            y, mean, var = BatchNormalization <training_mode = 1> (x, s, b, m, v)
        }"""
    )
    source: onnx.ModelProto | Path = model
    if where == "file":
        source = tmp_path / "model.onnx"
        onnx.save(model, source)
    random = np.random.default_rng(0)
    feeds = {
        value.name: random.uniform(
            1, 2, [size.dim_value for size in value.type.tensor_type.shape.dim]
        ).astype(np.float32)
        for value in model.graph.input
    }
    before = {name: value.copy() for name, value in feeds.items()}
    opened = open_session(source)
    for compute in (opened.run, lambda *rest: run_uncopied(opened, *rest)):
        first, second = (compute(["y"], feeds)[0] for _ in range(2))
        np.testing.assert_array_equal(first, second)
        assert all((feeds[name] == before[name]).all() for name in feeds)


def test_lanes_wait_for_the_first_run_of_a_session_that_may_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the first run decides which session runs, a second lane has no error of its own."""
    expected = run(open_session(doubling()))
    opened = list[object]()

    class Failing:
        def run(self, *_: object) -> None:
            time.sleep(0.2)  # until the second lane runs, or waits
            raise RuntimeError("the zero point has a wrong shape")

    def open_native(*arguments: Any) -> Any:
        opened.append(native_session(*arguments) if opened else Failing())
        return opened[-1]

    monkeypatch.setattr(session, "saturates", lambda: True)
    monkeypatch.setattr(session, "native_session", open_native)
    unsaturated = open_session(doubling())
    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(run, unsaturated) for _ in range(2)]
        assert [result.result() for result in results] == [expected] * 2
    assert len(opened) == 2
