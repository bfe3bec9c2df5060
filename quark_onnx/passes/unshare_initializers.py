"""Give each layer parameters of its own: the engine's compiler wants them unique (amd-quark 0.13,
CopySharedInit).
"""

from __future__ import annotations

from quark_onnx.graph import Graph, Node
from quark_onnx.graph.codes import constant_behind, copied
from quark_onnx.passes.base import register

_LAYERS = frozenset({"Conv", "ConvTranspose", "Gemm"})
#: Attributes of a DequantizeLinear, of any domain.
_ATTRIBUTES = ("axis", "block_size", "output_dtype")


@register
def unshare_initializers(graph: Graph) -> int:
    """Copy the weight or bias of every layer but the first that reads it, the DequantizeLinear in
    front included.
    """
    taken, count = set[str](), 0
    for node in [node for node in graph.nodes if node.kind in _LAYERS]:
        for index in range(1, len(node.inputs)):
            codes = constant_behind(graph, node.inputs[index])
            if codes in taken:
                graph.set_input(node, index, _copied(graph, node.inputs[index], node))
                count += 1
            elif codes:
                taken.add(codes)
    return count


def _copied(graph: Graph, tensor: str, reader: Node) -> str:
    """Another tensor with the same values."""
    producer = graph.producer(tensor)
    if producer is None:
        return copied(graph, tensor, f"{tensor}_{reader.name}")
    attributes = {
        name: value
        for name in _ATTRIBUTES
        if (value := producer.attribute(name)) is not None
    }
    codes = producer.inputs[0]
    inputs = [copied(graph, codes, f"{codes}_{reader.name}"), *producer.inputs[1:]]
    result = graph.fresh(f"{tensor}_{reader.name}")
    graph.add(producer.op_type, inputs, [result], domain=producer.domain, **attributes)
    return result
