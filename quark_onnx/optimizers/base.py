"""The contract of an optimizer: a frozen dataclass that is its own configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

from calibrators.spool import Spool
from quark_onnx.graph import Graph
from quark_onnx.registry import OPTIMIZERS

#: Calibration data that can be read several times; one sample is alive at a time.
Samples = Sequence[Mapping[str, Any]] | Spool


class Rewrites(int):
    """How many places were rewritten, with remarks for the report.

    >>> Rewrites(2, ["one was left alone"]) == 2
    True
    """

    notes: tuple[str, ...]

    def __new__(cls, count: int, notes: Iterable[str] = ()) -> Rewrites:
        self = super().__new__(cls, count)
        self.notes = tuple(notes)
        return self


class FloatOptimizer(Protocol):
    """Rewrites the float graph in place before it is planned, without changing what it computes.

    The caller verifies the claim by running the model before and after.

    Attributes:
        name: by which configurations call it.
        stage: "float".
        needs_data: whether it does nothing without samples.
    """

    name: ClassVar[str]
    stage: ClassVar[str]
    needs_data: ClassVar[bool]

    def __call__(self, graph: Graph, samples: Samples) -> int:
        """How many places were rewritten; ``Rewrites`` also says what was left alone, and why.

        Args:
            samples: calibration data, ``{input name: array}``; it may be read several times, and may be empty.
        """
        ...


C = TypeVar("C", bound=type[Any])


def register(cls: C) -> C:
    """Class decorator: registers an optimizer under its name."""
    OPTIMIZERS.add(cls.name, cls)
    return cls
