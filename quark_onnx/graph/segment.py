"""A part of a graph as a model of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, ValueInfoProto, helper

from quark_onnx.graph.graph import Graph
from quark_onnx.graph.node import Node
from quark_onnx.graph.shapes import ir_version_for


def segment(
    graph: Graph,
    nodes: Sequence[Node],
    given: Mapping[str, NDArray[Any]],
    results: Sequence[str],
    *,
    sized: bool = False,
) -> ModelProto:
    """The model that computes some tensors of a graph from others.

    Args:
        nodes: what computes them.
        given: the tensors that it starts from, with a value each; types and ranks are those of the
            values.
        results: the tensors to compute; onnxruntime infers their types.
        sized: what is given has the sizes that the graph says, too, where its value has them.
    """
    model = graph.shell()
    part = model.graph
    part.name = "segment"
    part.node.extend(node.to_proto() for node in nodes)
    read = dict.fromkeys(
        name for node in nodes for name in (*node.inputs, *node.captures) if name
    )
    for name in read:
        if name in given:
            part.input.append(_declared(graph, name, given[name], sized=sized))
        elif name in graph.initializers:
            part.initializer.append(graph.initializers[name])
            part.input.extend(
                value for value in graph.inputs if value.name == name
            )  # a default is no constant
    part.output.extend(ValueInfoProto(name=name) for name in results)
    model.ir_version = ir_version_for(model)
    return model


def _declared(
    graph: Graph,
    name: str,
    value: NDArray[Any],
    *,
    sized: bool,
) -> ValueInfoProto:
    kind = graph.elem_type(name)
    if kind == TensorProto.UNDEFINED:
        kind = helper.np_dtype_to_tensor_dtype(np.asarray(value).dtype)
    sizes: list[int | str | None] = [None] * np.ndim(value)
    if sized and len(said := graph.shape(name) or ()) == len(sizes):
        sizes = [
            dim if dim == size or isinstance(dim, str) else None
            for dim, size in zip(said, value.shape, strict=True)
        ]
    return helper.make_tensor_value_info(name, kind, sizes)
