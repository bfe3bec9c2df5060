"""Integer products with dynamic activations: which layers can be written as MatMulInteger or
ConvInteger.
"""

from __future__ import annotations

from quark_onnx.config import QuantizationSpec
from quark_onnx.dtypes import Integer
from quark_onnx.graph import Graph, Node
from quark_onnx.patterns.conv_and_gemm import plain_matrix


def has_integer_product(graph: Graph, node: Node, weight: QuantizationSpec) -> bool:
    """Return whether ``fusions.dynamic`` can write a layer as a product of integer codes.

    The weight is constant and gets 8-bit codes without blocks. The bias of a Conv has to be
    constant to be reshaped.
    """
    if not graph.is_constant(node.input(1)) or weight.block_size or not _bytes(weight):
        return False
    if node.kind == "Conv":
        bias = node.input(2)
        return not bias or graph.is_constant(bias)
    return plain_matrix(node, graph.shape(node.input(1)) or ())


def with_one_zero_point(node: Node, weight: QuantizationSpec) -> QuantizationSpec:
    """Return how the weight of an integer product is quantized: ConvInteger of onnxruntime 1.32
    reads one zero point.

    A kernel with a scale for each channel is symmetric, whose zero point is that of the format.
    """
    if (
        node.kind == "Conv"
        and weight.per_channel
        and not weight.symmetric
        and _bytes(weight)
    ):
        return weight.with_(symmetric=True)
    return weight


def _bytes(spec: QuantizationSpec) -> bool:
    return isinstance(spec.dtype, Integer) and spec.dtype.bits == 8
