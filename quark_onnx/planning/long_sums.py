"""Float arithmetic for long sums of parts of one tensor.

Exporters write a pooling window as operators: torch's decomposition of an adaptive pooling gathers
every value of a window and adds it to the sum, which makes hundreds of Gather and Add nodes. With
8 bits every addition rounds the sum anew, and the rounding errors of a window add up. No addition
gains speed: an addition of codes (QLinearAdd) converts both operands to floats and the sum to
codes, whereas float additions only cost the conversion of what enters and leaves the whole sum.
"""

from __future__ import annotations

from collections.abc import Iterator

from quark_onnx.dtypes import Block
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.cost import count_values
from quark_onnx.graph.node import kinds_of
from quark_onnx.graph.traversal import reach
from quark_onnx.plan import PlanBuilder
from quark_onnx.rules.passthrough import PARTING, REARRANGING

#: Formats with this many bits lose nothing in a sum.
_FINE = 16
#: Minimum number of successive additions. A shorter sum is that of a residual connection, or of an
#: activation function.
_LONG = 4
_ADDING = frozenset({"Add", "Sum"})
#: Values that an addition of codes converts for each value of the sum.
_CONVERSIONS = 3
#: Operators whose result is a part of the first input, or rearranges the first input.
_MOVING = REARRANGING | PARTING


def spare_long_sums(plan: PlanBuilder) -> None:
    """Keep long sums of parts of one tensor float, before rules are applied.

    A sum is kept float where it adds four times or more in succession, and where converting the
    summed tensor and the sums costs less than what additions of codes convert themselves. The
    operators that cut the parts out are kept float with the sum.
    """
    graph = plan.graph
    sources = dict[str, str]()
    depths = dict[str, int]()
    # Nodes are in topological order, so that sources and depths of the inputs are known.
    for node in graph.nodes:
        _trace(graph, node, sources, depths)
    groups = dict[str, list[Node]]()
    for node in graph.nodes:
        if node.kind in _ADDING and depths.get(node.outputs[0]):
            # All sums of one tensor are judged together, as they share its conversion to floats.
            groups.setdefault(sources[node.outputs[0]], []).append(node)
    for source, additions in groups.items():
        long = max(depths[node.outputs[0]] for node in additions) >= _LONG
        coarse = all(_coarse(plan, node) for node in additions)
        if long and coarse and _pays(graph, source, additions):
            reason = (
                f"a sum of many parts of {source!r}: every addition would round the sum"
                " again, and none would be faster"
            )
            _keep(plan, sources, source, additions, reason)


def _trace(
    graph: Graph, node: Node, sources: dict[str, str], depths: dict[str, int]
) -> None:
    """Record the summed tensor of a node's result, and the successive additions in the result.

    Args:
        node: the node; nodes before it have been traced.
        sources: name of the tensor that a tensor is a part, or a sum of parts, of.
        depths: number of successive additions in a tensor.
    """
    if node.kind in _MOVING and not graph.is_constant(node.inputs[0]):
        # A part of a part is a part of the whole.
        origin = sources.get(node.inputs[0], node.inputs[0])
        for result in node.results:
            sources[result] = origin
            depths[result] = depths.get(node.inputs[0], 0)
    elif node.kind in _ADDING:
        origins = {sources.get(name, "") for name in node.inputs}
        # an operand that is no part of the tensor begins another sum
        if len(origins) == 1 and "" not in origins:
            result = node.outputs[0]
            sources[result] = origins.pop()
            # The longest chain decides, because errors add up along it.
            depths[result] = 1 + max(depths[name] for name in node.inputs)


def _coarse(plan: PlanBuilder, node: Node) -> bool:
    """Return whether a node's activations lose accuracy in a long sum on a CPU.

    Power-of-two scales are meant for engines that have integer arithmetic only.
    """
    spec = plan.specs[node].activation
    if spec is None or spec.dynamic or spec.pow2 or plan.rounds_results(node):
        return False
    return not isinstance(spec.dtype, Block) and spec.dtype.bits < _FINE


def _pays(graph: Graph, source: str, additions: list[Node]) -> bool:
    """Return whether fewer values are converted around float additions than in those of codes.

    Args:
        source: name of the summed tensor.
        additions: all additions of its parts.
    """
    added = {node.outputs[0] for node in additions}
    sums = [tensor for tensor in added if _is_converted(graph, tensor)]
    # One dequantization of the source, one quantization of each sum.
    converted = sum(count_values(graph, tensor) for tensor in [source, *sums])
    return converted < _CONVERSIONS * sum(
        count_values(graph, tensor) for tensor in added
    )


def _is_converted(graph: Graph, tensor: str) -> bool:
    """Return whether a sum is converted: partial sums that only additions read are not."""
    if graph.is_output(tensor):
        return True
    return not kinds_of(graph.consumers(tensor)) <= _ADDING


def _keep(
    plan: PlanBuilder,
    sources: dict[str, str],
    source: str,
    additions: list[Node],
    reason: str,
) -> None:
    """Keep additions float, and the operators that cut their operands out of the source.

    Args:
        plan: the plan under construction; changed in place.
        sources: name of the tensor that a tensor is a part, or a sum of parts, of.
        source: name of the summed tensor.
        additions: all additions of its parts.
    """

    def cuts(node: Node) -> Iterator[Node]:
        for leader in plan.graph.leaders(node):
            if any(sources.get(name) == source for name in leader.outputs):
                yield leader

    # Upstream from the additions, as far as the operands are parts of the source.
    for node in reach(additions, cuts):
        plan.keep_node(node, reason)
