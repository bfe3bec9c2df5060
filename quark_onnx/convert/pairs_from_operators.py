"""qoperator-to-qdq: replace operators on codes by operators between Q/DQ pairs.

First the QLinear operators, whose definitions (ONNX, and onnxruntime's ContribOperators.md) give
the positions of scales and zero points; then operators that move codes, such as a MaxPool between
two of them: once a QuantizeLinear writes its codes, their scale is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto

from quark_onnx.common.errors import AccuracyError
from quark_onnx.convert.base import (
    ConversionSettings,
    conversion,
    counted,
    everywhere,
    reloaded,
)
from quark_onnx.convert.pairs import constant
from quark_onnx.fusions.base import CONTRIB
from quark_onnx.fusions.moving import MOVING, moved_inputs
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.node import softmax_axis
from quark_onnx.patterns.conv_and_gemm import output_axis
from quark_onnx.writing.fuse import Agreement


@dataclass(frozen=True)
class Form:
    """Layout of an operator on codes.

    Attributes:
        op_type: the float operator.
        operands: indices of codes, scale and zero point of each operand.
        result: indices of scale and zero point of the result; None for a float result.
        bias: index of the bias, -1 for none.
        own_axis: axis of the second operand with per-channel scales, from the end if negative.
        dropped: attributes that the float operator does not have.
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
        "MatMul", ((0, 2, 4), (1, 3, 5)), None, bias=6
    ),
    f"{CONTRIB}::QLinearAdd": Form("Add", _TWO, (6, 7)),
    f"{CONTRIB}::QLinearMul": Form("Mul", _TWO, (6, 7)),
    f"{CONTRIB}::QLinearSigmoid": Form("Sigmoid", _ONE, (3, 4)),
    f"{CONTRIB}::QLinearLeakyRelu": Form("LeakyRelu", _ONE, (3, 4)),
    f"{CONTRIB}::QLinearSoftmax": Form("Softmax", _ONE, (3, 4), dropped=("opset",)),
    f"{CONTRIB}::QLinearAveragePool": Form(
        "AveragePool", _ONE, (3, 4), dropped=("channels_last",)
    ),
    f"{CONTRIB}::QLinearGlobalAveragePool": Form(
        "GlobalAveragePool", _ONE, (3, 4), dropped=("channels_last",)
    ),
    f"{CONTRIB}::QLinearWhere": Form("Where", ((1, 2, 3), (4, 5, 6)), (7, 8)),
}
_CONCAT = f"{CONTRIB}::QLinearConcat"
#: Inputs that hold single values as codes: the padding, and the bounds.
_CODES = {"Pad": (2,), "Clip": (1, 2)}


@conversion("qoperator-to-qdq", keeps="but for rounding")
def qoperator_to_qdq(
    graph: Graph, settings: ConversionSettings
) -> tuple[Graph, list[str]]:
    """Replace QLinearConv, QLinearMatMul and similar ones by operators between Q/DQ pairs."""
    # ``everywhere`` changes the graph in place, and the result is compared with the original.
    before = graph.copy()
    count = everywhere(graph, _rewrite)
    if not count:
        return graph, []
    graph = reloaded(graph)
    # The original may round its results differently: it has kernels of its own.
    objection = Agreement(graph, settings.samples).objection(before)
    if objection:
        raise AccuracyError(
            f"qoperator-to-qdq: of the model that was converted, {objection}; nothing was written"
        )
    return graph, counted(count, "operator", "on codes became Q/DQ pairs")


def _rewrite(graph: Graph) -> int:
    """Replace the operators on codes of a graph in place; return their number.

    Bodies of If, Loop and Scan are left unchanged.
    """
    done = sum(_linear(graph, node) for node in list(graph.nodes))
    # Without QLinear operators, a Clip or a MaxPool of integers may mean integers.
    if done:
        graph.to_model()  # sorts the nodes
        done += sum(_moving(graph, node) for node in list(graph.nodes))
    return done


