"""Which configuration for which kind of model, and which kind a model is."""

from quark_onnx.recipes.choose import Choice, choose
from quark_onnx.recipes.kind import KINDS, kind_of
from quark_onnx.recipes.recipe import Recipe

__all__ = ["KINDS", "Choice", "Recipe", "choose", "kind_of"]
