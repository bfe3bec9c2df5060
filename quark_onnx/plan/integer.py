"""Integer products with dynamic activations: which layers can be written as MatMulInteger or ConvInteger."""

from __future__ import annotations

from quark_onnx.config import QuantizationSpec
from quark_onnx.dtypes import Integer
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.layers import plain_matrix


def has_integer_product(graph: Graph, node: Node, weight: QuantizationSpec) -> bool:
    """Return whether ``fusions.dynamic`` can write a layer as a product of integer codes.

    The weight is constant and gets 8-bit codes without blocks. ConvInteger of onnxruntime 1.32 reads one zero point for
    the whole weight, so that a Conv needs symmetric codes, or one scale; its bias has to be constant to be reshaped.
    """
    if not graph.is_constant(node.input(1)) or weight.block_size:
        return False
    if not isinstance(weight.dtype, Integer) or weight.dtype.bits != 8:
        return False
    if node.kind == "Conv":
        bias = node.input(2)
        one_zero = weight.symmetric or not weight.per_channel
        return one_zero and (not bias or graph.is_constant(bias))
    return plain_matrix(node, graph.shape(node.input(1)) or ())
