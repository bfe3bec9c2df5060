"""Calls of model-local functions: how many nodes they stand for, counted before anything writes
them out.

Thirty functions that each call the one before twice stand for a billion nodes. onnx and onnxruntime
write them out as they infer shapes or load the model, and no signal ends that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from onnx import FunctionProto, ModelProto, NodeProto

from quark_onnx.errors import ModelError
from quark_onnx.graph.node import subgraphs

#: A model may stand for so many nodes, or for so many times as many as its file holds.
_NODES, _TIMES = 1_000_000, 100

#: Domain, name and overload of a function.
_Key = tuple[str, str, str]


def check_calls(model: ModelProto) -> None:
    """Check that functions end, and stand for nodes that memory can hold.

    Raises:
        ModelError: a function calls itself, or there would be too many nodes; the message names the
            function.
    """
    if not model.functions:
        return
    functions = {
        (each.domain, each.name, each.overload): each for each in model.functions
    }
    called = {
        key: Counter(map(_key, _all_nodes(function.node)))
        for key, function in functions.items()
    }
    held = Counter(map(_key, _all_nodes(model.graph.node)))
    limit = max(
        _NODES,
        _TIMES * sum(count.total() for count in (held, *called.values())),
    )
    sizes = dict[_Key, int]()
    for key in _callees_first(functions, called):
        sizes[key] = sum(
            count * sizes.get(callee, 1) for callee, count in called[key].items()
        )
        if sizes[key] > limit:
            raise ModelError(
                f"function {key[1]!r} stands for {sizes[key]:,} nodes; at most"
                f" {limit:,} are written out",
            )
    total = sum(count * sizes.get(key, 1) for key, count in held.items())
    if total > limit:
        raise ModelError(
            f"with its functions the model has {total:,} nodes; at most {limit:,} are"
            " written out",
        )


def _callees_first(
    functions: dict[_Key, FunctionProto],
    called: dict[_Key, Counter[_Key]],
) -> Iterator[_Key]:
    """Yield functions behind those that they call; chains may be deeper than Python's stack."""
    done, open_ = set[_Key](), set[_Key]()
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
