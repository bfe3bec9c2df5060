"""Recipes: configurations by kind of model, and the detection of the kind."""

from quark_onnx.recipes.choose import Choice, choose
from quark_onnx.recipes.kind import KINDS, kind_of
from quark_onnx.recipes.recipe import Recipe

__all__ = ["KINDS", "Choice", "Recipe", "choose", "kind_of"]
