"""Check the ranks of inputs, and the axes in attributes, before rules index shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from onnx import AttributeProto, GraphProto, NodeProto

from quark_onnx.common.errors import ModelError
from quark_onnx.graph.node import STANDARD_DOMAINS, described, subgraphs
from quark_onnx.graph.shapes import has_shape

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
#: Operators by the attribute in which they name axes of the first input.
_OPERATORS = {"axis": _AXIS, "axes": _AXES}
#: Least and greatest rank of inputs, by index, for inputs that hold weights.
_ANY = 2**31
_RANKS: dict[str, dict[int, tuple[int, int]]] = {
    "Conv": {1: (3, _ANY), 2: (1, 1)},
    "ConvTranspose": {1: (3, _ANY), 2: (1, 1)},
    "Gemm": {0: (2, 2), 1: (2, 2), 2: (0, 2)},
    "MatMul": {0: (1, _ANY), 1: (1, _ANY)},
    "BatchNormalization": dict.fromkeys(range(1, 5), (1, 1)),
    **dict.fromkeys(
        # X (steps, batch, inputs), W (directions, gates * hidden, inputs), R alike.
        ("GRU", "LSTM", "RNN"),
        dict.fromkeys(range(3), (3, 3)),
    ),
}


def check_ranks(
    graph: GraphProto,
    around: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Check the known ranks of nodes' inputs, and the axes in attributes.

    onnxruntime refuses wrong ones, but rules look at shapes before a session does.

    Args:
        graph: a graph with inferred shapes.
        around: ranks of the tensors that a body may capture.

    Raises:
        ModelError: a rank is wrong, or there is no such axis; the message names the node.
    """
    # A tensor of the body hides an outer one of the same name.
    ranks = {**around, **_ranks(graph)}
    for node in graph.node:
        if node.domain in STANDARD_DOMAINS:
            _check_inputs(node, ranks)
            _check_axes(node, ranks)
        for body in subgraphs(node):
            check_ranks(body, ranks)


def _ranks(graph: GraphProto) -> dict[str, int]:
    """Return the known ranks of a graph's tensors, by name."""
    ranks = {tensor.name: len(tensor.dims) for tensor in graph.initializer}
    for value in filter(has_shape, (*graph.input, *graph.value_info)):
        ranks[value.name] = len(value.type.tensor_type.shape.dim)
    return ranks


def _check_inputs(node: NodeProto, ranks: Mapping[str, int]) -> None:
    """Check the ranks of the inputs of a standard operator that hold weights."""
    bounds = _RANKS.get(node.op_type, {})
    inputs = dict(enumerate(node.input))
    for index, (least, greatest) in bounds.items():
        name = inputs.get(index, "")
        # An unknown rank counts as the least one, and passes.
        if not least <= ranks.get(name, least) <= greatest:
            raise ModelError(
                f"{described(node)}: its input {name!r} has the rank {ranks[name]}; it"
                f" takes {_bounds_text(least, greatest)}",
            )


def _bounds_text(least: int, greatest: int) -> str:
    """Return the possible ranks in words."""
    if greatest == _ANY:
        return f"{least} or more"
    if least < greatest:
        return f"{least} to {greatest}"
    return str(least)


def _check_axes(node: NodeProto, ranks: Mapping[str, int]) -> None:
    """Check the axes of the first input that attributes name, if its rank is known.

    Raises:
        ModelError: there is no such axis, or a Transpose names axes that are no permutation.
    """
    source = next(iter(node.input), "")
    if source not in ranks:
        return
    rank = ranks[source]
    # Flatten may put all axes into the first of two.
    end = rank + (node.op_type == "Flatten")
    axes = range(-rank, max(end, 1))
    for attribute in node.attribute:
        named = _named(node.op_type, attribute)
        wrong = [axis for axis in named if axis not in axes]
        if wrong:
            raise ModelError(
                f"{described(node)} names axis {wrong[0]}; {source!r} has the rank"
                f" {rank}",
            )
        is_order = (node.op_type, attribute.name) == ("Transpose", "perm")
        if is_order and sorted(attribute.ints) != list(range(rank)):
            raise ModelError(
                f"{described(node)} has the permutation {list(attribute.ints)};"
                f" {source!r} has the rank {rank}",
            )


def _named(op_type: str, attribute: AttributeProto) -> Sequence[int]:
    """Return the axes of the first input that an attribute of an operator names."""
    if op_type not in _OPERATORS.get(attribute.name, ()):
        return []
    return [attribute.i] if attribute.name == "axis" else attribute.ints
