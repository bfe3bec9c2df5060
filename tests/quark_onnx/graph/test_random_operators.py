"""Models whose outputs may differ from run to run."""

from __future__ import annotations

import pytest

from quark_onnx.graph.random_operators import may_be_random
from tests.models import parse


@pytest.mark.parametrize(
    ("body", "random"),
    [
        ("y = Relu (x)", False),
        ("y = Dropout (x)", False),
        ("r = RandomNormalLike (x) y = Add (x, r)", True),
        ("y = Dropout (x, ratio, training)", True),
        ("y = custom.Anything (x)", True),
    ],
)
def test_random_operators(body: str, random: bool) -> None:
    model = parse(
        f"g (float[N] x, float ratio, bool training) => (float[N] y) {{ {body} }}"
    )
    assert may_be_random(model) is random


def test_random_operators_in_bodies() -> None:
    model = parse(
        """g (float[4] x, bool c) => (float[4] y) {
            y = If (c) <
                then_branch = t () => (float[4] a) { a = RandomUniformLike (x) },
                else_branch = e () => (float[4] b) { b = Relu (x) }
            >
        }"""
    )
    assert may_be_random(model)
