"""Microscaling formats in whole models: who computes which rule for shared exponents, and what
weights become.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper

from quark_onnx import Override, QConfig, QuantizationSpec, quantize
from quark_onnx.common.errors import ConfigError
from quark_onnx.config import from_dict, to_dict
from quark_onnx.functions import DOMAIN
from quark_onnx.functions.mx import NAME, OWN
from quark_onnx.kernels.blockfloat import better_mx, mx
from tests.models import Array, normal, parse, run, weight

W = weight(64, 48)


def layer(w: Array = W) -> ModelProto:
    return parse(
        "g (float[1,64] x) => (float[1,48] y) { [layer] y = MatMul (x, w) }", w=w
    )


def expected(w: Array, x: Array, element: str, rule: str) -> Array:
    """What the layer makes of a rounded weight, where x and y are rounded, too."""
    return mx(
        run(layer(w), {"x": mx(x, 1, element, exponent=rule)})[0],
        1,
        element,
        exponent=rule,
    )


def nodes(config: QConfig) -> tuple[ModelProto, dict[str, tuple[str, str]]]:
    """The result; domain and rule of the nodes that round x and w."""
    model = quantize(layer(), [{"x": normal(1, 64)}], config).model
    found = {}
    for node in model.graph.node:
        if node.op_type == NAME:
            rule = next(
                (each.s.decode() for each in node.attribute if each.name == "exponent"),
                "",
            )
            found[node.input[0].removesuffix("_rounded")] = (node.domain, rule)
    return model, {name: found[name] for name in "xw"}


def constant(model: ModelProto, name: str) -> Array:
    return next(
        numpy_helper.to_array(each)
        for each in model.graph.initializer
        if each.name == name
    )


RULES = {
    "MXFP8E4M3": "rceil",
    "MXFP8E5M2": "even",
    "MXFP6E3M2": "even",
    "MXFP6E2M3": "even",
    "MXFP4E2M1": "even",
}


@pytest.mark.parametrize("preset", RULES)
def test_by_default_each_side_has_what_has_least_error(preset: str) -> None:
    model, found = nodes(QConfig.of(preset))
    assert found == {"x": (OWN, RULES[preset]), "w": (DOMAIN, "")}
    element = f"fp{preset[4]}_{preset[5:].lower()}"
    stored = constant(model, "w_rounded")
    np.testing.assert_array_equal(stored, better_mx(W, 0, element))
    x = normal(1, 64, seed=5)
    np.testing.assert_array_equal(
        run(model, {"x": x})[0], expected(stored, x, element, RULES[preset])
    )


def test_of_64ths_the_vendors_rule_has_least_error() -> None:
    _, found = nodes(QConfig.of("MXINT8"))
    assert found == {"x": (DOMAIN, ""), "w": (DOMAIN, "")}


@pytest.mark.parametrize("change", [{"form": "vendor"}, {"functions": False}], ids=str)
def test_what_the_vendors_operator_computes_has_its_rule(
    change: dict[str, Any],
) -> None:
    model, found = nodes(QConfig.of("MXFP8E4M3").with_(**change))
    assert found == {"x": (DOMAIN, ""), "w": (DOMAIN, "")}
    np.testing.assert_array_equal(
        constant(model, "w_rounded"), better_mx(W, 0, "fp8_e4m3")
    )


@pytest.mark.parametrize("rule", ["floor", "even", "ceil", "rceil"])
def test_both_sides_may_be_told(rule: str) -> None:
    plain = QConfig.of("MXFP8E4M3")
    assert plain.activation is not None and plain.weight is not None
    model, found = nodes(
        plain.with_(
            activation=plain.activation.with_(exponent=rule),
            weight=plain.weight.with_(exponent=rule),
        )
    )
    assert set(found.values()) == {(DOMAIN, "") if rule == "floor" else (OWN, rule)}
    x = normal(1, 64, seed=5)
    stored = mx(W, 0, "fp8_e4m3", exponent=rule)
    np.testing.assert_array_equal(
        run(model, {"x": x})[0], expected(stored, x, "fp8_e4m3", rule)
    )


def test_a_rule_is_read_from_a_dictionary() -> None:
    config = from_dict({"preset": "MXFP8E4M3", "activation": {"exponent": "even"}})
    assert config.activation is not None and config.activation.exponent == "even"
    assert from_dict(to_dict(config)) == config


def test_a_rule_belongs_to_its_format() -> None:
    spec = QuantizationSpec("mxfp8e4m3", exponent="ceil")
    assert spec.with_(dtype="int8").exponent == "auto"
    assert not spec.alike(spec.with_(exponent="even"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: QuantizationSpec("mxfp8e4m3", exponent="up"),
            "exponent is 'up'; it must be one of: auto, best",
        ),
        (
            lambda: QuantizationSpec("int8", exponent="even"),
            "it is for microscaling formats, int8 is none",
        ),
        (
            lambda: QuantizationSpec("mx9", exponent="even"),
            "it is for microscaling formats, mx9 is none",
        ),
        (
            lambda: QConfig(QuantizationSpec("mxfp4e2m1", exponent="best")),
            "each run computes it, by one rule",
        ),
        (
            lambda: QConfig(
                QuantizationSpec("mxfp4e2m1", exponent="even"), form="vendor"
            ),
            "activation: exponent is 'even'; AMD's operator, which form vendor .* has floor",
        ),
        (
            lambda: QConfig(
                functions=False,
                overrides=(
                    Override(
                        op_types=["Conv"],
                        weight=QuantizationSpec("mxfp4e2m1", exponent="ceil"),
                    ),
                ),
            ),
            "weight: exponent is 'ceil'; AMD's operator",
        ),
    ],
)
def test_rules_that_nobody_computes(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
