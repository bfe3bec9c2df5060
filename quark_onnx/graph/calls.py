"""Count the nodes in calls of model-local functions, before inlining.

Thirty functions that each call the previous one twice expand to a billion nodes. onnx and
onnxruntime expand them during shape inference or loading, and no signal ends that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from onnx import FunctionProto, ModelProto, NodeProto

from quark_onnx.errors import ModelError
from quark_onnx.graph.node import subgraphs

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
    called = {
        key: Counter(map(_key, _all_nodes(function.node)))
        for key, function in functions.items()
    }
    graph_calls = Counter(map(_key, _all_nodes(model.graph.node)))
    limit = max(
        _NODES,
        _TIMES * sum(calls.total() for calls in (graph_calls, *called.values())),
    )
    sizes = dict[_Key, int]()
    for key in _callees_first(functions, called):
        sizes[key] = sum(
            calls * sizes.get(callee, 1) for callee, calls in called[key].items()
        )
        if sizes[key] > limit:
            raise ModelError(
                f"function {key[1]!r} stands for {sizes[key]:,} nodes; at most"
                f" {limit:,} are written out",
            )
    total = sum(calls * sizes.get(key, 1) for key, calls in graph_calls.items())
    if total > limit:
        raise ModelError(
            f"with its functions the model has {total:,} nodes; at most {limit:,} are"
            " written out",
        )


def _callees_first(
    functions: dict[_Key, FunctionProto],
    called: dict[_Key, Counter[_Key]],
) -> Iterator[_Key]:
    """Yield functions after their callees, without recursion: chains may be deep."""
    done = set[_Key]()
    open_ = set[_Key]()
    for first in functions:
        stack = [first]
        while stack:
            key = stack[-1]
            waiting = [
                callee
                for callee in called[key]
                if callee in functions and callee not in done
            ]
            if key in done or not waiting:
                stack.pop()
                open_.discard(key)
                if key not in done:
                    done.add(key)
                    yield key
                continue
            open_.add(key)
            if any(callee in open_ for callee in waiting):
                raise ModelError(
                    f"function {key[1]!r} calls itself, directly or through others; no"
                    " runtime ends that",
                )
            stack += waiting


def _key(node: NodeProto) -> _Key:
    return node.domain, node.op_type, node.overload


def _all_nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    for node in nodes:
        yield node
        for body in subgraphs(node):
            yield from _all_nodes(body.node)
