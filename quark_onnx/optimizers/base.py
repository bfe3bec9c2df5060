"""The contract of an optimizer: a frozen dataclass that is its own configuration."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, TypeVar

from quark_onnx.graph import Graph
from quark_onnx.registry import OPTIMIZERS


class FloatOptimizer(Protocol):
    """Rewrites the float graph in place before it is planned, without changing what it computes.

    The caller verifies the claim by running the model before and after.

    Attributes:
        name: by which configurations call it.
        stage: "float".
    """

    name: ClassVar[str]
    stage: ClassVar[str]

    def __call__(self, graph: Graph) -> int:
        """How many places were rewritten."""
        ...


C = TypeVar("C", bound=type[Any])


def register(cls: C) -> C:
    """Class decorator: registers an optimizer under its name."""
    OPTIMIZERS.add(cls.name, cls)
    return cls
