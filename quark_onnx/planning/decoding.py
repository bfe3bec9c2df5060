"""Float arithmetic for the decoding of box coordinates.

An SSD-style head multiplies predictions by priors, adds a grid, and computes sizes with an
exponential. Boxes are compared by overlap, where a step of 1/256 of the image is many pixels.
With 8 bits, small objects are lost while the SQNR of the output looks good.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from quark_onnx.dtypes import Block
from quark_onnx.graph import Graph, Node, reach
from quark_onnx.graph.node import kinds_of
from quark_onnx.plan import Keep, PlanBuilder, Use
from quark_onnx.rules.base import WEIGHTED
from quark_onnx.rules.passthrough import PARTING, REARRANGING

#: Formats with this many bits have steps far below a pixel. Block formats count shared bits.
_FINE = 16
_ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Div", "Sum", "Max", "Min", "Pow"})
_SUMS = frozenset({"Add", "Sub"})
_SCALING = frozenset({"Mul", "Div"})
#: Operators with one signal among their inputs.
_POINTWISE = frozenset({"Clip", "Exp", "Relu", "Sigmoid"})
_SIZES = frozenset({"Shape", "Size"})


def tail_of(graph: Graph) -> dict[Node, None]:
    """Return the nodes without a path to a weighted operator."""
    before = reach(graph.nodes_of(WEIGHTED), graph.leaders)
    return dict.fromkeys(node for node in graph.nodes if node not in before)


def connected(graph: Graph, node: Node, tail: dict[Node, None]) -> dict[Node, None]:
    """Return the nodes of a tail connected with ``node``, as an ordered set.

    Args:
        graph: the graph.
        node: a node of the tail, which the result includes.
        tail: nodes without a path to a weighted operator.
    """

    def neighbours(member: Node) -> list[Node]:
        near = (*graph.leaders(member), *graph.followers(member))
        return [neighbour for neighbour in near if neighbour in tail]

    return reach([node], neighbours)


def spare_decoding(plan: PlanBuilder) -> None:
    """Keep the decoding of coordinates float, before rules are applied.

    Decoding is recognized by its structure after the last weighted operators: arithmetic with
    constants or positions that vary along two axes or more (priors, grids), an exponential
    outside a softmax, or a Concat of sums and differences of parts of one tensor (corners from
    center and size). The connected tail stays float, except a Relu or Clip that is fused into a
    weighted operator. Formats of 16 bits and more are precise enough; block formats are not.
    """
    graph = plan.graph
    layers = graph.nodes_of(WEIGHTED)
    # Without weighted operators every node is a tail: a model of arithmetic alone decodes nothing.
    if not layers:
        return
    behind = reach(layers, graph.followers)
    # A Relu that is fused into a layer has the layer's output range; decoding begins after it.
    tail = dict.fromkeys(node for node in tail_of(graph) if not _fused(graph, node))
    positions = _positions(graph)
    for node in tail:
        if node not in behind or node.name in plan.kept or not _coarse(plan, node):
            continue
        reason = _reason(graph, node, positions)
        if reason:
            reason = f"decoding of coordinates: {node.name} ({node.op_type}) {reason}"
            for member in connected(graph, node, tail):
                keep_whole(plan, member, reason)


def keep_whole(plan: PlanBuilder, node: Node, reason: str) -> None:
    """Keep a node float, including results and constants.

    Args:
        plan: the plan under construction; changed in place.
        node: the node.
        reason: the reason.
    """
    plan.keep_node(node, reason)
    # Results too: a reader that is not in the tail, or the graph's output, would round them.
    for tensor in filter(None, node.outputs):
        plan.keep(tensor, reason)
    for tensor in node.inputs:
        if plan.graph.is_constant(tensor):  # grids, strides, anchors
            plan.entries[Use(tensor, node.name)] = Keep(reason)


def _fused(graph: Graph, node: Node) -> bool:
    """Return whether a Relu or Clip is fused into a weighted operator."""
    producer = graph.producer(node.inputs[0]) if node.kind in ("Relu", "Clip") else None
    return producer is not None and producer.kind in WEIGHTED


def _coarse(plan: PlanBuilder, node: Node) -> bool:
    """Return whether a node's activations are too coarse for coordinates."""
    spec = plan.specs[node].activation
    if spec is None or spec.dynamic:
        return False
    # Values of a block share an exponent, so that small coordinates lose their bits to large ones.
    return isinstance(spec.dtype, Block) or spec.dtype.bits < _FINE


