"""Find the corresponding tensors of the time steps of an unrolled recurrent cell.

Exporters write a loop over a cell (``torch.nn.GRUCell``, for example) as copies of its operators,
one per time step, which share the weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from quark_onnx.graph import Graph, Node, reach

#: Fewer copies may be layers that share weights for another reason.
_LEAST_STEPS = 4
#: Layers of a cell; the weight is the second input.
_LAYERS = frozenset({"Gemm", "MatMul", "Conv"})


def time_steps(graph: Graph) -> list[list[str]]:
    """Return groups of corresponding tensors of time steps.

    Args:
        graph: the float graph, in topological order.

    Returns:
        Groups of two or more computed tensors or inputs of the model. A tensor is in one group at
        most.
    """
    # Pairs of one layer at a time step and at the next; a layer may lack the bias of the others.
    adjacent = list[tuple[Node, Node]]()
    groups_of_layers = _sharing_weights(graph)
    copies = {node for layers in groups_of_layers for node in layers}
    for layers in groups_of_layers:
        if not _is_recurrent(graph, layers, copies):
            continue
        for earlier, later in pairwise(layers):
            adjacent += _corresponding(graph, earlier, later)
    groups = dict[str, list[str]]()
    for earlier, later in reach(adjacent, lambda pair: _neighbours(graph, *pair)):
        names = zip(
            (*earlier.inputs, *earlier.outputs),
            (*later.inputs, *later.outputs),
            strict=True,
        )
        for tensor, counterpart in names:
            if not graph.is_constant(tensor) and not graph.is_constant(counterpart):
                _unite(groups, tensor, counterpart)
    # The members of a group share one list.
    distinct = {id(group): group for group in groups.values()}
    return [group for group in distinct.values() if len(group) > 1]


def _sharing_weights(graph: Graph) -> list[list[Node]]:
    """Return lists of enough layers that share a weight, each in the order of the graph."""
    by_weight = defaultdict[tuple[str, str], list[Node]](list)
    for node in graph.nodes_of(_LAYERS):
        if graph.is_constant(node.input(1)):
            by_weight[node.kind, node.input(1)].append(node)
    return [layers for layers in by_weight.values() if len(layers) >= _LEAST_STEPS]


def _is_recurrent(graph: Graph, layers: list[Node], copies: set[Node]) -> bool:
    """Return whether layers that share a weight are those of time steps.

    Heads of a detector share weights, too, but do not depend on each other. Blocks of a network may
    share one weight, such as a rotation, but have further weights of their own.

    Args:
        layers: the layers, in the order of the graph.
        copies: all layers that share their weights with enough others.
    """
    after = reach(layers[:1], graph.followers)
    if layers[-1] not in after:
        return False
    before = reach(layers[-1:], graph.leaders)
    between = [
        node for node in graph.nodes_of(_LAYERS) if node in before and node in after
    ]
    return all(
        node in copies or not graph.is_constant(node.input(1)) for node in between
    )


def _neighbours(
    graph: Graph, earlier: Node, later: Node
) -> Iterator[tuple[Node, Node]]:
    """Yield the corresponding producers and readers of two corresponding nodes."""
    for first, second in zip(earlier.inputs, later.inputs, strict=True):
        yield from _corresponding(graph, graph.producer(first), graph.producer(second))
    for first, second in zip(earlier.outputs, later.outputs, strict=True):
        readers = {_role(node, second): node for node in graph.consumers(second)}
        for reader in graph.consumers(first):
            counterpart = readers.get(_role(reader, first))
            yield from _corresponding(graph, reader, counterpart)


def _role(reader: Node, tensor: str) -> tuple[str, tuple[int, ...]]:
    """Return the operator of a reader, and the indices of the inputs that are a tensor."""
    indices = [index for index, name in enumerate(reader.inputs) if name == tensor]
    return reader.kind, tuple(indices)


def _corresponding(
    graph: Graph, earlier: Node | None, later: Node | None
) -> Iterator[tuple[Node, Node]]:
    """Yield a pair of nodes, or nothing if they are not the same operator of two time steps."""
    if earlier is None or later is None or earlier is later:
        return
    if _signature(graph, earlier) == _signature(graph, later):
        yield earlier, later


def _signature(graph: Graph, node: Node) -> tuple[object, ...]:
    """Return the operator and the weights of a node, which are the same at all time steps.

    Vectors and scalars, such as the index of a step, may differ.
    """
    weights = [
        name
        for name in node.operands
        if graph.is_constant(name) and len(graph.sizes(name)) > 1
    ]
    return node.kind, len(node.inputs), len(node.outputs), weights


def _unite(groups: dict[str, list[str]], first: str, second: str) -> None:
    """Merge the groups of two tensors."""
    group = groups.setdefault(first, [first])
    merged = groups.get(second, [second])
    if merged is group:
        return
    group += merged
    for name in merged:
        groups[name] = group
