"""Fold constants: compute input-independent nodes once."""

from __future__ import annotations

import logging
import math
from collections.abc import Container, Iterable

import numpy as np
from onnx import TensorProto, numpy_helper

from calibrators.onnx_runtime.external_tensors import EXCHANGED
from calibrators.onnx_runtime.session import open_session
from calibrators.onnx_runtime.tensors import tensor_bytes
from quark_onnx.graph import Graph, Node, store_constants
from quark_onnx.graph.cost import count_values
from quark_onnx.graph.random_operators import RANDOM
from quark_onnx.graph.segment import segment
from quark_onnx.passes.base import register

logger = logging.getLogger(__name__)

#: A larger folded tensor (in bytes) must not have more elements than its operands, as after Expand,
#: Tile or ConstantOfShape; a Cast of half-precision weights only widens elements.
_LARGE = 1 << 20
_NOT_FOLDED = RANDOM | {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"}


@register
def fold_constants(graph: Graph) -> int:
    """Fold every deterministic standard operator with constant inputs."""
    # Before the search for foldable nodes, which knows initializers alone.
    count = store_constants(graph)
    foldable = _foldable(graph)
    # Results inside of a chain of folded nodes are never stored.
    wanted = _read_elsewhere(graph, foldable)
    values = _compute(graph, foldable, wanted)
    for name, value in values.items():
        graph.initializers[name] = numpy_helper.from_array(value, name)
    too_large = {name for name in wanted if name not in values}
    done = list[Node]()
    for node in foldable:
        # If a result was too large to keep, the nodes that compute its operands must stay.
        is_stored = not values.keys().isdisjoint(node.outputs)
        if too_large.isdisjoint(node.outputs) and (is_stored or not too_large):
            done.append(node)
    graph.remove(done)
    return count + len(done)


def _read_elsewhere(graph: Graph, nodes: list[Node]) -> list[str]:
    """Return the results of nodes for readers outside, and outputs."""
    inside = set(nodes)
    names = list[str]()
    for node in nodes:
        for name in node.outputs:
            if graph.is_output(name) or not inside.issuperset(graph.consumers(name)):
                names.append(name)
    return names


def _foldable(graph: Graph) -> list[Node]:
    """Return the nodes to fold, in graph order."""
    # Results of foldable nodes count as constants for the nodes after them.
    folded = set[str]()
    nodes = list[Node]()
    # Number of values that the model holds: a result beyond it would make the file larger.
    budget = _count_values(graph.initializers.values())
    for node in graph.nodes:
        if _may_fold(graph, node, folded, budget):
            nodes.append(node)
            folded.update(node.outputs)
    return nodes


def _may_fold(graph: Graph, node: Node, folded: Container[str], budget: int) -> bool:
    """Return whether the results of a node can be computed, and are worth to be stored.

    Args:
        folded: names of further constants.
        budget: number of values that may be stored.
    """
    if node.domain or node.op_type in _NOT_FOLDED:
        return False
    # Results of a node without inputs are known anyway, or random.
    if not node.inputs or node.captures or node.has_subgraph:
        return False
    if not all(name in folded or graph.is_constant(name) for name in node.operands):
        return False
    # Too large results would be discarded after their computation.
    if any(_is_larger(graph, name, budget) for name in node.outputs):
        return False
    return all(graph.elem_type(name) in EXCHANGED for name in node.results)


def _is_larger(graph: Graph, name: str, budget: int) -> bool:
    """Return whether a result is known to be too large, before its computation."""
    # Open sizes count as 1, so that the product is a lower bound.
    size = count_values(graph, name)
    width = tensor_bytes(TensorProto(data_type=graph.elem_type(name)))
    return size * width > _LARGE and size > budget


def _count_values(tensors: Iterable[TensorProto]) -> int:
    """Return the number of values that tensors have together."""
    return sum(math.prod(tensor.dims) for tensor in tensors)


def _compute(
    graph: Graph, nodes: list[Node], wanted: list[str]
) -> dict[str, np.ndarray]:
    """Return the values of the wanted tensors, except oversized ones."""
    if not wanted:
        return {}
    model = segment(graph, nodes, {}, wanted)
    try:
        values = open_session(model, optimize=False).run(wanted, {})
    except Exception as error:
        # onnxruntime raises several unrelated types. Nodes that it cannot run are not folded.
        logger.debug("constants are not folded: %s", error)
        return {}
    # Here the operands of the folded nodes alone count.
    budget = _count_values(model.graph.initializer)
    return {
        name: value
        for name, value in zip(wanted, values, strict=True)
        if _is_kept(value, budget)
    }


def _is_kept(value: object, budget: int) -> bool:
    """Return whether a result is a tensor that is small, or not larger than its operands."""
    if not isinstance(value, np.ndarray):
        return False
    return value.nbytes <= _LARGE or value.size <= budget
