"""Refuse, or leave, the quantized parts of a model."""

from __future__ import annotations

from collections import Counter

from quark_onnx.common.errors import ModelError
from quark_onnx.common.wording import tally
from quark_onnx.functions import DOMAINS
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.node import inner_nodes

#: Operators on quantized values, beside those whose names begin with QLinear.
_QUANTIZING = frozenset(
    {
        "QuantizeLinear",
        "DequantizeLinear",
        "DynamicQuantizeLinear",
        "QGemm",
        "QAttention",
        "ConvInteger",
        "MatMulInteger",
        "MatMulNBits",
        "MatMulBnb4",
        "GatherBlockQuantized",
        "DynamicQuantizeLSTM",
        "DynamicQuantizeMatMul",
        "MatMulIntegerToFloat",
    }
)
#: Operators that read and write floats, so that their neighbours are as free as those of a MatMul.
_BETWEEN_FLOATS = frozenset({"MatMulNBits", "MatMulBnb4", "GatherBlockQuantized"})
# Domains whose operators all work on rounded values: the functions written here, and Vitis AI's.
_VENDORS = frozenset({*DOMAINS, "com.vai.quantize"})


def is_quantizing(node: Node) -> bool:
    """Return whether a node reads, writes or computes quantized values."""
    if node.domain in _VENDORS:
        return True
    # By type alone: QuantizeLinear exists in the domain com.microsoft as well.
    return node.op_type in _QUANTIZING or node.op_type.startswith("QLinear")


def existing(graph: Graph, *, keep: bool) -> dict[str, str]:
    """Return the nodes next to quantized values, with the reason to skip the nodes.

    Args:
        graph: the model.
        keep: leave such nodes, and quantize the others.

    Raises:
        ModelError: there are such nodes, also in subgraphs, and ``keep`` is false.
    """
    quantizing = list(filter(is_quantizing, graph.nodes))
    # Bodies count for the refusal alone: the plan of a body excludes its own quantized nodes.
    everywhere = [*quantizing, *filter(is_quantizing, inner_nodes(graph.nodes))]
    if everywhere and not keep:
        kinds = Counter(node.op_type for node in everywhere)
        words = tally(kinds.most_common(4))
        raise ModelError(
            f"the model is quantized already: it has {words}, the first of them"
            f" {everywhere[0].name!r}; give the float model, or keep what is quantized"
            " and go on with the rest (keep_existing, --keep-existing)",
        )
    # Tensors next to quantized nodes have the scale of their first quantizer, and a second pair
    # would round the values again.
    touched = dict.fromkeys(node.name for node in quantizing)
    for node in quantizing:
        if node.op_type in _BETWEEN_FLOATS:
            continue
        for neighbour in (*graph.leaders(node), *graph.followers(node)):
            touched[neighbour.name] = None
    return dict.fromkeys(touched, "it touches what is quantized already")
