"""Give layers unshared parameters, as the engine's compiler requires.

Follows CopySharedInit of amd-quark 0.13.
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
    """Copy a shared weight or bias for every reader but the first, with its DequantizeLinear."""
    taken = set[str]()
    count = 0
    for node in graph.nodes_of(_LAYERS):
        # The first input is the activation.
        for index in range(1, len(node.inputs)):
            tensor = node.inputs[index]
            codes = constant_behind(graph, tensor)
            if codes in taken:
                graph.set_input(node, index, _copied(graph, tensor, node))
                count += 1
            elif codes:
                taken.add(codes)
    return count


def _copied(graph: Graph, tensor: str, reader: Node) -> str:
    """Return a copy of a tensor for a reader."""
    producer = graph.producer(tensor)
    if producer is None:
        return copied(graph, tensor, f"{tensor}_{reader.name}")
    attributes = {name: producer.attribute(name) for name in _ATTRIBUTES}
    codes = producer.inputs[0]
    # Scale and zero point may stay shared; the weight or bias itself may not.
    inputs = [copied(graph, codes, f"{codes}_{reader.name}"), *producer.inputs[1:]]
    result = f"{tensor}_{reader.name}"
    domain = producer.domain
    return graph.compute(producer.op_type, inputs, result, domain=domain, **attributes)
