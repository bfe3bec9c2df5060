"""Operators with different results in each run."""

from __future__ import annotations

from onnx import ModelProto, NodeProto

from quark_onnx.graph.node import nested_nodes, normalized_domain

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
    # Nodes that call a function are as random as the nodes of the function, which are looked at.
    defined = {(f.name, normalized_domain(f.domain)) for f in model.functions}
    nodes = [node for function in model.functions for node in function.node]
    return any(
        _is_random(node, defined) for node in nested_nodes([*model.graph.node, *nodes])
    )


def _is_random(node: NodeProto, defined: set[tuple[str, str]]) -> bool:
    domain = normalized_domain(node.domain)
    unknown = bool(domain) and (node.op_type, domain) not in defined
    return unknown or node.op_type in RANDOM or _trains(node)


def _trains(node: NodeProto) -> bool:
    """Return whether a Dropout has an input for the training mode."""
    return node.op_type == "Dropout" and len(node.input) > 2 and bool(node.input[2])
