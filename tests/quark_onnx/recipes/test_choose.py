"""Which recipe fits a model that runs on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
from onnx import ModelProto

from quark_onnx import quantize
from quark_onnx.common.registry import RECIPES
from quark_onnx.recipes import choose
from tests.models import parse, samples, weight

CONSTANTS = {
    "k": weight(8, 3, 3, 3),
    "l": weight(4, 8, 1, 1),
    "d": weight(8, 1, 1, 1),
    "r": weight(3, 8, 1, 1),
    "u": weight(12, 8, 1, 1),
    "s": weight(8, 3, 5),
    "v": weight(4, 8, 1),
}
IMAGE = "float[1,3,8,8] x"
#: Body, input, output and the name of the recipe.
MODELS = {
    "plain": ("a = Conv (x, k) b = Relu (a) y = Conv (b, l)", IMAGE, "classifier"),
    "depthwise": (
        "a = Conv (x, k) b = Conv <group = 8> (a, d) y = Conv (b, l)",
        IMAGE,
        "classifier",
    ),
    "three heads": (
        "a = Conv (x, k) b = Conv (a, l) c = Conv (a, l) e = Conv (a, l) y = Concat"
        " <axis = 1> (b, c, e)",
        IMAGE,
        "detector",
    ),
    "attention": (
        "a = Conv (x, k) b = Transpose <perm = [0,1,3,2]> (a) c = MatMul (a, b) e ="
        " Softmax (c) y = MatMul (e, a)",
        IMAGE,
        "transformer",
    ),
    "denoising": (
        "a = Conv <pads = [1,1,1,1]> (x, k) b = Relu (a) y = Conv (b, r)",
        IMAGE,
        "superres",
    ),
    "upsampling": (
        "a = Conv <pads = [1,1,1,1]> (x, k) b = Conv (a, u) y = DepthToSpace"
        " <blocksize = 2> (b)",
        IMAGE,
        "superres",
    ),
    "sound": (
        "a = Conv (x, s) b = Relu (a) y = Conv (b, v)",
        "float[1,3,40] x",
        "speech",
    ),
}


def model_of(name: str) -> ModelProto:
    body, given, _ = MODELS[name]
    used: dict[str, Any] = {
        key: value
        for key, value in CONSTANTS.items()
        if f" {key})" in body or f" {key}," in body
    }
    size = {"denoising": 8, "upsampling": 16}.get(name)
    result = f"float[1,3,{size},{size}] y" if size else "y"
    model = parse(f"g ({given}) => ({result}) {{ {body} }}", **used)
    model.graph.output[0].type.tensor_type.elem_type = 1
    return model


@pytest.mark.parametrize("name", MODELS)
def test_by_what_a_model_has(name: str) -> None:
    found = choose(model_of(name))
    assert found.recipe is RECIPES[MODELS[name][2]]
    assert found.config == found.recipe.config
    assert str(found) == f"recipe {MODELS[name][2]}: {found.reason}" and found.reason


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_quantizes(name: str) -> None:
    model = model_of("attention" if name == "transformer" else "plain")
    recipe = RECIPES[name]
    result = quantize(model, samples(model, 24), recipe.config)
    assert result.report.worst_sqnr > 10
    assert recipe.advice and recipe.models and recipe.source


def test_a_transformer_has_integers_in_products_alone() -> None:
    model = model_of("attention")
    report = quantize(model, samples(model, 24), choose(model).config).report
    done = {kind for kind, (count, _) in report.operators.items() if count}
    assert done == {"Conv", "MatMul"}


def test_for_a_processor_a_transformer_is_integers_throughout() -> None:
    """What stays float between products runs on the CPU there; engines on CPUs take it."""
    model = model_of("attention")
    for target in ("phx", "stx"):
        choice = choose(model, target)
        assert choice.recipe is RECIPES["transformer"] and choice.config.op_types == ()
    assert choose(model, "openvino").config.op_types == choose(model).config.op_types
    assert RECIPES["transformer"].instead("stx") == ""
