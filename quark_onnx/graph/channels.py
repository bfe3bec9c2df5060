"""An interface with channels last, as images come from cameras and decoders."""

from __future__ import annotations

from onnx import ValueInfoProto, helper

from quark_onnx.graph.graph import Graph

#: (batch, channels, height, width) to (batch, height, width, channels), and back.
LAST, FIRST = (0, 2, 3, 1), (0, 3, 1, 2)


def channels_last(graph: Graph) -> tuple[Graph, list[str]]:
    """The graph whose inputs and outputs of four axes have their channels last, and the names of
    those.

    Each gets a Transpose, the only place where the order changes. What the body of a node reads
    stays as it is.
    """
    result, names = graph.copy(), list[str]()
    for place, value in enumerate(result.inputs):
        if _turns(graph, value) and not graph.is_output(value.name):
            inside = result.fresh(f"{value.name}_channels_first")
            result.replace_uses(value.name, inside)
            result.add("Transpose", [value.name], [inside], perm=FIRST)
            result.inputs[place] = _turned(graph, value)
            names.append(value.name)
    for place, value in enumerate(result.outputs):
        producer = result.producer(value.name)
        if value.name in names:  # it is listed twice
            result.outputs[place] = _turned(graph, value)
        elif producer is not None and _turns(graph, value):
            inside = result.fresh(f"{value.name}_channels_first")
            result.replace_uses(value.name, inside)
            result.set_output(producer, producer.outputs.index(value.name), inside)
            result.add("Transpose", [inside], [value.name], perm=LAST)
            result.outputs[place] = _turned(graph, value)
            names.append(value.name)
    return (Graph.of(result.to_model(), graph.store), names) if names else (graph, [])


def _turns(graph: Graph, value: ValueInfoProto) -> bool:
    return len(graph.shape(value.name) or ()) == len(LAST) and not graph.captured(
        value.name,
    )


def _turned(graph: Graph, value: ValueInfoProto) -> ValueInfoProto:
    shape = graph.shape(value.name)
    assert shape is not None
    return helper.make_tensor_value_info(
        value.name,
        graph.elem_type(value.name),
        [shape[axis] for axis in LAST],
    )