def _reason(graph: Graph, node: Node, positions: set[str]) -> str:
    """Return the reason why a node decodes coordinates; empty otherwise.

    Args:
        node: a node after the last weighted operators.
        positions: tensors computed from sizes and constants only.
    """
    if node.kind == "Exp":
        # A softmax written as operators divides exponentials by their sum.
        if "ReduceSum" in kinds_of(graph.followers(node)):
            return ""
        return "makes sizes"
    if node.kind in _ARITHMETIC:
        for tensor in node.inputs:
            if _is_grid(graph, tensor, positions):
                return f"computes with the priors or grid {tensor!r}"
    if node.kind == "Concat":
        # Corners are center - size / 2 and center + size / 2, both sums of parts of one tensor.
        sources = [_sum_of_parts(graph, name) for name in node.inputs]
        for tensor, count in Counter(filter(None, sources)).items():
            if count > 1:
                return f"joins sums of parts of {tensor!r}"
    return ""


def _is_grid(graph: Graph, tensor: str, positions: set[str]) -> bool:
    """Return whether a tensor is constant or positional, and varies along two axes.

    Args:
        tensor: name of the tensor; False if its shape is unknown.
        positions: tensors computed from sizes and constants only.
    """
    if not graph.is_constant(tensor) and tensor not in positions:
        return False
    shape = graph.shape(tensor)
    # Scales and offsets per channel vary along one axis alone.
    return shape is not None and sum(size != 1 for size in shape) > 1


def _positions(graph: Graph) -> set[str]:
    """Return the tensors computed from sizes and constants only."""
    positions = set[str]()
    for node in graph.nodes:
        signals = _signals(graph, node.reads)
        # Random operators have no signal among the inputs, and are no positions.
        computed = not node.kind.startswith("Random") and positions.issuperset(signals)
        if computed or node.kind in _SIZES:
            positions.update(node.outputs)
    return positions


def _signals(graph: Graph, names: Iterable[str]) -> list[str]:
    """Return the tensors that are neither omitted nor constant."""
    return [name for name in names if name and not graph.is_constant(name)]


def _sum_of_parts(graph: Graph, tensor: str) -> str:
    """Return the tensor whose two parts are added or subtracted to compute ``tensor``.

    Empty if there is no such tensor. Both parts may be scaled by constants.
    """
    node = _origin(graph, tensor)
    if node is None or node.kind not in _SUMS:
        return ""
    # An operand that is no part adds "", so that there are two sources.
    sources = {_cut_from(_origin(graph, name)) for name in node.inputs}
    if len(sources) != 1:
        return ""
    return sources.pop()


def _cut_from(node: Node | None) -> str:
    """Return the tensor that a node cuts a part out of; empty for other nodes."""
    if node is None or node.kind not in PARTING:
        return ""
    return node.inputs[0]


def _origin(graph: Graph, tensor: str) -> Node | None:
    """Return the producer of a tensor, looking through moves, functions and factors.

    Rearrangements, elementwise functions and constant factors are skipped.
    """
    while (node := graph.producer(tensor)) is not None:
        signals = _signals(graph, node.inputs)
        scales = node.kind in _SCALING and len(signals) == 1
        # With several signals the value is no function of one tensor any more.
        if not signals or not (scales or node.kind in REARRANGING | _POINTWISE):
            break
        tensor = signals[0]
    return node
