"""Traverse nodes, and fields of messages."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

from google.protobuf.message import Message

from quark_onnx.common.errors import ModelError

T = TypeVar("T", bound=Hashable)


def copy_fields(source: Message, target: Message, *, but: str) -> None:
    """Copy the fields of a message, except ``but``.

    Args:
        source: the message to copy from.
        target: a message of the same type; repeated fields are appended to it.
        but: name of the field to omit.
    """
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
    start: Iterable[T],
    step: Callable[[T], Iterable[T]],
) -> dict[T, None]:
    """Return every node or tensor that repeated steps reach, as an ordered set with ``start``.

    Args:
        start: the first nodes or tensors.
        step: returns the nodes or tensors next to one.
    """
    # A dict is a set in the order of insertion, the same in each run.
    seen = dict.fromkeys(start)
    todo = list(seen)
    while todo:
        for neighbour in step(todo.pop()):
            if neighbour not in seen:
                seen[neighbour] = None
                todo.append(neighbour)
    return seen


def in_order(
    nodes: Iterable[T],
    leaders: Callable[[T], Iterable[T]],
    cycle: Callable[[T], str] = "there is a cycle through {}".format,
) -> list[T]:
    """Return nodes in topological order, as close to the present order as possible.

    Args:
        nodes: all nodes, in their present order.
        leaders: returns the nodes that come before a node.
        cycle: returns the message of the error, for a node of a cycle.

    Raises:
        ModelError: the nodes form a cycle.
    """
    done: set[T] = set()
    order: list[T] = []
    for root in nodes:
        # Depth first without recursion: a chain of nodes may be longer than Python's stack.
        stack = [(root, False)]
        path = set[T]()
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
                raise ModelError(cycle(node))
            path.add(node)
            # The node comes up again, ready, after its leaders.
            stack.append((node, True))
            stack += [(leader, False) for leader in leaders(node) if leader not in done]
    return order
