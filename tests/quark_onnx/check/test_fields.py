"""Every field of a model that code trusts is checked once, when the model is read: what is wrong is
a ModelError.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, SparseTensorProto, TensorProto, helper, numpy_helper

from quark_onnx import quantize
from quark_onnx.api import plan_for
from quark_onnx.check.fields import check_fields, check_tensor
from quark_onnx.cli import main
from quark_onnx.common.errors import ModelError
from quark_onnx.files.io import load
from tests.cases import loop_over
from tests.models import MODELS, parse, residual, weight

Change = Callable[[ModelProto], None]


def tensor(**fields: object) -> Change:
    def change(model: ModelProto) -> None:
        for name, value in fields.items():
            target = model.graph.initializer[0]
            if name == "dims":
                target.dims[:] = value  # type: ignore[call-overload]
            else:
                setattr(target, name, value)

    return change


def as_floats(count: int) -> Change:
    def change(model: ModelProto) -> None:
        model.graph.initializer[0].ClearField("raw_data")
        model.graph.initializer[0].float_data.extend([0.0] * count)

    return change


def opset(*entries: tuple[str, int]) -> Change:
    def change(model: ModelProto) -> None:
        del model.opset_import[:]
        model.opset_import.extend(helper.make_opsetid(*entry) for entry in entries)

    return change


def attribute(place: int, name: str, value: object) -> Change:
    def change(model: ModelProto) -> None:
        node = model.graph.node[place]
        kept = [each for each in node.attribute if each.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(name, value)])

    return change


def cast_to(value: object) -> Change:
    def change(model: ModelProto) -> None:
        node = model.graph.node[1]
        node.op_type = "Cast"
        node.attribute.append(helper.make_attribute("to", value))

    return change


def cast_without(model: ModelProto) -> None:
    model.graph.node[1].op_type = "Cast"


def arguments(place: int, *inputs: str) -> Change:
    def change(model: ModelProto) -> None:
        node = model.graph.node[place]
        del node.input[:]
        node.input.extend(inputs)

    return change


def without_value(model: ModelProto) -> None:
    attribute = model.graph.node[0].attribute.add()
    attribute.name, attribute.type = "foo", attribute.GRAPH


def no_operator(model: ModelProto) -> None:
    model.graph.node[0].op_type = ""


def sparse(dims: list[int], values: int, indices: list[int]) -> Change:
    def change(model: ModelProto) -> None:
        model.graph.sparse_initializer.append(
            SparseTensorProto(
                dims=dims,
                values=numpy_helper.from_array(np.ones(values, np.float32), "s"),
                indices=numpy_helper.from_array(np.zeros(indices, np.int64), "i"),
            )
        )

    return change


def in_a_body(model: ModelProto) -> None:
    """The same rule holds for what stands in a body."""
    broken = numpy_helper.from_array(np.ones(3, np.float32), "inside")
    broken.raw_data = broken.raw_data[:-1]
    body = helper.make_graph([], "body", [], [], [broken])
    model.graph.node.append(
        helper.make_node("If", ["x"], ["if_y"], then_branch=body, else_branch=body)
    )


def in_a_function(model: ModelProto) -> None:
    nodes = [helper.make_node("Cast", ["a"], ["b"], to=[1])]
    model.functions.append(
        helper.make_function(
            "own", "F", ["a"], ["b"], nodes, [helper.make_opsetid("", 17)]
        )
    )


CASES: dict[str, tuple[Change, str]] = {
    "dims that do not match raw_data": (
        tensor(dims=[4, 4, 3, 2]),
        r"'w1' .* has 576 bytes; it needs 384",
    ),
    "raw_data that is cut off": (
        tensor(raw_data=b"123"),
        r"'w1' .* has 3 bytes; it needs 576",
    ),
    "no values at all": (
        as_floats(0),
        r"'w1' .* has 0 entries in float_data; it needs 144",
    ),
    "too many values": (
        as_floats(145),
        r"'w1' .* has 145 entries in float_data; it needs 144",
    ),
    "a negative size": (
        tensor(dims=[-1, 4]),
        r"'w1' has the impossible shape \[-1, 4\]",
    ),
    "more elements than 64 bits count": (
        tensor(dims=[2**40, 2**40]),
        "impossible shape",
    ),
    "a type that nobody knows": (
        tensor(data_type=99),
        "'w1' has the unknown element type 99",
    ),
    "a type of another width": (
        tensor(data_type=TensorProto.DOUBLE),
        r"it needs 1,152",
    ),
    "strings as bytes": (
        tensor(data_type=TensorProto.STRING),
        "'w1' holds strings as raw bytes",
    ),
    "an opset of 2**31": (
        opset(("", 2**31)),
        "imports operator set '' in the impossible version 2147483648",
    ),
    "an opset of 0": (opset(("", 0)), "the impossible version 0"),
    "an opset below 0": (opset(("", -5)), "the impossible version -5"),
    "another domain of 2**40": (
        opset(("", 17), ("my.own", 2**40)),
        "'my.own' in the impossible version",
    ),
    "one domain, two spellings": (
        opset(("", 17), ("ai.onnx", 13)),
        "'ai.onnx', which are one, in two versions, 17",
    ),
    "one domain twice": (
        opset(("", 17), ("a", 1), ("a", 2)),
        "operator set 'a' in two versions, 1 and 2",
    ),
    "a weight of rank 0": (
        lambda m: m.graph.initializer[0].CopyFrom(SCALAR),
        "'conv1' .* input 'w1' has the rank 0",
    ),
    "a Cast to a list": (
        cast_to([1]),
        "'relu1' .Cast.: attribute 'to' is of type INTS; it must be INT",
    ),
    "a Cast to a text": (cast_to("float"), "is of type STRING; it must be INT"),
    "a Cast to nowhere": (cast_without, "'relu1' .Cast. lacks the attribute 'to'"),
    "pads of another type": (
        attribute(0, "pads", 1.5),
        "attribute 'pads' is of type FLOAT; it must be INTS",
    ),
    "too many inputs": (
        arguments(1, "a", "a", "a"),
        "has 3 inputs; it takes 1 at most",
    ),
    "too few inputs": (arguments(3, "c"), r"has inputs \['c'\]; it needs \['A', 'B'\]"),
    "an attribute without its value": (
        without_value,
        "attribute 'foo' has the type GRAPH and no such value",
    ),
    "no operator": (no_operator, "names no operator"),
    "a sparse tensor": (
        sparse([4, 4], 2, [3]),
        r"values of shape \[2\] and indices of shape \[3\] make no sparse",
    ),
    "a body": (in_a_body, r"'inside' .* has 11 bytes; it needs 12"),
    "a function": (in_a_function, "attribute 'to' is of type INTS"),
}
SCALAR = numpy_helper.from_array(np.float32(1), "w1")


@pytest.mark.parametrize("case", CASES)
def test_what_a_field_may_not_hold(
    case: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    one_process: Context,
) -> None:
    """Protobuf leaves open what a field holds.

    What code relies on is checked when a model is read, whatever from.
    """
    change, message = CASES[case]
    model = residual()
    change(model)
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    for call in (
        lambda: load(path),
        lambda: plan_for(model),
        lambda: quantize(model, None, "W8"),
    ):
        with pytest.raises(ModelError, match=message):
            call()
    for command in (["explain"], ["npu", "check"], ["npu", "preflight"]):
        assert one_process.copy().run(main, [*command, str(path)]) == 2
        assert "internal error" not in capsys.readouterr().err


@loop_over("name", tuple(MODELS))
def test_sound_models_pass(name: str) -> None:
    check_fields(MODELS[name]())


@loop_over("elem_type", [*range(1, 24)])
@loop_over("shape", [(), (0, 3), (3,), (3, 5)])
def test_tensors_as_onnx_writes_them_pass(
    elem_type: int, shape: tuple[int, ...]
) -> None:
    """The oracle is onnx itself: each type, in raw bytes and in the field of the type."""
    count = int(np.prod(shape))
    value = "a" if elem_type == TensorProto.STRING else 1
    typed = helper.make_tensor("t", elem_type, shape, [value] * count)
    check_tensor(typed)
    if elem_type != TensorProto.STRING:
        check_tensor(numpy_helper.from_array(numpy_helper.to_array(typed), "t"))


def test_the_two_spellings_of_the_standard_domain_may_agree() -> None:
    """As onnxruntime takes it; a model that imports both in one version is sound."""
    model = parse(
        "g (float[N,4] x) => (float[N,4] y) { y = MatMul (x, w) }", w=weight(4, 4)
    )
    model.opset_import.append(helper.make_opsetid("ai.onnx", 17))
    check_fields(model)
    assert quantize(model, None, "W8").report.quantized == 1


#: Attributes of standard operators that onnx's shape inference reads as numbers of dimensions.
BEYOND = {
    f"{call} = {value}>": rf"attribute '{call.split(' <')[1]}' is {value}; it must be from"
    for call in (
        "Softmax <axis",
        "GatherND <batch_dims",
        "Gather <axis",
        "Concat <axis",
    )
    for value in (
        -(2**63),
        -(2**31) - 1,
        -(2**31),
        -65,
        65,
        2**31 - 1,
        2**31,
        2**63 - 1,
    )
} | {
    "GatherND <batch_dims = -1>": "attribute 'batch_dims' is -1; it must be from 0 to 64",
    f"Transpose <perm = [0, {2**31}]>": f"attribute 'perm' is {2**31}",
    f"ReduceMean <axes = [{-(2**31)}]>": f"attribute 'axes' is {-(2**31)}",
}


@loop_over("call", tuple(BEYOND))
def test_axes_that_no_tensor_has(call: str) -> None:
    """A number of dimensions or an axis lies within the ranks that tensors have.

    It is checked before native code reads it: at some of these values onnx's inference crashes.
    """
    operands = "h, places" if call.startswith("Gather") else "h"
    model = parse(
        f"g (float[N,4] x) => (float y) {{ h = Relu (x) y = {call} ({operands}) }}",
        places=np.int64([[0]]),
    )
    with pytest.raises(ModelError, match=BEYOND[call]):
        check_fields(model)


AXES = {
    "Softmax <axis = 7>": "names axis 7",
    "Softmax <axis = -3>": "names axis -3",
    "Flatten <axis = 3>": "names axis 3",
    "Transpose <perm = [0, 2]>": r"has the permutation \[0, 2\]",
    "Transpose <perm = [0]>": r"has the permutation \[0\]",
    "ReduceMean <axes = [5]>": "names axis 5",
}


@pytest.mark.parametrize("call", AXES)
def test_axes_that_are_none(call: str, tmp_path: Path) -> None:
    """A node names axes of a tensor; rules index shapes by them."""
    model = parse(f"g (float[N,4] x) => (float y) {{ h = Relu (x) y = {call} (h) }}")
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=f"{AXES[call]}; 'h' has the rank 2"):
        load(tmp_path / "m.onnx")


@pytest.mark.parametrize(
    "call", ["Softmax <axis = -2>", "Flatten <axis = 2>", "Transpose <perm = [1, 0]>"]
)
def test_axes_that_are_there(call: str, tmp_path: Path) -> None:
    model = parse(f"g (float[N,4] x) => (float y) {{ h = Relu (x) y = {call} (h) }}")
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    load(tmp_path / "m.onnx")
