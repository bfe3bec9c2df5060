"""Constraints of the integer engine: the bounds that its reference states, and positions under
which all hold.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quark_onnx.common.errors import ConstraintError
from quark_onnx.graph import Graph, Node
from quark_onnx.targets import Constraints, Positions, constraints_of
from quark_onnx.targets.constraints import Near, Shift
from tests.models import parse

EXAMPLES = settings(deadline=None, derandomize=True)


class Named:
    """Each tensor has a position under its own name, but those that are said to have none."""

    def __init__(self, *without: str, leaks: bool = False) -> None:
        self._without, self._leaks = without, leaks

    def read(self, node: Node, index: int) -> str | None:
        return None if node.input(index) in self._without else node.input(index)

    def result(self, node: Node) -> str | None:
        return None if node.outputs[0] in self._without else node.outputs[0]

    def leaks(self, node: Node) -> bool:
        return self._leaks


def constraints(text: str, **settings: Any) -> Constraints:
    """Those of nodes between inputs a, b, c and an output o."""
    graph = Graph.of(
        parse(
            "g (float[1,4,8,8] a, float[1,4,8,8] b, float[4] c) => (float[1,4,8,8] o)"
            f" {{ {text} }}"
        )
    )
    return constraints_of(graph, graph.nodes, Named(**settings))


SIXTH = "HardSigmoid <alpha = 0.16666667, beta = 0.5> (a)"
#: node, positions that hold, positions that do not, the rule, and where they are settled
CASES: dict[str, tuple[str, list[int], list[int], str, list[int]]] = {
    "concat": ("o = Concat <axis = 1> (a, b)", [3, 3, 3], [3, 5, 4], "C1", [3, 3, 3]),
    "max pool": (
        "o = MaxPool <kernel_shape = [1,1]> (a)",
        [3, 3],
        [3, 4],
        "C2",
        [3, 3],
    ),
    "average": (
        "o = AveragePool <kernel_shape = [1,1]> (a)",
        [4, 4],
        [6, 4],
        "C2",
        [4, 4],
    ),
    "global average": ("o = GlobalAveragePool (a)", [4, 4], [4, 9], "C2", [4, 4]),
    "pad": ("o = Pad <pads = [0,0,0,0,0,0,0,0]> (a)", [3, 3], [3, 4], "C3", [3, 3]),
    "slice": ("o = Slice (a, b)", [3, 0, 3], [3, 0, 4], "C4", [3, 0, 3]),
    "sum read": ("o = Add (a, b)", [0, 7, 0], [0, 8, 0], "C5", [0, 7, 0]),
    "difference read": ("o = Sub (a, b)", [9, 2, 0], [12, 2, 0], "C5", [9, 2, 0]),
    "sum coarse": ("o = Add (a, b)", [30, 31, 5], [30, 31, 4], "C6", [30, 31, 5]),
    "sum fine": ("o = Add (a, b)", [3, 4, 10], [3, 4, 11], "C6", [3, 4, 10]),
    "product coarse": ("o = Mul (a, b)", [20, 16, 4], [20, 16, 3], "C6", [20, 16, 4]),
    "product fine": ("o = Mul (a, b)", [3, 4, 7], [3, 4, 8], "C6", [3, 4, 7]),
    "square": ("o = Mul (a, a)", [3, 6], [3, 7], "C6", [3, 6]),
    "conv, fine weight": ("o = Conv (a, b)", [8, 12, 4], [8, 13, 4], "C7", [8, 12, 4]),
    "conv, coarse weight": ("o = Conv (a, b)", [3, 4, 7], [3, 2, 7], "C7", [3, 4, 7]),
    "gemm": ("o = Gemm (a, b)", [8, 12, 4], [8, 15, 4], "C7", [8, 12, 4]),
    "bias, coarse": (
        "o = Conv (a, b, c)",
        [8, 9, 2, 4],
        [8, 9, 1, 4],
        "C8",
        [8, 9, 2, 4],
    ),
    "bias, fine": (
        "o = Conv (a, b, c)",
        [8, 9, 20, 4],
        [8, 9, 21, 4],
        "C8",
        [8, 9, 20, 4],
    ),
    "gate, wide input": (f"o = {SIXTH}", [0, 7], [-2, 7], "C9", [0, 7]),
    "gate, narrow input": (f"o = {SIXTH}", [15, 9], [18, 9], "C9", [15, 9]),
    "gate, coarse": (f"o = {SIXTH}", [3, 7], [3, 5], "C9", [3, 7]),
    "gate, fine": (f"o = {SIXTH}", [1, 15], [1, 17], "C9", [1, 15]),
    "swish": (f"s = {SIXTH} o = Mul (a, s)", [8, 7, 0], [9, 7, 0], "C10", [9, 7, 1]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_rule_at_a_node(case: str) -> None:
    text, good, bad, rule, settled = CASES[case]
    found = constraints(text)
    names = [
        name
        for name in "abcso"
        if name in {key for key in found.keys if isinstance(key, str)}
    ]
    values = [
        value
        for name, value in zip(_all_names(text), good, strict=True)
        if name in names
    ]
    assert not found.broken(dict(zip(names, values, strict=True)))
    at: Positions = dict(zip(_all_names(text), bad, strict=True))
    broken = found.broken(at)
    assert {each.rule for each, _ in broken} == {rule}
    assert all(figures for _, figures in broken)
    assert list(found.settle(at).values()) == settled and list(at.values()) == bad, (
        "what was given stays"
    )


def _all_names(text: str) -> list[str]:
    graph = Graph.of(
        parse(
            "g (float[1,4,8,8] a, float[1,4,8,8] b, float[4] c) => (float[1,4,8,8] o)"
            f" {{ {text} }}"
        )
    )
    read = {name for node in graph.nodes for name in (*node.inputs, *node.outputs)}
    return [name for name in "abcso" if name in read]


NONE = {
    "an ordinary HardSigmoid": "o = HardSigmoid <alpha = 0.2> (a)",
    "no rule": "o = Relu (a)",
    "the difference is not shifted": "o = Sub (a, b)",
}


@pytest.mark.parametrize("text", NONE.values(), ids=NONE)
def test_operators_without_a_rule(text: str) -> None:
    assert not constraints(text).broken({"a": 0, "b": 0, "o": 90})


@pytest.mark.parametrize("without", ["a", "b", "o"])
def test_what_has_no_position_is_left_out(without: str) -> None:
    graph = Graph.of(
        parse(
            "g (float[1,4,8,8] a, float[4,4,1,1] b) => (float[1,4,8,8] o) { o = Conv"
            " (a, b) }"
        )
    )
    assert not constraints_of(graph, graph.nodes, Named(without)).found


@EXAMPLES
@given(st.lists(st.integers(-20, 40), min_size=4, max_size=4), st.booleans())
def test_the_bias_has_the_bounds_of_the_reference(
    values: list[int], leaks: bool
) -> None:
    """w + i - b between min(0, -(24 - (8 + shift_cut))), or 0 in front of a LeakyRelu, and 15."""
    graph = Graph.of(
        parse(
            "g (float[1,4,8,8] a, float[4,4,1,1] b, float[4] c) => (float[1,4,8,8] o) {"
            " o = Conv (a, b, c) }"
        )
    )
    found = constraints_of(graph, graph.nodes, Named(leaks=leaks))
    i, w, b, o = values
    cut = w + i - o
    broken = {
        each.rule for each, _ in found.broken(dict(zip("abco", values, strict=True)))
    }
    assert ("C7" in broken) == (not 0 <= cut <= 16)
    if "C7" not in broken:
        least = 0 if leaks else min(0, -(24 - (8 + cut)))
        assert ("C8" in broken) == (not least <= w + i - b <= 15)


NET = """
    p = Conv (a, b)  q = MaxPool <kernel_shape = [1,1]> (p)  r = Conv (q, b2)  s = Add (q, r)
    t = HardSigmoid <alpha = 0.16666667, beta = 0.5> (s)  u = Mul (s, t)  v = Concat <axis = 1> (u, r)
    w = GlobalAveragePool (v)  o = Sub (w, s)
