"""Define the contract of a conversion."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from quark_onnx.common.wording import counted as with_noun
from quark_onnx.graph import Graph
from quark_onnx.graph.bodies import in_bodies
from quark_onnx.running.run import Sample

#: Whether the converted model computes the same: exactly; apart from the rounding of codes, which
#: the conversion verifies itself; or not, and the difference is measured.
Keeps = Literal["exactly", "but for rounding", "no"]


@dataclass(frozen=True)
class ConversionSettings:
    """Settings of conversions.

    Attributes:
        shapes: shapes of inputs, by name.
        opset: version of the standard operator set to convert to; None for no change.
        io: convert inputs and outputs of the model, too.
        samples: random inputs on which the model runs, if any.
    """

    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    opset: int | None = None
    io: bool = False
    samples: Sequence[Sample] = ()


#: Converts a graph, possibly in place, and returns notes on the changes; none without any.
Rewrite = Callable[[Graph, ConversionSettings], tuple[Graph, list[str]]]


@dataclass(frozen=True)
class Conversion:
    """A conversion.

    Attributes:
        name: name for users.
        rewrite: the function that converts.
        keeps: whether the function of the model stays the same.
        reads: settings that the conversion reads.
    """

    name: str
    rewrite: Rewrite
    keeps: Keeps
    reads: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """First line of the docstring of ``rewrite``."""
        docstring = inspect.getdoc(self.rewrite) or ""
        return " ".join(docstring.partition("\n\n")[0].split())


def conversion(
    name: str, keeps: Keeps, reads: Sequence[str] = ()
) -> Callable[[Rewrite], Conversion]:
    """Return a decorator that turns a function into a conversion.

    Args:
        name: name for users.
        keeps: whether the function of the model stays the same.
        reads: names of the fields of ``ConversionSettings`` that the conversion reads.
    """
    return lambda rewrite: Conversion(name, rewrite, keeps, tuple(reads))


def everywhere(graph: Graph, rewrite: Callable[[Graph], int]) -> int:
    """Rewrite a graph and nested bodies in place; return the number of rewrites.

    Args:
        graph: the graph; unused nodes and initializers are removed after a rewrite.
        rewrite: changes a graph in place, without its bodies, and returns the number of rewrites.
    """
    count = rewrite(graph)
    count += in_bodies(graph, lambda inner: everywhere(inner, rewrite))
    if count:
        graph.drop_unused()
    return count


def reloaded(graph: Graph) -> Graph:
    """Return a graph with newly inferred types and shapes, except those of inputs and outputs."""
    model = graph.to_model()
    # Declared types and shapes are those before the rewrites.
    del model.graph.value_info[:]
    return Graph.of(model, graph.store)


def settled(graph: Graph, count: int) -> Graph:
    """Return a graph after a number of rewrites: reloaded, unless there were none."""
    return reloaded(graph) if count else graph


def counted(count: int, what: str, happened: str = "") -> list[str]:
    """Return a note on a count, except for zero.

    Args:
        count: the number of changed objects.
        what: noun for one of them.
        happened: what was done to them; empty for the bare count.

    >>> counted(2, "pair", "removed"), counted(1, "pair"), counted(0, "pair")
    (['2 pairs removed'], ['1 pair'], [])
    """
    if count:
        return [f"{with_noun(count, what)} {happened}".rstrip()]
    return []