def _linear(graph: Graph, node: Node) -> bool:
    """Replace a QLinear operator by a float operator between pairs.

    Return False, and leave the graph unchanged, for other operators and where pairs would not be
    equivalent.
    """
    # The number of operands of a QLinearConcat differs from node to node.
    form = _concat(node) if node.kind == _CONCAT else FORMS.get(node.kind)
    if form is None or node.attribute("channels_last", 0):
        return False
    if not _has_equivalent_pairs(graph, node, form):
        return False
    # The condition of a Where is no operand with codes.
    inputs = [node.inputs[0]] if form.op_type == "Where" else []
    inputs += [_read(graph, node, form, index) for index in range(len(form.operands))]
    settings = node.attributes
    for name in form.dropped:
        settings.pop(name, None)
    bias = _float_bias(graph, node, form)
    result = node.outputs[0]
    graph.remove([node])
    # QGemm without parameters of a result computes float.
    if form.result and node.input(form.result[0]):
        result = _quantized(graph, node, form.result, result)
    if bias and form.op_type == "MatMul":
        # A MatMul has no bias: an Add follows.
        product = graph.fresh(f"{result}_product")
        graph.add("Add", [product, bias], [result], name=f"{node.name}_bias")
        result = product
    elif bias:
        inputs.append(bias)
    float_node = graph.add(form.op_type, inputs, [result], **settings)
    float_node.name = node.name
    return True


def _quantized(
    graph: Graph, node: Node, parameters: tuple[int, ...], codes: str
) -> str:
    """Add the QuantizeLinear of a result; return the float tensor that it reads.

    Args:
        node: the operator on codes, which may have been removed.
        parameters: indices of scale and zero point of the result among the node's inputs.
        codes: name of the result, which the QuantizeLinear computes.
    """
    computed = graph.fresh(f"{codes}_float")
    graph.add(
        "QuantizeLinear",
        [computed, *_present(node, *parameters)],
        [codes],
        name=f"{node.name}_Q",
    )
    return computed


def _concat(node: Node) -> Form:
    """Return the layout of a QLinearConcat.

    The inputs are scale and zero point of the result, and then codes, scale and zero point of each
    operand.
    """
    operands = tuple(
        (index, index + 1, index + 2) for index in range(2, len(node.inputs), 3)
    )
    return Form("Concat", operands, (0, 1))


def _has_equivalent_pairs(graph: Graph, node: Node, form: Form) -> bool:
    """Return whether a float operator between pairs computes the same as an operator on codes."""
    for index, (_, scale, zero) in enumerate(form.operands):
        array = graph.constant(node.input(scale))
        if array is None:
            return False
        if node.input(zero) and not graph.is_constant(node.input(zero)):
            return False
        # Only the second operand, the weight, may have per-channel scales.
        if array.size > 1 and (index != 1 or array.ndim != 1):
            return False
    return form.op_type != "Softmax" or _softmax_is_kept(graph, node)


def _softmax_is_kept(graph: Graph, node: Node) -> bool:
    """Return whether a Softmax of the graph's opset normalizes along the same axes.

    Before opset 13, it normalizes along the axis and all later ones together.

    Args:
        node: a QLinearSoftmax, whose attribute ``opset`` selects the definition.
    """
    shape = graph.shape(node.inputs[0])
    # Along the last axis both definitions agree.
    if shape and softmax_axis(node, graph.opset) in (-1, len(shape) - 1):
        return True
    return bool((node.attribute("opset", 13) >= 13) == (graph.opset >= 13))


def _read(graph: Graph, node: Node, form: Form, index: int) -> str:
    """Add the DequantizeLinear of an operand of ``form``; return the dequantized operand."""
    codes, scale, zero = form.operands[index]
    array = graph.constant(node.input(scale))
    axis = {}
    if array is not None and array.size > 1:
        # A weight of unknown shape counts as a matrix.
        rank = len(graph.shape(node.input(codes)) or (0, 0))
        channel_axis = form.own_axis
        if form.op_type == "Gemm":
            channel_axis = output_axis(node)
        axis = {"axis": channel_axis % rank}
    inputs = [node.input(codes), *_present(node, scale, zero)]
    return _dequantize(graph, inputs, f"{node.name}_{index}", **axis)


def _dequantize(graph: Graph, inputs: list[str], name: str, **axis: Any) -> str:
    """Add a DequantizeLinear of codes, scale and, if any, zero point; return its result."""
    result = f"{inputs[0]}_float"
    return graph.compute("DequantizeLinear", inputs, result, name=f"{name}_DQ", **axis)


