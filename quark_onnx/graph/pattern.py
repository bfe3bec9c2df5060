"""Describe subgraphs by the formulas that they compute, and match them.

A pattern is an expression of tensors, numbers and operators. This one is a Mul of a tensor and the
Sigmoid of the same tensor:

>>> x = tensor("x")
>>> silu = x * op("Sigmoid", x)

``*`` and ``+`` match their operands in either order. ``a | b`` matches one of two patterns.

>>> from onnx import parser
>>> graph = Graph.of(parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
...     g (float[N] a) => (float[N] y) { b = Sigmoid (a)  y = Mul (b, a) }'''))
>>> match = silu.match(graph, "y")
>>> match["x"], [node.kind for node in match.nodes]
('a', ['Mul', 'Sigmoid'])
>>> (x + 1).match(graph, "y") is None
True
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from quark_onnx.graph.constant_input import is_number, private
from quark_onnx.graph.graph import Graph
from quark_onnx.graph.matching import constant_number
from quark_onnx.graph.node import Node

#: Operators whose operands may be exchanged.
_COMMUTATIVE = frozenset({"Add", "Mul", "Max", "Min"})


@dataclass(frozen=True)
class Match:
    """A subgraph that a pattern describes.

    Attributes:
        tensors: the tensors that stand for the names in the pattern.
        nodes: the operators, from the result back to the inputs.
    """

    tensors: Mapping[str, str]
    nodes: tuple[Node, ...] = ()

    def __getitem__(self, name: str) -> str:
        return self.tensors[name]

    def bind(self, name: str, tensor: str) -> Match:
        """Return the match in which a tensor stands for a name, unless the name is empty."""
        if not name:
            return self
        return replace(self, tensors={**self.tensors, name: tensor})

    def is_closed(self, graph: Graph) -> bool:
        """Return whether nothing but the nodes reads the tensors between them."""
        # The result, of the first node, may have any readers; tensors further in may not.
        inner = [result for node in self.nodes[1:] for result in node.results]
        readers = {reader for result in inner for reader in graph.consumers(result)}
        return readers.issubset(self.nodes) and all(
            private(graph, result) for result in inner
        )


@dataclass(frozen=True, kw_only=True)
class Pattern(ABC):
    """A formula for a tensor.

    Attributes:
        name: stands for the same tensor wherever it occurs; may be empty.
    """

    name: str = ""

    def match(
        self, graph: Graph, result: str, *, shared: bool = False, **known: str
    ) -> Match | None:
        """Return the subgraph that computes a tensor; None if the pattern does not fit.

        Of several ways to read the subgraph, the first one counts whose inner tensors nothing else
        reads.

        Args:
            graph: the graph.
            result: name of the tensor.
            shared: nodes outside of the subgraph may read the tensors inside.
            **known: tensors that stand for names in the pattern.
        """
        # Matches are generated lazily: the alternatives after the first match are never tried.
        for match in self.matches(graph, result, Match(known)):
            if shared or match.is_closed(graph):
                return match
        return None

    def matches(self, graph: Graph, result: str, partial: Match) -> Iterator[Match]:
        """Yield a match for each way to extend a partial one by the nodes before a tensor.

        Args:
            graph: the graph.
            result: name of the tensor.
            partial: the tensors that stand for names so far, and the nodes.
        """
        bound = partial.tensors.get(self.name)
        if bound is None:
            yield from self._matches(graph, result, partial.bind(self.name, result))
        # The name has occurred before, as x in x * Sigmoid(x): it must stand for the same tensor.
        elif bound == result:
            yield partial

    @abstractmethod
    def _matches(self, graph: Graph, result: str, partial: Match) -> Iterator[Match]:
        """Yield the matches where no tensor has stood for the name before."""

    def named(self, name: str) -> Pattern:
        """Return the pattern with a name."""
        return replace(self, name=name)

    def __or__(self, other: Pattern) -> Pattern:
        return _Either(alternatives=(self, other))

    def __add__(self, other: Pattern | float) -> Pattern:
        return op("Add", self, other)

    def __radd__(self, other: float) -> Pattern:
        return op("Add", other, self)

    def __sub__(self, other: Pattern | float) -> Pattern:
        return op("Sub", self, other)

    def __mul__(self, other: Pattern | float) -> Pattern:
        return op("Mul", self, other)

    def __rmul__(self, other: float) -> Pattern:
        return op("Mul", other, self)

    def __truediv__(self, other: Pattern | float) -> Pattern:
        return op("Div", self, other)

    def __rtruediv__(self, other: float) -> Pattern:
        return op("Div", other, self)


def tensor(
    name: str = "", where: Callable[[Graph, str], bool] | None = None
) -> Pattern:
    """Return the pattern of a tensor, whatever computes it.

    Args:
        name: name in the pattern.
        where: condition on the graph and the tensor, such as ``Graph.is_constant``.
    """
    return _Tensor(name=name, where=where)


def number(value: float, within: float = 0.0) -> Pattern:
    """Return the pattern of a constant scalar.

    Args:
        value: the value.
        within: greatest difference from the value.
    """
    return tensor(where=lambda graph, name: is_number(graph, name, value, within))


def scalar(name: str = "") -> Pattern:
    """Return the pattern of a constant scalar of any value, with a name or without."""
    return tensor(name, lambda graph, name: constant_number(graph, name) is not None)


def op(
    kinds: str | Collection[str],
    *inputs: Pattern | float,
    where: Callable[[Graph, Node], bool] | None = None,
) -> Pattern:
    """Return the pattern of the first result of an operator.

    Args:
        kinds: ``Node.kind`` of the operator, or of several.
        *inputs: the first inputs; a number is a constant scalar.
        where: condition on the graph and the node.
    """
    return _Operator(
        kinds={kinds} if isinstance(kinds, str) else kinds,
        inputs=[
            operand if isinstance(operand, Pattern) else number(operand)
            for operand in inputs
        ],
        where=where,
    )


@dataclass(frozen=True, kw_only=True)
class _Tensor(Pattern):
    where: Callable[[Graph, str], bool] | None

    def _matches(self, graph: Graph, result: str, partial: Match) -> Iterator[Match]:
        if self.where is None or self.where(graph, result):
            yield partial


@dataclass(frozen=True, kw_only=True)
class _Operator(Pattern):
    kinds: Collection[str]
    inputs: Sequence[Pattern]
    where: Callable[[Graph, Node], bool] | None

    def _matches(self, graph: Graph, result: str, partial: Match) -> Iterator[Match]:
        node = graph.producer_of_kind(result, self.kinds)
        if node is None or not self._fits(graph, node, result):
            return
        extended = replace(partial, nodes=(*partial.nodes, node))
        yield from _match_all(graph, self.inputs, node.inputs, extended)
        # Of two operands, the reverse is the only other order.
        if node.kind in _COMMUTATIVE:
            yield from _match_all(graph, self.inputs, node.inputs[::-1], extended)

    def _fits(self, graph: Graph, node: Node, result: str) -> bool:
        # Optional inputs after the described ones are permitted, further operands are not.
        if result != node.outputs[0] or len(node.inputs) < len(self.inputs):
            return False
        if node.kind in _COMMUTATIVE and len(node.inputs) > len(self.inputs):
            return False
        return self.where is None or self.where(graph, node)


@dataclass(frozen=True, kw_only=True)
class _Either(Pattern):
    alternatives: Sequence[Pattern]

    def _matches(self, graph: Graph, result: str, partial: Match) -> Iterator[Match]:
        for alternative in self.alternatives:
            yield from alternative.matches(graph, result, partial)


def _match_all(
    graph: Graph, patterns: Sequence[Pattern], tensors: Sequence[str], partial: Match
) -> Iterator[Match]:
    """Yield the matches of patterns, each for its tensor.

    Args:
        tensors: names of the tensors, at least one per pattern.
        partial: the match so far, which every match extends.
    """
    if not patterns:
        yield partial
        return
    # Each match of the first operand binds names for the others: a failure there tries the next
    # one.
    for match in patterns[0].matches(graph, tensors[0], partial):
        yield from _match_all(graph, patterns[1:], tensors[1:], match)
