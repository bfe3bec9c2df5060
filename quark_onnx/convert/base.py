"""The contract of a conversion."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from quark_onnx.graph import Graph
from quark_onnx.graph.bodies import in_bodies
from quark_onnx.steps import Sample

#: Whether the converted model computes what the model did: in floats as in codes; but for codes
#: that are rounded otherwise, which the conversion verifies itself; or something else, whose
#: distance is measured.
Keeps = Literal["exactly", "but for rounding", "no"]


@dataclass(frozen=True)
class Settings:
    """What conversions are told.

    Attributes:
        shapes: of inputs, by name.
        opset: the version of the standard operator set to convert to; None for none.
        io: inputs and outputs of the model are converted, too.
        samples: random inputs that the model runs on; none if it runs on none.
    """

    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    opset: int | None = None
    io: bool = False
    samples: Sequence[Sample] = ()


#: Converts a graph, which it may change, and says what it did, in a line each; nothing if there was
#: nothing to convert.
Rewrite = Callable[[Graph, Settings], tuple[Graph, list[str]]]


@dataclass(frozen=True)
class Conversion:
    """A conversion.

    Attributes:
        name: by which users ask for it.
        rewrite: what it does.
        keeps: whether it keeps the function of the model.
        reads: which of the settings it reads.
    """

    name: str
    rewrite: Rewrite
    keeps: Keeps
    reads: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """What it does, in a line: the first one of the docstring of ``rewrite``."""
        return " ".join(
            (inspect.getdoc(self.rewrite) or "").partition("\n\n")[0].split(),
        )


def conversion(
    name: str,
    keeps: Keeps,
    reads: Sequence[str] = (),
) -> Callable[[Rewrite], Conversion]:
    """Decorator: makes a conversion of what does it."""
    return lambda rewrite: Conversion(name, rewrite, keeps, tuple(reads))


def everywhere(graph: Graph, rewrite: Callable[[Graph], int]) -> int:
    """Rewrite a graph in place, and the bodies of its nodes, however deep; how many places were."""
    count = rewrite(graph)
    count += in_bodies(graph, lambda inner: everywhere(inner, rewrite))
    if count:
        graph.drop_unused()
    return count


def reloaded(graph: Graph) -> Graph:
    """A graph whose types and shapes are inferred anew, those of its inputs and outputs apart."""
    model = graph.to_model()
    del model.graph.value_info[:]
    return Graph.of(model, graph.store)


def counted(count: int, what: str) -> list[str]:
    """What was done, as a line; no line for nothing.

    >>> counted(2, "pair"), counted(1, "pair"), counted(0, "pair")
    (['2 pairs'], ['1 pair'], [])
    """
    return [f"{count} {what}{'s' * (count != 1)}"] if count else []
