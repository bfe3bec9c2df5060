"""Convert every constant of a model to an initializer.

ONNX has three forms of a constant: an initializer, an initializer that is also an input (IR version
4 and later: a caller may override its value), and a Constant node. Exporters use all of them, in
the main graph and in the bodies of If, Loop and Scan. Code that looks for weights looks at
initializers alone.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Sequence

import numpy as np
from onnx import (
    GraphProto,
    ModelProto,
    TensorProto,
    ValueInfoProto,
    helper,
    numpy_helper,
)

from quark_onnx.common.wording import first_of
from quark_onnx.graph.bodies import in_bodies
from quark_onnx.graph.graph import Graph
from quark_onnx.graph.node import Node, bodies_of

#: Attributes of a Constant node that hold plain numbers, with the type of the tensor.
_NUMBERS = {
    "value_float": np.float32,
    "value_floats": np.float32,
    "value_int": np.int64,
    "value_ints": np.int64,
}
#: Most names that a note lists.
_LISTED = 3


def gather_constants(graph: Graph, *, keep_inputs: bool = False) -> list[str]:
    """Convert the constants of a graph and of its bodies to initializers, in place.

    Args:
        graph: the graph.
        keep_inputs: leave initializers that are also inputs overridable.

    Returns:
        The names of the inputs that became constants.
    """
    _store_everywhere(graph)
    if keep_inputs:
        return []
    return graph.close_inputs()


def overridable(graph: Graph) -> list[str]:
    """Return the names of overridable initializers, which are inputs, too."""
    return [value.name for value in graph.inputs if value.name in graph.initializers]


def constants_of(model: ModelProto) -> dict[str, TensorProto]:
    """Return the initializers of a model and the values of its Constant nodes, without bodies.

    Args:
        model: a model as its file has it, which need not be a ``Graph``.

    Returns:
        Tensors by the name that nodes read; the name in a tensor may be another one.
    """
    return _constants_in(model.graph)


def scopes_of(
    model: ModelProto,
) -> Iterator[tuple[GraphProto, ChainMap[str, TensorProto]]]:
    """Yield the graph of a model and its bodies at any depth, each with the constants in scope.

    Args:
        model: a model as its file has it, which need not be a ``Graph``.

    Yields:
        A graph, and the constants that its nodes can read: those of ``constants_of``, of the graph
        and of the graphs around it. Branches of an If may have constants of equal names.
    """
    return _scopes(model.graph, ChainMap())


def _scopes(
    graph: GraphProto, outer: ChainMap[str, TensorProto]
) -> Iterator[tuple[GraphProto, ChainMap[str, TensorProto]]]:
    """Yield a graph and its bodies at any depth, each with the constants in scope."""
    constants = outer.new_child(_constants_in(graph))
    yield graph, constants
    for body in bodies_of(graph.node):
        yield from _scopes(body, constants)


def _constants_in(graph: GraphProto) -> dict[str, TensorProto]:
    """Return the initializers of a graph and the values of its Constant nodes, without bodies."""
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for proto in graph.node:
        if proto.op_type == "Constant":
            value = _value(Node(proto))
            if value is not None:
                constants[proto.output[0]] = value
    return constants


def store_constants(graph: Graph) -> int:
    """Convert the Constant nodes of a graph, without bodies, and return their number."""
    nodes = graph.nodes_of(("Constant",))
    # Strings and sparse tensors stay nodes.
    done = []
    for node in nodes:
        value = _value(node)
        if value is not None:
            # A copy, as the value belongs to the node.
            tensor = TensorProto()
            tensor.CopyFrom(value)
            tensor.name = node.outputs[0]
            graph.initializers[node.outputs[0]] = tensor
            done.append(node)
    graph.remove(done)
    graph.outputs = [
        _declared(value, graph.initializers.get(value.name)) for value in graph.outputs
    ]
    return len(done)


def _declared(value: ValueInfoProto, constant: TensorProto | None) -> ValueInfoProto:
    """Return the declaration of an output, with the type of a constant if it has none.

    The check by onnx asks for a type, which inference does not give to an initializer.
    """
    if constant is None or value.type.WhichOneof("value"):
        return value
    return helper.make_tensor_value_info(value.name, constant.data_type, constant.dims)


def describe_closed(names: Sequence[str]) -> list[str]:
    """Return a note on the inputs that became constants.

    >>> describe_closed(["w"]), describe_closed(["a", "b", "c", "d"])
    (["input 'w' is a constant"], ["inputs 'a', 'b', 'c' and 1 more are constants"])
    """
    if len(names) < 2:
        return [f"input {name!r} is a constant" for name in names]
    quoted = [repr(name) for name in names]
    return [f"inputs {first_of(quoted, _LISTED)} are constants"]


def _store_everywhere(graph: Graph) -> int:
    return store_constants(graph) + in_bodies(graph, _store_everywhere)


def _value(node: Node) -> TensorProto | None:
    """Return the tensor of a Constant node; None for strings and sparse tensors."""
    tensor = node.attribute("value")
    if tensor is not None:
        assert isinstance(tensor, TensorProto)
        return tensor
    for name, dtype in _NUMBERS.items():
        value = node.attribute(name)
        if value is not None:
            return numpy_helper.from_array(np.array(value, dtype))
    return None
