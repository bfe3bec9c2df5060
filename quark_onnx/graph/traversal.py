"""Steps from node to node, and from field to field."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from google.protobuf.message import Message

from quark_onnx.errors import ModelError
from quark_onnx.graph.node import Node


def copy_fields(source: Message, target: Message, *, but: str) -> None:
    """Copy all fields of a message that are set, except one."""
    for field, value in source.ListFields():
        if field.name == but:
            continue
        if isinstance(value, Message):
            getattr(target, field.name).CopyFrom(value)
        elif hasattr(getattr(target, field.name), "extend"):
            getattr(target, field.name).extend(value)
        else:
            setattr(target, field.name, value)


def reach(
    start: Iterable[Node],
    step: Callable[[Node], Iterable[Node]],
) -> dict[Node, None]:
    """Every node that repeated steps lead to, ``start`` included, as an ordered set."""
    seen = dict.fromkeys(start)
    todo = list(seen)
    while todo:
        for node in step(todo.pop()):
            if node not in seen:
                seen[node] = None
                todo.append(node)
    return seen


def in_order(
    nodes: Iterable[Node],
    leaders: Callable[[Node], Iterable[Node]],
) -> list[Node]:
    """The nodes in topological order, as near to the present order as possible.

    Raises:
        ModelError: they form a cycle.
    """
    done: set[Node] = set()
    order: list[Node] = []
    for root in nodes:
        stack, path = [(root, False)], set[Node]()
        while stack:
            node, ready = stack.pop()
            if node in done:
                continue
            if ready:
                done.add(node)
                path.discard(node)
                order.append(node)
                continue
            if node in path:
                raise ModelError(
                    f"the graph has a cycle through node {node.name!r} ({node.op_type})",
                )
            path.add(node)
            stack.append((node, True))
            stack += [(other, False) for other in leaders(node) if other not in done]
    return order
