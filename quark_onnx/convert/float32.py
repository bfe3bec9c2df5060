"""float32: convert a float16 or bfloat16 model to float32, with its inputs and outputs."""

from __future__ import annotations

from onnx import TensorProto

from quark_onnx.convert.base import ConversionSettings, conversion, counted, everywhere
from quark_onnx.files.half_precision import upcast_to_float32
from quark_onnx.graph import Graph


@conversion("float32", keeps="no")
def float32(graph: Graph, settings: ConversionSettings) -> tuple[Graph, list[str]]:
    """Convert a float16 or bfloat16 model to float32, with its inputs and outputs."""
    model = graph.to_model()
    wide, original = upcast_to_float32(model, graph.store)
    if wide is model:
        return graph, []
    result = Graph.of(wide, graph.store)
    # Casts between 16 bits and float32 of the original now are of float32 to float32.
    casts = everywhere(result, _drop_casts)
    stored = counted(len(original.constants), "constant")
    inputs = counted(len(original.inputs), "input")
    outputs = counted(len(original.outputs), "output")
    notes = [f"{', '.join((*stored, *inputs, *outputs)) or 'results'} became float32"]
    notes += counted(casts, "Cast", "removed, which changed nothing any more")
    return result, notes


def _drop_casts(graph: Graph) -> int:
    """Remove the Casts of float32 to float32."""
    count = 0
    for node in graph.nodes_of({"Cast"}):
        kinds = {node.attribute("to"), graph.elem_type(node.inputs[0])}
        if kinds == {TensorProto.FLOAT}:
            count += graph.bypass(node)
    return count
