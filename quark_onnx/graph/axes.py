"""Axes that nodes name, checked against the ranks of what they read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnx import AttributeProto, GraphProto, NodeProto

from quark_onnx.errors import ModelError
from quark_onnx.graph.node import STANDARD_DOMAINS, subgraphs

#: Operators whose attribute ``axis`` names an axis of the first input. Not QuantizeLinear and DequantizeLinear, which
#: ignore it where the scale is a scalar.
_AXIS = frozenset(
    """ArgMax ArgMin Compress Concat Flatten Gather GatherElements Hardmax LayerNormalization LogSoftmax LpNormalization
    Scatter ScatterElements Softmax Split TopK""".split()  # noqa: SIM905  (a list is thrice as long)
)
#: Operators whose attribute ``axes`` does.
_AXES = frozenset(
    """ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum
    ReduceSumSquare Squeeze""".split()  # noqa: SIM905
)


def check_axes(graph: GraphProto, around: Mapping[str, int] | None = None) -> None:
    """Check that axes are axes of the tensors that they are of, as far as ranks are known.

    Args:
        graph: with inferred shapes.
        around: ranks of the tensors that a body may read from the graphs around it.

    Raises:
        ModelError: there is no such axis; the message names the node.
    """
    ranks = dict(around or {})
    for tensor in graph.initializer:
        ranks[tensor.name] = len(tensor.dims)
    for value in (*graph.input, *graph.value_info):
        if value.type.tensor_type.HasField("shape"):
            ranks[value.name] = len(value.type.tensor_type.shape.dim)
    for node in graph.node:
        if node.domain in STANDARD_DOMAINS and node.input and node.input[0] in ranks:
            _check_node(node, ranks[node.input[0]])
        for body in subgraphs(node):
            check_axes(body, ranks)


def _check_node(node: NodeProto, rank: int) -> None:
    for attribute in node.attribute:
        named = _named(node.op_type, attribute)
        end = rank + 1 if node.op_type == "Flatten" else rank  # which may put all axes into the first of two
        wrong = [axis for axis in named if not -rank <= axis < max(end, 1)]
        if wrong:
            where = f"node {node.name or next(iter(node.output), '')!r} ({node.op_type})"
            raise ModelError(f"{where} names axis {wrong[0]}; {node.input[0]!r} has the rank {rank}")
        if attribute.name == "perm" and node.op_type == "Transpose" and sorted(attribute.ints) != list(range(rank)):
            raise ModelError(
                f"node {node.name or next(iter(node.output), '')!r} (Transpose) has the permutation "
                f"{list(attribute.ints)}; {node.input[0]!r} has the rank {rank}"
            )


def _named(op_type: str, attribute: AttributeProto) -> Sequence[int]:
    if attribute.name == "axis" and op_type in _AXIS:
        return [attribute.i]
    return attribute.ints if attribute.name == "axes" and op_type in _AXES else []
