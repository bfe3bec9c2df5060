"""float32: a float16 or bfloat16 model computes in float32, and has inputs and outputs of it."""

from __future__ import annotations

from onnx import TensorProto

from quark_onnx.convert.base import Settings, conversion, counted, everywhere
from quark_onnx.graph import Graph, upcast_to_float32


@conversion("float32", keeps="no")
def float32(graph: Graph, settings: Settings) -> tuple[Graph, list[str]]:
    """A float16 or bfloat16 model in float32, its inputs and outputs included."""
    model = graph.to_model()
    wide, narrowing = upcast_to_float32(model, graph.store)
    if wide is model:
        return graph, []
    result = Graph.of(wide, graph.store)
    casts = everywhere(result, _drop_casts)
    stored = counted(len(narrowing.constants), "constant")
    inputs, outputs = (
        counted(len(narrowing.inputs), "input"),
        counted(len(narrowing.outputs), "output"),
    )
    notes = [f"{', '.join((*stored, *inputs, *outputs)) or 'results'} became float32"]
    return result, notes + [
        f"{line} removed, which changed nothing any more"
        for line in counted(casts, "Cast")
    ]


def _drop_casts(graph: Graph) -> int:
    """Remove each Cast of float32 to float32."""
    casts = [
        node
        for node in graph.nodes
        if node.kind == "Cast" and node.attribute("to") == TensorProto.FLOAT
    ]
    return sum(
        graph.bypass(node)
        for node in casts
        if graph.elem_type(node.inputs[0]) == TensorProto.FLOAT
    )
