"""Change the interface of a model to channels-last, as images come from cameras."""

from __future__ import annotations

from onnx import ValueInfoProto, helper

from quark_onnx.graph.graph import Graph

#: Permutations from NCHW to NHWC, and back.
LAST = (0, 2, 3, 1)
FIRST = (0, 3, 1, 2)


def channels_last(graph: Graph) -> tuple[Graph, list[str]]:
    """Make the 4-D inputs and outputs channels-last, and return the graph with their names.

    Each gets a Transpose, the only change of layout. Tensors that bodies capture stay unchanged.
    """
    result = graph.copy()
    names = list[str]()
    for index, value in enumerate(result.inputs):
        # An input that is an output as well would need two layouts under one name.
        if _turns(graph, value) and not graph.is_output(value.name):
            inside = result.fresh(f"{value.name}_channels_first")
            result.replace_uses(value.name, inside)
            result.add("Transpose", [value.name], [inside], perm=FIRST)
            result.inputs[index] = _turned(graph, value)
            names.append(value.name)
    for index, value in enumerate(result.outputs):
        producer = result.producer(value.name)
        if value.name in names:  # it is listed twice
            result.outputs[index] = _turned(graph, value)
        elif producer is not None and _turns(graph, value):
            inside = result.fresh(f"{value.name}_channels_first")
            result.replace_uses(value.name, inside)
            result.set_output(producer, producer.outputs.index(value.name), inside)
            result.add("Transpose", [inside], [value.name], perm=LAST)
            result.outputs[index] = _turned(graph, value)
            names.append(value.name)
    if not names:
        return graph, []
    # A new graph infers the shapes of the new tensors.
    return Graph.of(result.to_model(), graph.store), names


def _turns(graph: Graph, value: ValueInfoProto) -> bool:
    return len(graph.sizes(value.name)) == len(LAST) and not graph.captured(
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
