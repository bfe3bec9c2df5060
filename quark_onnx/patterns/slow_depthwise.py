"""Find depthwise convolutions for which onnxruntime has no fast kernel on the CPU.

The kernel of onnxruntime 1.32 for 8-bit depthwise convolutions reads a single zero point
(``qlinearconv.cc``). With different zero points per channel, onnxruntime multiplies matrices
channel by channel instead, which takes 20 to 60 times as long. Other convolutions and matrix
products are equally fast with either.
"""

from __future__ import annotations

from collections.abc import Mapping

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from quark_onnx.common.wording import counted
from quark_onnx.graph import Node, scopes_of
from quark_onnx.graph.codes import BYTES
from quark_onnx.patterns.depthwise import has_depthwise_kernel


def find_slow_depthwise(model: ModelProto) -> list[str]:
    """Return the names of 8-bit depthwise convolutions with different zero points per channel."""
    names = list[str]()
    for graph, constants in scopes_of(model):
        names += _slow_in(graph, constants)
    return names


def _slow_in(graph: GraphProto, constants: Mapping[str, TensorProto]) -> list[str]:
    """Return the names of slow depthwise convolutions in a graph, without its bodies."""
    dequantized = {
        node.output[0]: node
        for node in graph.node
        if node.op_type == "DequantizeLinear"
    }
    names = list[str]()
    for node in graph.node:
        weight, zero_point = _weight_of(node, dequantized, constants)
        has_fast_shape = _has_fast_shape(node, constants.get(weight))
        if has_fast_shape and _differs(constants.get(zero_point)):
            names.append(node.name or node.output[0])
    return names


def describe_slow_depthwise(model: ModelProto) -> str:
    """Return a remark on depthwise convolutions without a fast kernel; empty if there are none."""
    names = find_slow_depthwise(model)
    if not names:
        return ""
    return (
        f"{counted(len(names), 'depthwise convolution')} ({names[0]!r} the first) with"
        " different zero points per channel: onnxruntime has no fast kernel for them on"
        " the CPU; quantize weights symmetrically (preset U8U8, or symmetric: true)"
    )


def _weight_of(
    node: NodeProto,
    dequantized: Mapping[str, NodeProto],
    constants: Mapping[str, TensorProto],
) -> tuple[str, str]:
    """Return the names of the codes and zero points of a convolution with 8-bit activations.

    Both are empty for other nodes.

    Args:
        dequantized: DequantizeLinear nodes by the name of their result.
    """
    if node.op_type == "QLinearConv":
        return node.input[3], node.input[5]
    if node.op_type != "Conv":
        return "", ""
    activation = dequantized.get(node.input[0])
    weight = dequantized.get(node.input[1])
    if activation is None or weight is None:
        return "", ""
    # Without a zero point nothing differs per channel. The activation's one tells the type.
    if len(activation.input) < 3 or len(weight.input) < 3:
        return "", ""
    zero_point = constants.get(activation.input[2])
    if zero_point is None or zero_point.data_type not in BYTES:
        return "", ""
    return weight.input[0], weight.input[2]


def _has_fast_shape(node: NodeProto, weight: TensorProto | None) -> bool:
    """Return whether the depthwise kernel takes a convolution: 8-bit weights, one per channel."""
    if weight is None or weight.data_type not in BYTES:
        return False
    conv = Node(node)
    # the depthwise kernel computes a single output channel per group (qlinearconv.cc)
    has_one_output = weight.dims[:1] == [conv.attribute("group", 1)]
    return has_one_output and has_depthwise_kernel(conv, weight.dims)


def _differs(zero_point: TensorProto | None) -> bool:
    """Return whether the elements of a constant differ from each other."""
    # Values in another file are not loaded for a remark.
    if zero_point is None or zero_point.data_location == TensorProto.EXTERNAL:
        return False
    elements = numpy_helper.to_array(zero_point).ravel()
    return bool((elements != elements[:1]).any())