"""  # noqa: E501


@EXAMPLES
@given(st.data())
def test_settled_positions_meet_all_rules(data: st.DataObject) -> None:
    found = constraints(NET)
    at: Positions = {key: data.draw(st.integers(-8, 20)) for key in found.keys}
    settled = found.settle(at)
    assert not found.broken(settled)
    assert settled.keys() == at.keys()
    if not found.broken(at):
        assert settled == at
    for group in found.tied().values():
        assert len({settled[key] for key in group}) == 1


#: What is coarse has to become finer: coarser positions of a product only make its factors coarser
#: in turn.
PRODUCTS = {
    "a square beside its root": (
        "s = Mul (a, a)  o = Add (a, s)",
        {"a": -5, "s": -16, "o": -16},
    ),
    "a gate behind it": (
        f"s = Mul (b, b)  t = Add (s, b)  o = {SIXTH.replace('(a)', '(t)')}",
        {"b": -4, "s": -8, "t": -9, "o": 7},
    ),
    "joined with its factors": (
        "s = Mul (a, b)  o = Concat <axis = 1> (a, b, s)",
        {"a": -19, "b": 21, "s": 8, "o": 0},
    ),
}


@pytest.mark.parametrize(("text", "at"), PRODUCTS.values(), ids=PRODUCTS)
def test_products_are_settled_wherever_they_can_be(text: str, at: Positions) -> None:
    found = constraints(text)
    assert found.broken(at) and not found.broken(found.settle(at))


def test_rules_that_no_positions_meet_are_an_error_that_names_them() -> None:
    up = Shift("C6", "sum", ("b",), ("a",), 5, None, "b")
    with pytest.raises(ConstraintError, match=r"C1 at 'join' \(concat"):
        Constraints([Near("C1", "join", ("a", "b")), up]).settle({"a": 0, "b": 0})
    away = Shift("C7", "conv", ("b",), ("a",), 1, None, "b")
    other = Shift("C7", "other", ("a",), ("b",), 1, None, "a")
    with pytest.raises(
        ConstraintError,
        match="no power-of-two scales meet these rules together: C7 at 'conv'",
    ):
        Constraints([away, other]).settle({"a": 0, "b": 0})


def test_ties_reach_through_several_nodes() -> None:
    found = constraints(
        "p = MaxPool <kernel_shape = [1,1]> (a) q = Concat <axis = 1> (p, b) r = Relu"
        " (q) o = GlobalAveragePool (r)"
    )
    assert set(found.tied()["a"]) == {"a", "p", "b", "q"} and set(
        found.tied()["o"]
    ) == {"r", "o"}
    assert "c" not in found.tied()
