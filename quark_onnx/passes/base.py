"""The contract of a pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from quark_onnx.graph import Graph
from quark_onnx.registry import PASSES

#: A pass rewrites the graph in place, without changing what it computes, and says how many places
#: it rewrote. The caller verifies the claim by running the model before and after.
Pass = Callable[[Graph], int]
P = TypeVar("P", bound=Pass)


def register(function: P) -> P:
    """Decorator: registers a pass under its own name."""
    PASSES.add(function.__name__, function)
    return function
