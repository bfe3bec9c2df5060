"""Initializers that are also inputs (IR version 4 and later): constants by default, inputs where a
user keeps them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

from calibrators.onnx_runtime.session import open_session
from quark_onnx import QConfig, npu, quantize
from quark_onnx.analysis import analyze, compare
from quark_onnx.api import plan_for
from quark_onnx.common.errors import ConfigError, DataError
from quark_onnx.plan import OVERRIDABLE, Quantize, Use
from quark_onnx.search.search import search
from tests.models import Feeds, normal, parse, weight

CONSTANTS: dict[str, NDArray[Any]] = {
    "k": weight(16, 16, 3, 3),
    "b": normal(16, scale=0.1),
    "w": weight(12, 256).T.copy(),
    "d": normal(12, scale=0.1),
}
NODES = """
    [conv] c = Conv <pads = [1,1,1,1]> (x, k, b)
    [relu] r = Relu (c)
    [pool] p = MaxPool <kernel_shape = [2,2], strides = [2,2]> (r)
    [flat] f = Flatten (p)
    [fc] y = Gemm (f, w, d)
"""
DATA: list[Feeds] = [{"x": normal(2, 16, 8, 8, seed=seed)} for seed in range(6)]


def model_of(kind: type[Any] = np.float32, *, inputs: bool = True) -> ModelProto:
    name = "float16" if kind is np.float16 else "float"
    model = parse(
        f"g ({name}[N,16,8,8] x) => ({name}[N,12] y) {{ {NODES} }}",
        **{name: array.astype(kind) for name, array in CONSTANTS.items()},
    )
    if inputs:
        model.graph.input.extend(
            helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            for tensor in model.graph.initializer
        )
    return model


def sqnr(reference: ModelProto, other: ModelProto, data: list[Feeds]) -> float:
    first, second = (
        np.concatenate(
            [open_session(model).run(None, feeds)[0] for feeds in data]
        ).astype(np.float64)
        for model in (reference, other)
    )
    return float(
        10
        * np.log10(
            np.square(first).sum() / max(float(np.square(second - first).sum()), 1e-30)
        )
    )


def names(model: ModelProto) -> list[str]:
    return [value.name for value in model.graph.input]


@pytest.mark.parametrize("kind", [np.float32, np.float16])
@pytest.mark.parametrize("preset", ["A8W8", "INT4", "W8", "DYNAMIC"])
def test_they_become_constants_that_the_report_names(
    preset: str, kind: type[Any]
) -> None:
    """No caller overrides a weight: by default an initializer is a constant, and the interface says
    so.
    """
    config = QConfig.of(preset)
    data = [{"x": feeds["x"].astype(kind)} for feeds in DATA]
    result = quantize(model_of(kind), data if config.measures else None, config)
    assert names(result.model) == ["x"]
    share = 0.4 if kind is np.float32 else 0.8  # of weights that have 16 bits already
    assert result.report.bytes_after < share * result.report.bytes_before
    note = (
        "inputs 'k', 'b', 'w' and 1 more are constants; keep_initializer_inputs keeps"
        " the interface"
    )
    assert note in result.report.notes
    assert sqnr(model_of(kind), result.model, data) > (15 if preset == "INT4" else 35)


@pytest.mark.parametrize("kind", [np.float32, np.float16])
@pytest.mark.parametrize(
    "preset", ["A8W8", "XINT8", "INT4", "W8", "DYNAMIC", "BF16", "BFP16"]
)
def test_they_stay_inputs_where_that_is_asked_for(preset: str, kind: type[Any]) -> None:
    """Then they stay float, with the reason, and the result follows what a caller feeds."""
    config = QConfig.of(preset).with_(keep_initializer_inputs=True)
    data = [{"x": feeds["x"].astype(kind)} for feeds in DATA]
    model = model_of(kind)
    result = quantize(model, data if config.measures else None, config)
    onnx.checker.check_model(result.model, full_check=True)
    assert names(result.model) == names(model)
    assert [value.type for value in result.model.graph.input] == [
        value.type for value in model.graph.input
    ]
    assert {
        name: result.report.kept_tensors[name] for name in CONSTANTS
    } == dict.fromkeys(CONSTANTS, OVERRIDABLE)
    assert not [note for note in result.report.notes if "constant" in note]
    fed = [{**feeds, "w": (-CONSTANTS["w"]).astype(kind)} for feeds in data]
    assert sqnr(model, result.model, fed) > 25 and sqnr(model, result.model, data) > 25


def test_a_model_of_which_nothing_is_quantized_keeps_its_inputs() -> None:
    model = model_of()
    result = quantize(model, None, QConfig.of("W8").with_(exclude="*"))
    assert names(result.model) == names(model)
    assert not [note for note in result.report.notes if "are constants" in note]


@pytest.mark.parametrize("keep", [False, True])
def test_a_sample_that_feeds_one_is_refused(keep: bool) -> None:
    """The calibrated model would differ from the written one."""
    data = [{**feeds, "w": CONSTANTS["w"]} for feeds in DATA]
    message = (
        "sample 0: 'w' is an initializer of the model, which is calibrated with the"
        " value stored there; leave it"
    )
    with pytest.raises(DataError, match=message):
        quantize(model_of(), data, QConfig(keep_initializer_inputs=keep))
    for judge in (compare, analyze):
        with pytest.raises(DataError, match=message):
            judge(model_of(), quantize(model_of(), DATA).model, data)


def test_everything_that_reads_a_float_model_sees_constants() -> None:
    model = model_of()
    result = quantize(model, DATA).model
    assert compare(model, result, DATA).sqnr > 30
    assert {each.name for each in analyze(model, result, DATA).weights} == set(
        CONSTANTS
    )
    plan = plan_for(model, "W8")
    assert isinstance(plan.entry(Use("w")), Quantize) and isinstance(
        plan.entry(Use("k")), Quantize
    )
    kept = plan_for(model, QConfig.of("W8").with_(keep_initializer_inputs=True))
    assert kept.entry(Use("w")).reason == OVERRIDABLE  # type: ignore[union-attr]
    found = search(
        model,
        DATA,
        space={"presets": ["A8W8", "INT4"], "optimizers": [], "calibrators": []},
    )
    assert all(candidate.score is not None for candidate in found.candidates)


@pytest.mark.parametrize("constant", ["input", "node"])
def test_a_product_with_a_weight_is_no_attention(constant: str) -> None:
    """A recipe is chosen by the weights, in whichever way the file stores them."""
    text = "g (float[1,8,16] x) => (float[1,8,16] y) { [fc] y = MatMul (x, w) }"
    model = parse(text, w=weight(16, 16))
    if constant == "input":
        model.graph.input.append(
            helper.make_tensor_value_info("w", TensorProto.FLOAT, [16, 16])
        )
    else:
        node = helper.make_node(
            "Constant", [], ["w"], value=numpy_helper.from_array(weight(16, 16))
        )
        model.graph.node.insert(0, node)
        del model.graph.initializer[:]
    assert (
        npu.choose(model).recipe.name
        == npu.choose(parse(text, w=weight(16, 16))).recipe.name
        == "classifier"
    )


def test_a_target_takes_no_such_inputs() -> None:
    message = (
        "keep_initializer_inputs is true, but the target npu takes no initializers as"
        " inputs"
    )
    with pytest.raises(ConfigError, match=message):
        QConfig.of("XINT8").with_(target="npu", keep_initializer_inputs=True)
    with pytest.raises(
        ConfigError, match="keep_initializer_inputs is 1; it must be true or false"
    ):
        QConfig(keep_initializer_inputs=1)  # type: ignore[arg-type]


def test_one_that_a_body_captures() -> None:
    """A branch reads a weight of the graph around it: a constant by default, the value of the
    caller otherwise.
    """
    model = parse(
        """g (float[N,16] x, bool c, float[16,16] w) => (float[N,16] y) {
            [if] y = If (c) <
                then_branch = t () => (float[N,16] a) { [inner1] m = MatMul (x, w) [inner2] a = Relu (m) },
                else_branch = e () => (float[N,16] b) { [inner3] b = MatMul (x, w) }>
        }""",  # noqa: E501
        w=weight(16, 16),
    )
    data: list[Feeds] = [
        {"x": normal(4, 16, seed=seed), "c": np.array(seed % 2 == 0)}
        for seed in range(6)
    ]
    result = quantize(model, data)
    assert result.report.operators["MatMul"] == (2, 2) and names(result.model) == [
        "x",
        "c",
    ]
    assert sqnr(model, result.model, data) > 30
    kept = quantize(model, data, QConfig(keep_initializer_inputs=True))
    fed = [{**feeds, "w": (-3 * weight(16, 16)).astype(np.float32)} for feeds in data]
    assert (
        names(kept.model) == names(model)
        and kept.report.kept_tensors["w"] == OVERRIDABLE
    )
    assert sqnr(model, kept.model, fed) > 30
