"""Check the ranks of inputs, and the axes in attributes, before rules index shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnx import AttributeProto, GraphProto, NodeProto

from quark_onnx.errors import ModelError
from quark_onnx.graph.node import STANDARD_DOMAINS, subgraphs

#: Operators whose attribute ``axis`` names an axis of the first input. Not QuantizeLinear and
#: DequantizeLinear, which ignore it where the scale is a scalar.
_AXIS = frozenset(
    """ArgMax ArgMin Compress Concat Flatten Gather GatherElements Hardmax LayerNormalization LogSoftmax LpNormalization
    Scatter ScatterElements Softmax Split TopK""".split(),  # noqa: E501, SIM905
)
#: Operators whose attribute ``axes`` names axes of the first input.
_AXES = frozenset(
    """ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum
    ReduceSumSquare Squeeze""".split(),  # noqa: E501, SIM905
)


#: Least and greatest rank of inputs, by index, for inputs that hold weights.
_ANY = 2**31
_RANKS: dict[str, dict[int, tuple[int, int]]] = {
    "Conv": {1: (3, _ANY), 2: (1, 1)},
    "ConvTranspose": {1: (3, _ANY), 2: (1, 1)},
    "Gemm": {0: (2, 2), 1: (2, 2), 2: (0, 2)},
    "MatMul": {0: (1, _ANY), 1: (1, _ANY)},
    "BatchNormalization": dict.fromkeys(range(1, 5), (1, 1)),
    **dict.fromkeys(
        ("GRU", "LSTM", "RNN"),
        dict.fromkeys(range(3), (3, 3)),
    ),
}


def check_ranks(graph: GraphProto, around: Mapping[str, int] | None = None) -> None:
    """Check the known ranks of nodes' inputs, and the axes in attributes.

    onnxruntime refuses wrong ones, but rules look at shapes before a session does.

    Args:
        graph: a graph with inferred shapes.
        around: ranks of the tensors that a body may capture.

    Raises:
        ModelError: a rank is wrong, or there is no such axis; the message names the node.
    """
    ranks = dict(around or {})
    for tensor in graph.initializer:
        ranks[tensor.name] = len(tensor.dims)
    for value in (*graph.input, *graph.value_info):
        if value.type.tensor_type.HasField("shape"):
            ranks[value.name] = len(value.type.tensor_type.shape.dim)
    for node in graph.node:
        if node.domain in STANDARD_DOMAINS:
            _check_inputs(node, ranks)
            if node.input and node.input[0] in ranks:
                _check_axes(node, ranks[node.input[0]])
        for body in subgraphs(node):
            check_ranks(body, ranks)


def _check_inputs(node: NodeProto, ranks: Mapping[str, int]) -> None:
    bounds = _RANKS.get(node.op_type, {})
    for place, (least, greatest) in bounds.items():
        name = node.input[place] if place < len(node.input) else ""
        if name in ranks and not least <= ranks[name] <= greatest:
            raise ModelError(
                f"{_called(node)}: its input {name!r} has the rank {ranks[name]}; it"
                f" takes {_bounds_text(least, greatest)}",
            )


def _bounds_text(least: int, greatest: int) -> str:
    if greatest == _ANY:
        return f"{least} or more"
    if least < greatest:
        return f"{least} to {greatest}"
    return str(least)


def _called(node: NodeProto) -> str:
    return f"node {node.name or next(iter(node.output), '')!r} ({node.op_type})"


def _check_axes(node: NodeProto, rank: int) -> None:
    # Flatten may put all axes into the first of two.
    end = rank + 1 if node.op_type == "Flatten" else rank
    for attribute in node.attribute:
        named = _named(node.op_type, attribute)
        wrong = [axis for axis in named if not -rank <= axis < max(end, 1)]
        if wrong:
            raise ModelError(
                f"{_called(node)} names axis {wrong[0]}; {node.input[0]!r} has the rank"
                f" {rank}",
            )
        is_order = attribute.name == "perm" and node.op_type == "Transpose"
        if is_order and sorted(attribute.ints) != list(range(rank)):
            raise ModelError(
                f"{_called(node)} has the permutation {list(attribute.ints)};"
                f" {node.input[0]!r} has the rank {rank}",
            )


def _named(op_type: str, attribute: AttributeProto) -> Sequence[int]:
    if attribute.name == "axis" and op_type in _AXIS:
        return [attribute.i]
    return attribute.ints if attribute.name == "axes" and op_type in _AXES else []
