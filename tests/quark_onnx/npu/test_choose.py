"""Which recipe fits a model, and why."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quark_onnx import npu
from quark_onnx.common.errors import ConfigError
from quark_onnx.config import QConfig
from tests.models import parse, weight

CONV = "a = Conv (x, k) "
MODELS = {
    "classifier": "b = Relu (a) y = Conv (b, l)",
    "depthwise": "b = Conv <group = 8> (a, d) y = Conv (b, l)",
    "detector": (
        "b = Conv (a, l) c = Conv (a, l) e = Conv (a, l) f = Sigmoid (b) y = Concat"
        " <axis = 1> (f, c, e)"
    ),
    "transformer": (
        "b = Transpose <perm = [0,1,3,2]> (a) c = MatMul (a, b) e = Softmax (c) y ="
        " MatMul (e, a)"
    ),
}
WHY = {
    "classifier": "2 convolutions, 0 of them depthwise",
    "depthwise": "3 convolutions, 1 of them depthwise",
    "detector": "3 parallel output heads",
    "transformer": "2 products of activations",
}


def model_of(body: str) -> Any:
    constants = {
        "k": weight(8, 3, 3, 3),
        "l": weight(4, 8, 1, 1),
        "d": weight(8, 1, 1, 1),
    }
    used = {
        name: value for name, value in constants.items() if f" {name})" in CONV + body
    }
    model = parse(f"g (float[1,3,8,8] x) => (y) {{ {CONV} {body} }}", **used)
    model.graph.output[0].type.tensor_type.elem_type = 1
    return model


@pytest.mark.parametrize("name", MODELS)
def test_by_what_a_model_has(name: str) -> None:
    found = npu.choose(model_of(MODELS[name]), "stx")
    assert (found.recipe.name, found.config) == (name, found.recipe.config)
    assert (
        found.reason.startswith(WHY[name])
        and str(found) == f"recipe {name}: {found.reason}"
    )


@pytest.mark.parametrize("name", ["detector", "transformer"])
def test_in_a_format_that_the_device_takes(name: str) -> None:
    found = npu.choose(model_of(MODELS[name]), "phx")
    assert found.config == QConfig.of("XINT8").with_(optimizers=found.recipe.optimizers)
    assert found.reason.endswith(
        f"phx does not take {found.recipe.preset}, so it is XINT8"
    )


def test_a_tail_that_is_shared_is_no_head() -> None:
    body = (
        "b = Conv (a, l) c = Conv (a, l) e = Conv (a, l) f = Concat <axis = 1> (b, c,"
        " e) y = Conv (f, m)"
    )
    constants = {
        "k": weight(8, 3, 3, 3),
        "l": weight(4, 8, 1, 1),
        "m": weight(2, 12, 1, 1),
    }
    model = parse(
        f"g (float[1,3,8,8] x) => (float[1,2,6,6] y) {{ {CONV} {body} }}", **constants
    )
    assert npu.choose(model).recipe.name == "classifier"


def test_without_products() -> None:
    model = parse(
        "g (float[1,3] x) => (float[1,3] y) { y = Add (x, c) }",
        c=np.ones(3, np.float32),
    )
    assert npu.choose(model).reason == "0 convolutions, 0 of them depthwise"
    with pytest.raises(ConfigError, match="'none'"):
        npu.choose(model, "none")
