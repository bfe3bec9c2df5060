"""Remove identity operators."""

from __future__ import annotations

from onnx import TensorProto

from quark_onnx.graph import Graph, Node
from quark_onnx.passes.base import register, rewrite_each


@register
def remove_identity(graph: Graph) -> int:
    """Remove Identity, Dropout outside training, and Cast to the present type."""
    return rewrite_each(graph, _remove, *_IS_IDENTITY)


def _remove(graph: Graph, node: Node) -> bool:
    # ``bypass`` keeps a node between an input and an output of the model.
    return _IS_IDENTITY[node.kind](graph, node) and graph.bypass(node)


def _is_tensor(graph: Graph, identity: Node) -> bool:
    """Return whether an Identity copies a tensor; sequences and optionals are left alone."""
    return graph.elem_type(identity.inputs[0]) != TensorProto.UNDEFINED


def _is_inactive(graph: Graph, dropout: Node) -> bool:
    """Return whether a Dropout is outside of training, and nothing reads its mask."""
    training = graph.optional_constant(dropout.input(2), False)
    if training is None or training:
        return False
    masks = dropout.results[1:]
    # The mask is the second result.
    return not any(graph.consumers(name) or graph.is_output(name) for name in masks)


def _keeps_type(graph: Graph, cast: Node) -> bool:
    return bool(cast.attribute("to") == graph.elem_type(cast.inputs[0]))


_IS_IDENTITY = {
    "Identity": _is_tensor,
    "Dropout": _is_inactive,
    "Cast": _keeps_type,
}
