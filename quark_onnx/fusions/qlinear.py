"""Write layers between Q/DQ pairs as QLinearConv, QLinearMatMul and QGemm.

Layers with a float result become MatMulIntegerToFloat or QGemm. Types that the CPU kernels of
onnxruntime 1.31 support, each combination tried:

    x      weight         result   operators
    uint8  uint8 or int8  uint8    QLinearConv, QLinearMatMul, QGemm
    int8   int8           int8     QLinearConv, QLinearMatMul, QGemm
    uint8  uint8 or int8  float    MatMulIntegerToFloat, QGemm
    int8   int8           float    MatMulIntegerToFloat, QGemm

Scales may be per channel for the weight of a QLinearConv (output channels), and for a matrix on the
right of the others (columns), not for a stack of matrices; on the left they must be per tensor.
There is no kernel for a ConvTranspose on codes, nor for a float bias next to codes. On x86
processors int8 activations are multiplied without vector instructions, several times slower than
float ones; uint8 ones are faster than float.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from quark_onnx.fusions.base import (
    Codes,
    code_type,
    codes_of,
    grid,
    one_scale,
    operand_inputs,
    read_bytes,
    stored_codes,
    value,
    write,
    written_bytes,
    zero_points,
)
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.codes import dequantized
from quark_onnx.graph.matching import only_use, other_input
from quark_onnx.patterns.conv_and_gemm import output_axis, unscaled

#: First version of the standard operator set that has QLinearConv and QLinearMatMul.
_QLINEAR_OPSET = 10


def qlinear_conv(graph: Graph, node: Node) -> bool:
    """Replace Conv with a quantized result and a bias in products of the scales."""
    product = _quantized_product(graph, node, axis=0)
    if product is None:
        return False
    x, w, y = product
    bias = _bias(graph, node, x, w)
    if bias is None:
        return False
    inputs = [*operand_inputs(graph, x, w), *grid(graph, y), *bias]
    return write(graph, node, "QLinearConv", inputs, y, "", **node.attributes)


def qlinear_matmul(graph: Graph, node: Node) -> bool:
    """Replace MatMul with a quantized result."""
    product = _quantized_product(graph, node, axis=1)
    if product is None:
        return False
    a, b, y = product
    inputs = [*operand_inputs(graph, a, b), *grid(graph, y)]
    return write(graph, node, "QLinearMatMul", inputs, y, "")


def matmul_to_float(graph: Graph, node: Node) -> bool:
    """Replace MatMul with a float result, and the bias added to it."""
    operands = _operands(graph, node, axis=1)
    if operands is None:
        return False
    a, b = operands
    a_scale, a_zero = grid(graph, a)
    b_scale, b_zero = grid(graph, b)
    inputs = [a.codes, b.codes, a_scale, b_scale, a_zero, b_zero]
    result = node.outputs[0]
    added = only_use(graph, result, "Add")
    vector = "" if added is None else _vector(graph, other_input(added, result), b)
    # The operator adds a float bias itself, so that the Add goes.
    if added is not None and vector:
        inputs.append(vector)
        result = added.outputs[0]
        graph.remove([added])
    return write(graph, node, "MatMulIntegerToFloat", inputs, result)


def qgemm(graph: Graph, node: Node) -> bool:
    """Replace Gemm with a quantized or float result, and a bias in products of the scales."""
    operands = _operands(graph, node, output_axis(node))
    if operands is None:
        return False
    a, b = operands
    y = written_bytes(graph, node.outputs[0])
    bias = _bias(graph, node, a, b)
    if bias is None:
        return False
    # alpha and beta would scale the codes of the bias, whose scale is the product of the others.
    if bias and not unscaled(node):
        return False
    inputs = [*operand_inputs(graph, a, b), *(bias or [""])]
    settings = node.attributes
    settings.pop("beta", None)  # QGemm has no beta
    if y is None:
        return write(graph, node, "QGemm", inputs, node.outputs[0], **settings)
    if code_type(graph, y) != code_type(graph, a):
        return False
    return write(graph, node, "QGemm", [*inputs, *grid(graph, y)], y, **settings)


def _operands(graph: Graph, node: Node, axis: int) -> tuple[Codes, Codes] | None:
    """Return the codes of the two operands of a product; None if no kernel multiplies them.

    ``axis``: the weight's axis that may have per-channel scales.
    """
    x = read_bytes(graph, node.inputs[0])
    w = read_bytes(graph, node.inputs[1])
    if x is None or w is None or not one_scale(graph, x):
        return None
    # onnxruntime has kernels for unsigned activations by any weight, and signed by signed.
    is_unsigned = code_type(graph, x) == TensorProto.UINT8
    if not is_unsigned and code_type(graph, w) != TensorProto.INT8:
        return None
    if not one_scale(graph, w) and not _is_by_channel(graph, w, axis):
        return None
    return x, w


def _is_by_channel(graph: Graph, w: Codes, axis: int) -> bool:
    """Return whether scales lie along an axis of a kernel, or of a matrix."""
    rank = len(graph.sizes(w.codes))
    # A stack of matrices has no scales per column.
    is_supported = rank == 2 or (rank > 2 and axis == 0)
    return is_supported and w.axis % rank == axis


def _quantized_product(
    graph: Graph, node: Node, axis: int
) -> tuple[Codes, Codes, Codes] | None:
    """Return the codes of both operands and of the result of QLinearConv or QLinearMatMul."""
    if graph.opset < _QLINEAR_OPSET:
        return None
    operands = _operands(graph, node, axis)
    y = written_bytes(graph, node.outputs[0])
    if operands is None or y is None:
        return None
    x, w = operands
    return (x, w, y) if code_type(graph, y) == code_type(graph, x) else None


def _bias(graph: Graph, node: Node, x: Codes, w: Codes) -> list[str] | None:
    """Return the codes of the bias, in products of the scales; empty without a bias.

    None for another bias, such as a float one, for which there is no kernel.
    """
    if not node.input(2):
        return []
    bias = codes_of(graph, node.input(2))
    if bias is None or not graph.is_constant(bias.scale):
        return None
    if graph.elem_type(bias.codes) != TensorProto.INT32:
        return None
    product = value(graph, x.scale).reshape(()) * value(graph, w.scale)
    scale = value(graph, bias.scale)
    if scale.size not in (1, product.size):
        return None
    # tools compute the product in float32 or float64
    if not np.allclose(scale.reshape(-1), product.reshape(-1), rtol=1e-5, atol=0):
        return None
    return None if zero_points(graph, bias).any() else [bias.codes]


def _vector(graph: Graph, tensor: str, w: Codes) -> str:
    """Return a float constant with a value per column of a weight; empty for another tensor.

    A constant in codes, such as the bias of a Gemm that onnxruntime makes, becomes float.
    """
    codes = stored_codes(graph, tensor)
    source = tensor if codes is None else codes.codes
    columns = graph.sizes(w.codes)[1:]
    if len(columns) != 1 or graph.sizes(source) != columns:
        return ""
    if codes is None:
        return tensor if graph.is_constant(tensor) else ""
    if not all(graph.is_constant(name) for name in codes.node.inputs if name):
        return ""
    values = [value(graph, name) for name in codes.node.inputs if name]
    return graph.add_constant(f"{tensor}_float", dequantized(codes.node, values))
