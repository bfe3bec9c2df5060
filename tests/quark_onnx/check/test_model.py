"""Every path that takes a model checks it by ``check_model``, from a file and in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper

import quark_onnx
from calibrators.limits import VARIABLE
from quark_onnx import npu
from quark_onnx.analysis import measure_latency, quantize_to_accuracy
from quark_onnx.api import plan_for
from quark_onnx.common.errors import ModelError
from quark_onnx.files import io
from quark_onnx.files.io import load, open_model
from quark_onnx.targets import check
from tests.models import conv_relu, parse, samples

BODY = (
    "body = b (int64 i, bool k, float[2] v) => (bool a, float[2] w)"
    " { a = Identity (k) w = Relu (v) }"
)
FEEDS = [{"x": np.ones(2, np.float32)}]
#: Calls with a model that is given twice where a call takes a float and a quantized model.
CALLS: dict[str, Callable[[Any], object]] = {
    "quantize": lambda model: quark_onnx.quantize(model, FEEDS),
    "quantize_static": lambda model: quark_onnx.quantize_static(model, FEEDS),
    "quantize_dynamic": quark_onnx.quantize_dynamic,
    "quantize_weights": quark_onnx.quantize_weights,
    "calibrate": lambda model: quark_onnx.calibrate(model, FEEDS),
    "convert": lambda model: quark_onnx.convert(model, "float16"),
    "compare": lambda model: quark_onnx.compare(model, model, FEEDS),
    "analyze": lambda model: quark_onnx.analyze(model, model, FEEDS),
    "search": lambda model: quark_onnx.search(model, FEEDS),
    "to accuracy": lambda model: quantize_to_accuracy(model, FEEDS, "1%"),
    "latency": lambda model: measure_latency(model, model, FEEDS[0]),
    "plan": plan_for,
    "check": lambda model: check(model, "stx"),
    "choose": npu.choose,
    "cut": npu.cut,
    "deploy": lambda model: npu.deploy(model, FEEDS, "bundle"),
    "forecast": npu.deploy_forecast,
    "legalize": npu.legalize,
    "preflight": npu.preflight,
    "simulate": lambda model: npu.simulate(model, FEEDS[0]),
}


def endless() -> ModelProto:
    return parse(f"g (float[2] x) => (float[2] y) {{ y = Loop <{BODY}> ( , , x) }}")


@pytest.mark.parametrize("call", CALLS)
def test_every_call_checks_its_model(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An endless Loop is what no other step finds before it runs the model."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"node 'y' \(Loop\) never ends"):
        CALLS[call](endless())
    onnx.save(endless(), "m.onnx")
    with pytest.raises(
        ModelError, match=r"model file m\.onnx: node 'y' \(Loop\) never ends"
    ):
        CALLS[call]("m.onnx")


@pytest.mark.parametrize("call", ["quantize", "calibrate", "convert", "preflight"])
def test_a_model_is_checked_once(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = list[object]()
    original = io.check_model

    def counting(model: ModelProto, *arguments: Any) -> object:
        checked.append(model)
        return original(model, *arguments)

    monkeypatch.setattr(io, "check_model", counting)
    model = conv_relu()
    data = samples(model, count=2)
    calls: dict[str, Callable[[], object]] = {
        "quantize": lambda: quark_onnx.quantize(model, data, "A8W8"),
        "calibrate": lambda: quark_onnx.calibrate(model, data),
        "convert": lambda: quark_onnx.convert(model, "float16"),
        "preflight": lambda: npu.preflight(model),
    }
    calls[call]()
    assert checked == [model]


def test_external_tensors_are_read_between_the_checks(tmp_path: Path) -> None:
    """The size of a constant in another file decides a shape."""
    model = parse(
        "g (float[N, 4] x) => (float[N, 4] y) { m = ConstantOfShape (n) y = Add (x, m) }",
        n=np.int64([2**30, 4]),
    )
    onnx.save(
        model,
        tmp_path / "m.onnx",
        save_as_external_data=True,
        location="m.data",
        size_threshold=0,
        convert_attribute=True,
    )
    with pytest.raises(ModelError, match=rf"m\.onnx: tensor 'm' .* set {VARIABLE}="):
        load(tmp_path / "m.onnx")


def test_a_model_in_memory_has_no_external_tensors() -> None:
    model = conv_relu()
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="w.data")
    with pytest.raises(ModelError, match=r"they lie in \['w.data'\]; pass its path"):
        load(model)


def test_declared_shapes_are_corrected_in_a_copy(tmp_path: Path) -> None:
    model = parse("g (float[2, 3] x) => (float[2, 3] y) { y = Relu (x) }")
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", 1, [3, 2]))
    before = model.SerializeToString()
    opened = open_model(model)
    assert model.SerializeToString() == before
    assert opened.notes == [
        "output 'y' is declared with the shape [3, 2], and its operators give it [2, 3]:"
        " corrected"
    ]
    onnx.save(model, tmp_path / "m.onnx")
    assert open_model(tmp_path / "m.onnx") == opened
