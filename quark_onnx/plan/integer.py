"""Find the layers with dynamic activations that integer operators can compute."""

from __future__ import annotations

from quark_onnx.config import QuantizationSpec
from quark_onnx.dtypes import Integer
from quark_onnx.graph import Graph, Node
from quark_onnx.patterns.conv_and_gemm import plain_matrix
from quark_onnx.patterns.quantized_attention import ATTENTION, has_quantized_form


def has_integer_product(graph: Graph, node: Node, weight: QuantizationSpec) -> bool:
    """Return whether ``fusions.dynamic`` can write a layer as an integer product.

    The weight must be constant, with 8-bit codes and without blocks. The bias of a Conv must be
    constant to be reshaped.

    Args:
        graph: the model.
        node: a node of any operator.
        weight: quantization of its weight.
    """
    if not graph.is_constant(node.input(1)) or not _bytes(weight):
        return False
    # An integer product has one scale per output at most, which blocks along the sum exceed.
    if weight.block_size:
        return False
    if node.kind == "LSTM":
        # DynamicQuantizeLSTM has no attribute layout.
        return graph.is_constant(node.input(2)) and not node.attribute("layout", 0)
    if node.kind == ATTENTION:
        return has_quantized_form(node)
    if node.kind == "Conv":
        bias = node.input(2)
        # After a ConvInteger, BatchNormalization applies the scale and the bias of each channel.
        return not bias or graph.is_constant(bias)
    return plain_matrix(node, graph.sizes(node.input(1)))


def with_one_zero_point(node: Node, weight: QuantizationSpec) -> QuantizationSpec:
    """Return the weight's spec with a zero point that the integer operator supports.

    ConvInteger, DynamicQuantizeLSTM and QAttention read a single zero point in onnxruntime 1.32, so
    that a weight with per-channel scales must be symmetric.

    Args:
        node: the layer; specs of operators without this limit are returned unchanged.
        weight: quantization of its weight.
    """
    if node.kind not in ("Conv", "LSTM", ATTENTION) or not _bytes(weight):
        return weight
    # Codes of a symmetric kernel have the same zero point in every channel.
    if weight.per_channel and not weight.symmetric:
        return weight.with_(symmetric=True)
    return weight


def _bytes(spec: QuantizationSpec) -> bool:
    return isinstance(spec.dtype, Integer) and spec.dtype.bits == 8
