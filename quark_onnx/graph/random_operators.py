"""Operators with different results in each run."""

from __future__ import annotations

from collections.abc import Iterable

from onnx import ModelProto, NodeProto

from quark_onnx.graph.node import normalized_domain, subgraphs

#: Operators of the standard domain whose result is random.
RANDOM = frozenset(
    {
        "Bernoulli",
        "Multinomial",
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
    },
)


def may_be_random(model: ModelProto) -> bool:
    """Return whether outputs of a model may differ from run to run.

    Operators of other domains may do anything, and Dropout in training mode is random.

    Args:
        model: the model, with its functions.
    """
    bodies = [function.node for function in model.functions]
    defined = {(f.name, normalized_domain(f.domain)) for f in model.functions}
    return any(_any_random(nodes, defined) for nodes in (model.graph.node, *bodies))


def _any_random(nodes: Iterable[NodeProto], defined: set[tuple[str, str]]) -> bool:
    todo = list(nodes)
    while todo:
        node = todo.pop()
        domain = normalized_domain(node.domain)
        unknown = domain and (node.op_type, domain) not in defined
        if unknown or node.op_type in RANDOM or _trains(node):
            return True
        for graph in subgraphs(node):
            todo.extend(graph.node)
    return False


def _trains(node: NodeProto) -> bool:
    """Return whether a Dropout has an input for the training mode."""
    return node.op_type == "Dropout" and len(node.input) > 2 and bool(node.input[2])
