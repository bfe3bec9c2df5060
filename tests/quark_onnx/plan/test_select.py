"""Which nodes a setting reaches: by name, glob, regular expression, operator type, and between two
sets of nodes.
"""

from __future__ import annotations

from typing import Any

import pytest

from quark_onnx import Override, QConfig, QuantizationSpec
from quark_onnx.common.errors import ConfigError
from quark_onnx.graph import Graph
from quark_onnx.plan.select import select
from tests.models import parse

#     x -> /a/conv -> p -+-> /b/relu -> q -> /b/exp -> r -> /join -> y
#                        +-> /c/neg  -> s -----------------^
GRAPH = Graph.of(
    parse(
        """g (float[2] x) => (float[2] y) {
            ["/a/conv"] p = Abs (x)
            ["/b/relu"] q = Relu (p)
            ["/b/exp"] r = Exp (q)
            ["/c/neg"] s = Neg (p)
            ["/join"] y = Add (r, s)
        }"""
    )
)
ALL = ["/a/conv", "/b/relu", "/b/exp", "/c/neg", "/join"]
SPEC = QuantizationSpec("int16")


def excluded(**where: Any) -> list[str]:
    config = QConfig(overrides=(Override(keep=True, **where),))
    return [
        node.name
        for node, spec in select(GRAPH, config).items()
        if spec.keep == "excluded"
    ]


@pytest.mark.parametrize(
    ("pattern", "hits"),
    [
        ("/join", ["/join"]),
        ("/b/*", ["/b/relu", "/b/exp"]),
        ("*e*", ["/b/relu", "/b/exp", "/c/neg"]),
        ("/?/[rn]e*", ["/b/relu", "/c/neg"]),
        ("re:^/[ab]/", ["/a/conv", "/b/relu", "/b/exp"]),
        ("re:x", ["/b/exp"]),
    ],
)
def test_by_name_glob_and_regular_expression(pattern: str, hits: list[str]) -> None:
    assert excluded(nodes=pattern) == hits


def test_by_operator_type() -> None:
    assert excluded(op_types=("Exp", "Neg")) == ["/b/exp", "/c/neg"]


@pytest.mark.parametrize(
    ("starts", "ends", "hits"),
    [
        ("/b/relu", "/join", ["/b/relu", "/b/exp", "/join"]),
        (
            "p",
            "y",
            ["/b/relu", "/b/exp", "/c/neg", "/join"],
        ),  # tensors: those who read p, up to the maker of y
        ("x", "q", ["/a/conv", "/b/relu"]),
        (["/b/exp", "/c/neg"], "y", ["/b/exp", "/c/neg", "/join"]),
        ("/b/exp", "/b/exp", ["/b/exp"]),
    ],
)
def test_between(starts: Any, ends: Any, hits: list[str]) -> None:
    assert excluded(between=(starts, ends)) == hits


def test_any_of_the_three_matches() -> None:
    assert excluded(nodes="/join", op_types="Exp", between=("x", "p")) == [
        "/a/conv",
        "/b/exp",
        "/join",
    ]


def test_a_later_override_wins() -> None:
    config = QConfig(
        overrides=(Override("/b/*", keep=True), Override("/b/exp", activation=SPEC)),
        exclude="/join",
    )
    chosen = {node.name: spec for node, spec in select(GRAPH, config).items()}
    assert chosen["/b/relu"].keep == chosen["/join"].keep == "excluded"
    assert (chosen["/b/exp"].keep, chosen["/b/exp"].activation) == ("", SPEC)
    assert chosen["/a/conv"].activation == config.activation


def test_overrides_add_up() -> None:
    config = QConfig(
        overrides=(Override("/b/*", activation=SPEC), Override("/b/exp", weight=SPEC))
    )
    chosen = {node.name: spec for node, spec in select(GRAPH, config).items()}
    assert (chosen["/b/exp"].activation, chosen["/b/exp"].weight) == (SPEC, SPEC)
    assert (chosen["/b/relu"].activation, chosen["/b/relu"].weight) == (
        SPEC,
        config.weight,
    )


def test_only_what_is_asked_for() -> None:
    chosen = {
        node.name: spec.keep
        for node, spec in select(GRAPH, QConfig(nodes=("/b/*", "/join"))).items()
    }
    assert [name for name, keep in chosen.items() if not keep] == [
        "/b/relu",
        "/b/exp",
        "/join",
    ]
    chosen = {
        node.name: spec.keep
        for node, spec in select(GRAPH, QConfig(op_types=("Relu", "Add"))).items()
    }
    assert [name for name, keep in chosen.items() if not keep] == ["/b/relu", "/join"]
    assert chosen["/a/conv"] == "its operator type was not asked for"


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (
            {"nodes": "/b/rel"},
            "no node of the model matches '/b/rel'; did you mean '/b/relu'?",
        ),
        ({"nodes": "/z/*"}, "no node of the model matches '/z/*'"),
        ({"nodes": "re:^z"}, "no node of the model matches 're:^z'"),
        (
            {"nodes": ("/join", "/jion")},
            "no node of the model matches '/jion'; did you mean '/join'?",
        ),
        ({"nodes": "re:("}, "'re:(' is not a valid regular expression: "),
        (
            {"op_types": "Expp"},
            "the model has no operator of type 'Expp'; did you mean 'Exp'?",
        ),
        ({"op_types": "Conv"}, "the model has no operator of type 'Conv'"),
        (
            {"between": ("/b/rel", "y")},
            "between: '/b/rel' is no node or tensor of the model; did you mean '/b/relu'?",
        ),
        ({"between": ("x", "x")}, "between: no node computes 'x'"),
        (
            {"between": ("/join", "/a/conv")},
            "no node lies between /join .. /a/conv; is a start downstream of an end?",
        ),
    ],
)
def test_what_matches_nothing(where: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        excluded(**where)
    assert str(error.value).startswith(message)


def test_excluding_nothing_is_an_error_too() -> None:
    with pytest.raises(ConfigError, match="no node of the model matches 'jion'"):
        select(GRAPH, QConfig(exclude="jion"))
    with pytest.raises(ConfigError, match="no node of the model matches 'jion'"):
        select(GRAPH, QConfig(nodes="jion"))


def test_operator_types_that_the_model_lacks_altogether() -> None:
    """A list that serves many models may name more types than one of them has.

    But not only such.
    """
    assert [
        spec.keep for spec in select(GRAPH, QConfig(op_types=("Conv", "Relu"))).values()
    ].count("") == 1
    with pytest.raises(
        ConfigError,
        match="no operator of type Conv or MatMul: nothing would be quantized",
    ):
        select(GRAPH, QConfig(op_types=("Conv", "MatMul")))
