"""decoding: keep float the arithmetic that makes coordinates of what the last layers predict.

An SSD-style head multiplies predictions with priors, adds a grid, and makes sizes with an
exponential. Its boxes are compared by their overlap, where a step of 1/256 of the image is many
pixels: with 8 bits, small objects are lost while the signal-to-noise ratio of the output looks
good.
"""

from __future__ import annotations

from collections import Counter

from quark_onnx.dtypes import Block
from quark_onnx.graph import Graph, Node, reach
from quark_onnx.plan import Keep, Plan, Use
from quark_onnx.rules.base import WEIGHTED
from quark_onnx.rules.passthrough import REARRANGING

#: A number of as many bits has steps far below a pixel; block formats count bits of what their
#: values share.
_FINE = 16
_ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Div", "Sum", "Max", "Min", "Pow"})
_SUMS = frozenset({"Add", "Sub"})
_SCALING = frozenset({"Mul", "Div"})
#: Operators whose result holds a part of the values of their first input.
_PARTING = frozenset({"Slice", "Split", "Gather", "GatherND", "GatherElements"})
#: Operators with one signal among their inputs.
_POINTWISE = frozenset({"Clip", "Exp", "Relu", "Sigmoid"})
_SIZES = frozenset({"Shape", "Size"})


def tail_of(graph: Graph) -> dict[Node, None]:
    """Return the nodes from which no weighted operator is reached."""
    before = reach(
        [node for node in graph.nodes if node.kind in WEIGHTED],
        graph.leaders,
    )
    return dict.fromkeys(node for node in graph.nodes if node not in before)


def connected(graph: Graph, node: Node, tail: dict[Node, None]) -> dict[Node, None]:
    """Return the nodes of a tail that are connected with one of it."""
    return reach(
        [node],
        lambda n: [m for m in (*graph.leaders(n), *graph.followers(n)) if m in tail],
    )


def spare_decoding(plan: Plan) -> None:
    """Keep the decoding of coordinates float, before rules ask for anything.

    It is found by its structure, behind the last weighted operators: arithmetic with constants or
    positions that vary along two axes or more (priors, grids), an exponential that is no part of a
    softmax, or a join of sums and differences of parts of one tensor (corners of a center and a
    size). All of the tail that is connected with one of these stays float, except a Relu or Clip
    that is fused into a weighted operator. Numbers of 16 bits and more are fine enough, those of
    block formats are not.
    """
    graph = plan.graph
    layers = [node for node in graph.nodes if node.kind in WEIGHTED]
    if not layers:
        return
    behind = reach(layers, graph.followers)
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


def keep_whole(plan: Plan, node: Node, reason: str) -> None:
    """Keep a node float, its results and the constants that it reads."""
    plan.keep_node(node, reason)
    for tensor in filter(None, node.outputs):
        plan.keep(tensor, reason)
    for tensor in filter(
        plan.graph.is_constant,
        node.inputs,
    ):  # grids, strides, anchors
        plan.entries[Use(tensor, node.name)] = Keep(reason)


def _fused(graph: Graph, node: Node) -> bool:
    producer = graph.producer(node.inputs[0]) if node.kind in ("Relu", "Clip") else None
    return producer is not None and producer.kind in WEIGHTED


def _coarse(plan: Plan, node: Node) -> bool:
    spec = plan.specs[node].activation
    if spec is None or spec.dynamic:
        return False
    return isinstance(spec.dtype, Block) or spec.dtype.bits < _FINE


def _reason(graph: Graph, node: Node, positions: set[str]) -> str:
    """Return what makes coordinates of predictions; empty if nothing does."""
    if node.kind == "Exp":
        sums = any(reader.kind == "ReduceSum" for reader in graph.followers(node))
        return "" if sums else "makes sizes"
    if node.kind in _ARITHMETIC:
        grid = next(
            (tensor for tensor in node.inputs if _is_grid(graph, tensor, positions)),
            "",
        )
        return f"computes with the priors or grid {grid!r}" if grid else ""
    if node.kind == "Concat":
        counts = Counter(
            filter(None, (_sum_of_parts(graph, name) for name in node.inputs)),
        )
        twice = next((tensor for tensor, count in counts.items() if count > 1), "")
        return f"joins sums of parts of {twice!r}" if twice else ""
    return ""


def _is_grid(graph: Graph, tensor: str, positions: set[str]) -> bool:
    """Whether a tensor varies along two axes or more and is constant, or computed from sizes and
    constants alone.
    """
    if not graph.is_constant(tensor) and tensor not in positions:
        return False
    shape = graph.shape(tensor)
    return shape is not None and sum(size != 1 for size in shape) > 1


def _positions(graph: Graph) -> set[str]:
    """Return the tensors that are computed from sizes and constants alone."""
    found = set[str]()
    for node in graph.nodes:
        signals = (
            name
            for name in (*node.inputs, *node.captures)
            if name and not graph.is_constant(name)
        )
        if node.kind in _SIZES or (
            not node.kind.startswith("Random")
            and all(name in found for name in signals)
        ):
            found.update(node.outputs)
    return found


def _sum_of_parts(graph: Graph, tensor: str) -> str:
    """Return the tensor of which two parts are added up or subtracted, on the way to this one.

    Empty if there is none.

    Both parts may be scaled by constants.
    """
    node = _origin(graph, tensor)
    if node is None or node.kind not in _SUMS:
        return ""
    parts = [_origin(graph, name) for name in node.inputs]
    sources = {
        part.inputs[0] if part is not None and part.kind in _PARTING else ""
        for part in parts
    }
    return sources.pop() if len(sources) == 1 else ""


def _origin(graph: Graph, tensor: str) -> Node | None:
    """Return the node that computes a tensor, past rearrangements, functions of each value and
    constant factors.
    """
    while (node := graph.producer(tensor)) is not None:
        signals = [name for name in node.inputs if name and not graph.is_constant(name)]
        scales = node.kind in _SCALING and len(signals) == 1
        if not signals or not (scales or node.kind in REARRANGING | _POINTWISE):
            break
        tensor = signals[0]
    return node
