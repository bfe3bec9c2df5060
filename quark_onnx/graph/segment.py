"""Extract a part of a graph as a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, ValueInfoProto, helper

from quark_onnx.graph.graph import Graph
from quark_onnx.graph.node import Node
from quark_onnx.graph.shapes import ir_version_for, untyped


def segment(
    graph: Graph,
    nodes: Sequence[Node],
    given: Mapping[str, NDArray[Any]],
    results: Sequence[str],
) -> ModelProto:
    """Return the model between given tensors of a graph and results.

    Args:
        graph: the graph.
        nodes: the nodes that compute the results.
        given: inputs of the model, with a value each, which gives type and rank.
        results: outputs of the model; onnxruntime infers their types.
    """
    model = graph.shell()
    proto = model.graph
    proto.name = "segment"
    proto.node.extend(node.to_proto() for node in nodes)
    for name in dict.fromkeys(name for node in nodes for name in node.reads):
        if name in given:
            proto.input.append(_declared(graph, name, given[name]))
        elif name in graph.initializers:
            proto.initializer.append(graph.initializers[name])
            # An initializer that is also an input is only a default.
            proto.input.extend(value for value in graph.inputs if value.name == name)
    proto.output.extend(untyped(results))
    model.ir_version = ir_version_for(model)
    return model


def _declared(graph: Graph, name: str, value: NDArray[Any]) -> ValueInfoProto:
    """Return the declaration of an input of a segment: its type and its rank.

    Args:
        graph: the graph, whose declared type is used.
        value: value for the tensor, which gives the rank.
    """
    kind = graph.elem_type(name)
    # Inference has not reached the tensor; the given value has the type.
    if kind == TensorProto.UNDEFINED:
        kind = helper.np_dtype_to_tensor_dtype(np.asarray(value).dtype)
    return helper.make_tensor_value_info(name, kind, [None] * np.ndim(value))
