"""Count the nodes in calls of model-local functions, before inlining.

Thirty functions that each call the previous one twice expand to a billion nodes. onnx and
onnxruntime expand them during shape inference or loading, and no signal ends that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from onnx import ModelProto, NodeProto

from quark_onnx.common.errors import ModelError
from quark_onnx.graph.node import nested_nodes
from quark_onnx.graph.traversal import in_order

#: A model may expand to so many nodes, or to so many times the number in its file.
_NODES = 1_000_000
_TIMES = 100

#: Domain, name and overload of a function.
_Key = tuple[str, str, str]


def check_calls(model: ModelProto) -> None:
    """Check that functions are not recursive, and fit memory when inlined.

    Raises:
        ModelError: a function calls itself, or there would be too many nodes; the message names the
            function.
    """
    if not model.functions:
        return
    functions = {
        (function.domain, function.name, function.overload): function
        for function in model.functions
    }
    # Each function is counted once; calls are multiplied out below, callees first.
    called = {key: _calls(function.node) for key, function in functions.items()}
    graph_calls = _calls(model.graph.node)
    in_file = graph_calls.total() + sum(calls.total() for calls in called.values())
    limit = max(_NODES, _TIMES * in_file)
    sizes = dict[_Key, int]()
    for key in in_order(
        functions,
        lambda key: [callee for callee in called[key] if callee in functions],
        lambda key: (
            f"function {key[1]!r} calls itself, directly or through others; no"
            " runtime ends that"
        ),
    ):
        sizes[key] = _expanded(called[key], sizes)
        if sizes[key] > limit:
            raise ModelError(
                f"function {key[1]!r} stands for {sizes[key]:,} nodes; at most"
                f" {limit:,} are written out",
            )
    total = _expanded(graph_calls, sizes)
    if total > limit:
        raise ModelError(
            f"with its functions the model has {total:,} nodes; at most {limit:,} are"
            " written out",
        )


def _calls(nodes: Iterable[NodeProto]) -> Counter[_Key]:
    """Count the calls of each operator or function among nodes and in their bodies."""
    return Counter(
        (node.domain, node.op_type, node.overload) for node in nested_nodes(nodes)
    )


def _expanded(calls: Counter[_Key], sizes: Mapping[_Key, int]) -> int:
    """Return the number of nodes that calls stand for; an operator stands for itself."""
    return sum(count * sizes.get(key, 1) for key, count in calls.items())
