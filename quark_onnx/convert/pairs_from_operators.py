"""qoperator-to-qdq: operators between Q/DQ pairs take the place of operators that compute on codes.

First the QLinear operators, whose definitions (ONNX, and onnxruntime's ContribOperators.md) say
where scales and zero points stand among the inputs; then what moves codes, such as a MaxPool
between two of them: as soon as its codes are written by a QuantizeLinear, their scale is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto

from quark_onnx.convert.base import Settings, conversion, counted, everywhere, reloaded
from quark_onnx.convert.pairs import constant
from quark_onnx.errors import AccuracyError
from quark_onnx.fusions.base import CONTRIB, attributes
from quark_onnx.fusions.moving import MOVING
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.node import softmax_axis
from quark_onnx.steps import Agreement


@dataclass(frozen=True)
class Form:
    """How an operator on codes is written.

    Attributes:
        op_type: what it computes, in floats.
        operands: where codes, scale and zero point of each operand stand.
        result: where scale and zero point of the result stand; none if it is float.
        bias: where a bias stands, -1 for nowhere; ``own_axis``: the axis of the second operand that
            may have scales of its own, from behind if it is negative.
        dropped: attributes that the operator in floats does not have.
    """

    op_type: str
    operands: tuple[tuple[int, int, int], ...]
    result: tuple[int, int] | None
    bias: int = -1
    own_axis: int = -1
    dropped: tuple[str, ...] = ()


_TWO = ((0, 1, 2), (3, 4, 5))
_ONE = ((0, 1, 2),)
FORMS: dict[str, Form] = {
    "QLinearConv": Form("Conv", _TWO, (6, 7), bias=8, own_axis=0),
    "QLinearMatMul": Form("MatMul", _TWO, (6, 7)),
    f"{CONTRIB}::QGemm": Form("Gemm", _TWO, (7, 8), bias=6),
    f"{CONTRIB}::MatMulIntegerToFloat": Form(
        "MatMul",
        ((0, 2, 4), (1, 3, 5)),
        None,
        bias=6,
    ),
    f"{CONTRIB}::QLinearAdd": Form("Add", _TWO, (6, 7)),
    f"{CONTRIB}::QLinearMul": Form("Mul", _TWO, (6, 7)),
    f"{CONTRIB}::QLinearSigmoid": Form("Sigmoid", _ONE, (3, 4)),
    f"{CONTRIB}::QLinearLeakyRelu": Form("LeakyRelu", _ONE, (3, 4)),
    f"{CONTRIB}::QLinearSoftmax": Form("Softmax", _ONE, (3, 4), dropped=("opset",)),
    f"{CONTRIB}::QLinearAveragePool": Form(
        "AveragePool",
        _ONE,
        (3, 4),
        dropped=("channels_last",),
    ),
    f"{CONTRIB}::QLinearGlobalAveragePool": Form(
        "GlobalAveragePool",
        _ONE,
        (3, 4),
        dropped=("channels_last",),
    ),
    f"{CONTRIB}::QLinearWhere": Form("Where", ((1, 2, 3), (4, 5, 6)), (7, 8)),
}
_CONCAT = f"{CONTRIB}::QLinearConcat"


@conversion("qoperator-to-qdq", keeps="but for rounding")
def qoperator_to_qdq(graph: Graph, settings: Settings) -> tuple[Graph, list[str]]:
    """Operators between Q/DQ pairs in place of QLinearConv, QLinearMatMul and their kin."""
    before = graph.copy()
    count = everywhere(graph, _rewrite)
    if not count:
        return graph, []
    graph = reloaded(graph)
    objection = Agreement(graph, settings.samples).objection(before)
    if objection:
        raise AccuracyError(
            f"qoperator-to-qdq: of the model that was converted, {objection}; nothing was written",
        )
    return graph, [
        f"{line} on codes became Q/DQ pairs" for line in counted(count, "operator")
    ]


def _rewrite(graph: Graph) -> int:
    done = sum(_linear(graph, node) for node in list(graph.nodes))
    if done:  # a Clip or a MaxPool of integers, without any of these, is what it says
        graph.to_model()  # which brings the nodes into order
        done += sum(_moving(graph, node) for node in list(graph.nodes))
    return done


def _linear(graph: Graph, node: Node) -> bool:
    """Write a QLinear operator in floats, between pairs."""
    form = _concat(node) if node.kind == _CONCAT else FORMS.get(node.kind)
    if (
        form is None
        or node.attribute("channels_last", 0)
        or not _known(graph, node, form)
    ):
        return False
    operands = [_read(graph, node, form, place) for place in range(len(form.operands))]
    inputs = [node.inputs[0], *operands] if form.op_type == "Where" else operands
    own = {
        name: value
        for name, value in attributes(node).items()
        if name not in form.dropped
    }
    bias = node.input(form.bias) if form.bias >= 0 else ""
    if bias and graph.elem_type(bias) == TensorProto.INT32:
        bias = _bias(graph, node, form, bias)
    added = bias if form.op_type == "MatMul" else ""
    inputs += [bias] if bias and not added else []
    graph.remove([node])
    result = node.outputs[0]
    steps = [("Add", added)] if added else []
    if form.result and node.input(form.result[0]):
        computed = graph.fresh(f"{result}_float")
        graph.add(
            "QuantizeLinear",
            [computed, *_present(node, *form.result)],
            [result],
            name=f"{node.name}_Q",
        )
        result = computed
    if steps:
        product = graph.fresh(f"{result}_product")
        graph.add("Add", [product, added], [result], name=f"{node.name}_bias")
        result = product
    graph.add(form.op_type, inputs, [result], **own).name = node.name
    return True


def _concat(node: Node) -> Form:
    operands = tuple(
        (place, place + 1, place + 2) for place in range(2, len(node.inputs), 3)
    )
    return Form("Concat", operands, (0, 1))


def _known(graph: Graph, node: Node, form: Form) -> bool:
    """Whether pairs can say the same: scales are constant, only the second operand has more than
    one.
    """
    for place, (_, scale, zero) in enumerate(form.operands):
        array = graph.constant(node.input(scale))
        if array is None or (
            node.input(zero) and not graph.is_constant(node.input(zero))
        ):
            return False
        if array.size > 1 and (place != 1 or array.ndim != 1):
            return False
    if form.op_type == "Softmax":
        shape = graph.shape(node.inputs[0])
        last = (
            shape is not None
            and softmax_axis(node, graph.opset) % len(shape) == len(shape) - 1
        )
        return last or (node.attribute("opset", 13) >= 13) == (graph.opset >= 13)
    return True


def _read(graph: Graph, node: Node, form: Form, place: int) -> str:
    """The DequantizeLinear of an operand."""
    codes, scale, zero = form.operands[place]
    array = graph.constant(node.input(scale))
    axis = {}
    if array is not None and array.size > 1:
        rank = len(graph.shape(node.input(codes)) or (0, 0))
        own = (
            (0 if node.attribute("transB", 0) else 1)
            if form.op_type == "Gemm"
            else form.own_axis
        )
        axis = {"axis": own % rank}
    return _dequantize(
        graph,
        [node.input(codes), *_present(node, scale, zero)],
        f"{node.name}_{place}",
        **axis,
    )


def _dequantize(graph: Graph, inputs: list[str], name: str, **axis: Any) -> str:
    result = graph.fresh(f"{inputs[0]}_float")
    graph.add("DequantizeLinear", inputs, [result], name=f"{name}_DQ", **axis)
    return result


def _bias(graph: Graph, node: Node, form: Form, bias: str) -> str:
    """The DequantizeLinear of a bias, which counts in products of the scales."""
    scales = [graph.constant(node.input(scale)) for _, scale, _ in form.operands]
    assert scales[0] is not None and scales[1] is not None
    scale = np.float32(node.attribute("alpha", 1.0)) * scales[0].reshape(()) * scales[1]
    scale = scale.reshape(()) if scale.size == 1 else scale
    name = graph.add_constant(f"{bias}_scale", scale.astype(np.float32))
    rank = len(graph.shape(bias) or (0,))
    return _dequantize(
        graph,
        [bias, name],
        f"{node.name}_bias",
        **({"axis": rank - 1} if scale.ndim else {}),
    )


def _present(node: Node, *places: int) -> list[str]:
    return [node.input(place) for place in places if node.input(place)]


def _moving(graph: Graph, node: Node) -> bool:
    """Write an operator that moves or limits codes in floats, between pairs of the scale that its
    codes have.
    """
    places = {"Concat": range(len(node.inputs)), "Where": (1, 2)}.get(node.kind, (0,))
    if node.kind not in MOVING and node.kind != "Clip":
        return False
    if (
        node.kind in ("Resize", "Upsample")
        and node.attribute("mode", "nearest") != "nearest"
    ):
        return False  # which rounds
    if (
        node.kind == "Pad"
        and node.attribute("mode", "constant") == "constant"
        and not node.input(2)
    ):
        return False  # with the code 0, whatever it stands for
    writers = [graph.producer(node.inputs[place]) for place in places]
    first = writers[0]
    if first is None or any(
        w is None or w.kind != "QuantizeLinear" or w.inputs[1:] != first.inputs[1:]
        for w in writers
    ):
        return False
    limits = [2] if node.kind == "Pad" else [1, 2] if node.kind == "Clip" else []
    bounds = [place for place in limits if node.input(place)]
    scale_and_zero = list(first.inputs[1:])
    values = {
        place: _decoded(graph, node.inputs[place], scale_and_zero) for place in bounds
    }
    if any(value is None for value in values.values()):
        return False
    for place in places:
        graph.set_input(
            node,
            place,
            _dequantize(
                graph,
                [node.inputs[place], *scale_and_zero],
                f"{node.name}_{place}",
            ),
        )
    for place, value in values.items():
        assert value is not None
        graph.set_input(node, place, value)
    for place, codes in enumerate(node.outputs):
        if codes and not (node.kind == "MaxPool" and place):
            computed = graph.fresh(f"{codes}_float")
            graph.set_output(node, place, computed)
            graph.add(
                "QuantizeLinear",
                [computed, *scale_and_zero],
                [codes],
                name=f"{node.name}_{place}_Q",
            )
    return True


def _decoded(graph: Graph, code: str, scale_and_zero: list[str]) -> str | None:
    """The constant that a code stands for; None if it is computed."""
    if not graph.is_constant(code):
        return None
    result = _dequantize(graph, [code, *scale_and_zero], code)
    node = graph.producer(result)
    assert node is not None
    array = constant(graph, node)
    assert array is not None
    graph.remove([node])
    return graph.set_constant(result, array)