def _float_bias(graph: Graph, node: Node, form: Form) -> str:
    """Return the float bias of an operator, or an empty name.

    The scale of an int32 bias is the product of the operands' scales.

    Args:
        graph: the graph, which gets a DequantizeLinear for an int32 bias.
        form: the layout of the operator's inputs; operators with an int32 bias have two operands.
    """
    bias = node.input(form.bias) if form.bias >= 0 else ""
    if not bias or graph.elem_type(bias) != TensorProto.INT32:
        return bias
    scales = [graph.known(node.input(scale)) for _, scale, _ in form.operands]
    # alpha of a QGemm multiplies the product, and so belongs to the scale of the bias.
    alpha = np.float32(node.attribute("alpha", 1.0))
    scale = alpha * scales[0].reshape(()) * scales[1]
    # The bias is a vector, or a row (1, N).
    axis = {"axis": len(graph.shape(bias) or (0,)) - 1}
    if scale.size == 1:
        scale = scale.reshape(())
        axis = {}
    name = graph.add_constant(f"{bias}_scale", scale.astype(np.float32))
    return _dequantize(graph, [bias, name], f"{node.name}_bias", **axis)


def _present(node: Node, *indices: int) -> list[str]:
    """Return the names of the inputs at some indices, without omitted inputs."""
    return [node.input(index) for index in indices if node.input(index)]


def _moving(graph: Graph, node: Node) -> bool:
    """Replace an operator that moves or clips codes by a float operator between pairs.

    The pairs have the scale of the codes. Nodes before this one have been replaced. Return False,
    and leave the graph unchanged, for other operators and without a common scale.
    """
    if not _moves_codes(node):
        return False
    indices = moved_inputs(node)
    # Nodes come in graph order: the QuantizeLinear of an earlier one gives the scale here.
    scale_and_zero = _common_scale(graph, node, indices)
    if scale_and_zero is None:
        return False
    codes = {
        index: node.inputs[index]
        for index in _CODES.get(node.kind, ())
        if node.input(index)
    }
    # Bounds are decoded here, and not at runtime.
    decoding = [*codes.values(), *scale_and_zero] if codes else []
    if not all(graph.is_constant(name) for name in decoding):
        return False
    values = {
        index: _decoded(graph, code, scale_and_zero) for index, code in codes.items()
    }
    for index in indices:
        inputs = [node.inputs[index], *scale_and_zero]
        name = f"{node.name}_{index}"
        graph.set_input(node, index, _dequantize(graph, inputs, name))
    for index, value in values.items():
        graph.set_input(node, index, value)
    # The second result of MaxPool holds indices.
    results = node.outputs[:1] if node.kind == "MaxPool" else node.outputs
    for index, result in enumerate(results):
        if result:
            computed = graph.fresh(f"{result}_float")
            graph.set_output(node, index, computed)
            inputs = [computed, *scale_and_zero]
            name = f"{node.name}_{index}_Q"
            graph.add("QuantizeLinear", inputs, [result], name=name)
    return True


def _moves_codes(node: Node) -> bool:
    """Return whether an operator moves or clips codes, without other arithmetic."""
    if node.kind not in MOVING and node.kind != "Clip":
        return False
    if node.kind in ("Resize", "Upsample"):
        return bool(node.attribute("mode", "nearest") == "nearest")
    if node.kind == "Pad" and node.attribute("mode", "constant") == "constant":
        # The default padding is the code 0, whose value may differ from 0.
        return bool(node.input(2))
    return True


def _common_scale(graph: Graph, node: Node, indices: Sequence[int]) -> list[str] | None:
    """Return the names of the scale and, if any, the zero point that the operands share.

    None if an operand is not quantized, or has another scale.
    """
    parameters = set[tuple[str, ...]]()
    for index in indices:
        writer = graph.producer_of_kind(node.inputs[index], {"QuantizeLinear"})
        if writer is None:
            return None
        parameters.add(writer.inputs[1:])
    # Names are compared: pairs that were just written share the names of their QLinear operators.
    return list(parameters.pop()) if len(parameters) == 1 else None


def _decoded(graph: Graph, code: str, scale_and_zero: list[str]) -> str:
    """Add the float constant of a constant code; return the name."""
    result = _dequantize(graph, [code, *scale_and_zero], code)
    node = graph.producer(result)
    assert node is not None
    array = constant(graph, node)
    assert array is not None
    # The node only served to read the constants in ONNX's layout.
    graph.remove([node])
    return graph.set_constant(result, array)
