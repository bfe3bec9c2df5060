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

from quark_onnx.containers import present
from quark_onnx.fusions.base import (
    Codes,
    attributes,
    code_type,
    codes_of,
    grid,
    one_scale,
    read_bytes,
    value,
    write,
    written_bytes,
    zero_points,
)
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.matching import only_use, other_input
from quark_onnx.patterns.conv_and_gemm import output_axis, unscaled

#: First version of the standard operator set that has QLinearConv and QLinearMatMul.
_QLINEAR_OPSET = 10


def qlinear_conv(graph: Graph, node: Node) -> bool:
    """Replace Conv with a quantized result and a bias in products of the scales."""
    tensors = _quantized_product(graph, node, axis=0)
    if not tensors:
        return False
    x, w, y = tensors
    bias = _bias(graph, node, x, w)
    if bias is None:
        return False
    inputs = [
        x.codes,
        *grid(graph, x),
        w.codes,
        *grid(graph, w),
        *grid(graph, y),
        *bias,
    ]
    return write(graph, node, "QLinearConv", inputs, y, "", **attributes(node))


def qlinear_matmul(graph: Graph, node: Node) -> bool:
    """Replace MatMul with a quantized result."""
    tensors = _quantized_product(graph, node, axis=1)
    if not tensors:
        return False
    a, b, y = tensors
    inputs = [a.codes, *grid(graph, a), b.codes, *grid(graph, b), *grid(graph, y)]
    return write(graph, node, "QLinearMatMul", inputs, y, "")


def matmul_to_float(graph: Graph, node: Node) -> bool:
    """Replace MatMul with a float result, and the bias added to it."""
    operands = _operands(graph, node, axis=1)
    if not operands:
        return False
    a, b = operands
    a_scale, a_zero = grid(graph, a)
    b_scale, b_zero = grid(graph, b)
    inputs = [a.codes, b.codes, a_scale, b_scale, a_zero, b_zero]
    result = node.outputs[0]
    added = _added_vector(graph, node, b)
    if added is not None:
        inputs.append(other_input(added, result))
        result = added.outputs[0]
        graph.remove([added])
    return write(graph, node, "MatMulIntegerToFloat", inputs, result)


def qgemm(graph: Graph, node: Node) -> bool:
    """Replace Gemm with a quantized or float result, and a bias in products of the scales."""
    operands = _operands(graph, node, output_axis(node))
    if not operands:
        return False
    a, b = operands
    y = written_bytes(graph, node.outputs[0])
    bias = _bias(graph, node, a, b)
    if bias is None or (bias and not unscaled(node)):
        return False
    inputs = [a.codes, *grid(graph, a), b.codes, *grid(graph, b), *(bias or [""])]
    settings = attributes(node)
    settings.pop("beta", None)  # QGemm has no beta
    if y is None:
        return write(graph, node, "QGemm", inputs, node.outputs[0], **settings)
    if code_type(graph, y) != code_type(graph, a):
        return False
    return write(graph, node, "QGemm", [*inputs, *grid(graph, y)], y, **settings)


def _operands(graph: Graph, node: Node, axis: int) -> list[Codes]:
    """Return the codes of the two operands of a product; none if no kernel multiplies the codes.

    ``axis``: the weight's axis that may have per-channel scales.
    """
    codes = present(read_bytes(graph, name) for name in node.inputs[:2])
    if len(codes) < 2 or not _multiplied(graph, codes[0], codes[1], axis):
        return []
    return codes


def _quantized_product(graph: Graph, node: Node, axis: int) -> list[Codes]:
    """Return the codes of both operands and of the result, which has the type of the first.

    None of them if QLinearConv and QLinearMatMul do not compute such a product.
    """
    operands = _operands(graph, node, axis)
    y = written_bytes(graph, node.outputs[0])
    if not operands or y is None or graph.opset < _QLINEAR_OPSET:
        return []
    same_type = code_type(graph, y) == code_type(graph, operands[0])
    return [*operands, y] if same_type else []


def _multiplied(graph: Graph, x: Codes, w: Codes, axis: int) -> bool:
    """Return whether the kernels multiply the codes."""
    # onnxruntime has kernels for unsigned activations by any weight, and signed by signed.
    if (
        code_type(graph, x) != TensorProto.UINT8
        and code_type(graph, w) != TensorProto.INT8
    ):
        return False
    if not one_scale(graph, x):
        return False
    if one_scale(graph, w):
        return True
    rank = len(graph.sizes(w.codes))
    return rank > 1 and (rank == 2 or axis == 0) and w.axis % rank == axis


def _bias(graph: Graph, node: Node, x: Codes, w: Codes) -> list[str] | None:
    """Return the codes of the bias, empty without a bias.

    None if the bias does not count in products of the scales.
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
    equal = np.allclose(scale.reshape(-1), product.reshape(-1), rtol=1e-5, atol=0)
    if equal and not zero_points(graph, bias).any():
        return [bias.codes]
    return None


def _added_vector(graph: Graph, node: Node, w: Codes) -> Node | None:
    """Return the Add of a per-column constant that is the only reader of a product."""
    product = node.outputs[0]
    addition = only_use(graph, product, "Add")
    if addition is None:
        return None
    added = other_input(addition, product)
    shape = graph.sizes(w.codes)
    by_column = len(shape) == 2 and graph.shape(added) == shape[-1:]
    return addition if by_column and graph.is_constant(added) else None
