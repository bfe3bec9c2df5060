"""Drop the metadata that exporters leave in a model: source positions of nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from onnx import GraphProto, ModelProto

from quark_onnx.graph.node import all_graphs, bodies_of
from quark_onnx.graph.shapes import declared_values

#: Prefixes of the keys of torch's exporter, and of the rewriter that it runs.
_TRACED = ("pkg.torch.", "pkg.onnxscript.")
#: Keys of torch's exporter without a prefix. Without prefixed keys, they are the user's.
_BESIDE = frozenset({"namespace"})


def drop_traces(model: ModelProto) -> int:
    """Drop stack traces, module names and signatures of torch's exporter in place.

    The metadata is in ``metadata_props`` of the model, graphs, functions, nodes, values and
    tensors. Other keys stay.

    Returns:
        The number of dropped bytes.

    >>> from onnx import helper
    >>> node = helper.make_node("Relu", ["x"], ["y"])
    >>> for key in ("pkg.torch.onnx.stack_trace", "namespace", "owner"):
    ...     node.metadata_props.add(key=key, value="...")  # doctest: +ELLIPSIS
    key...
    >>> model = helper.make_model(helper.make_graph([node], "g", [], []))
    >>> drop_traces(model) > 40, [entry.key for entry in model.graph.node[0].metadata_props]
    (True, ['owner'])
    """
    dropped = 0
    for owner in _owners(model):
        entries = list(owner.metadata_props)
        traced = [entry for entry in entries if entry.key.startswith(_TRACED)]
        if not traced:
            continue
        # A key without a prefix is torch's only next to prefixed ones.
        traced += [entry for entry in entries if entry.key in _BESIDE]
        dropped += sum(entry.ByteSize() for entry in traced)
        kept = [entry for entry in entries if entry not in traced]
        del owner.metadata_props[:]
        owner.metadata_props.extend(kept)
    return dropped


def _owners(model: ModelProto) -> Iterator[Any]:
    """Yield every part of a model that may have metadata."""
    yield model
    yield from _in_graph(model.graph)
    for function in model.functions:
        yield function
        yield from function.value_info
        yield from function.node
        for body in bodies_of(function.node):
            yield from _in_graph(body)


def _in_graph(graph: GraphProto) -> Iterator[Any]:
    for subgraph in all_graphs(graph):
        yield subgraph
        yield from declared_values(subgraph)
        yield from subgraph.initializer
        yield from subgraph.node
