"""choose: the recipe for a model on a Ryzen AI processor."""

from __future__ import annotations

from pathlib import Path

from onnx import ModelProto

from quark_onnx.common.registry import NPU_RECIPES
from quark_onnx.recipes.choose import Choice, structure
from quark_onnx.recipes.kind import kind_of
from quark_onnx.targets.target import npu_of

#: Closest recipes for kinds of models without a recipe of the vendor.
_NEAREST = {"speech": "classifier", "superres": "classifier"}


def choose(model: str | Path | ModelProto, target: str = "stx") -> Choice:
    """Return the recipe for a float model.

    Args:
        model: a path or a float model.
        target: name of the target.

    Returns:
        The recipe, its configuration for the target, and the reason.

    Raises:
        ConfigError: the target is unknown.
        ModelError: the model cannot be read.

    >>> from onnx import parser
    >>> text = "g (float[1,3,9,9] x) => (float[1,8,7,7] y) <float[8,3,3,3] w> { y = Conv (x, w) }"
    >>> str(choose(parser.parse_model(f'<ir_version: 9, opset_import: ["": 17]> {text}')))
    'recipe classifier: 1 convolution, 0 of them depthwise'
    """
    npu_of(target)  # an unknown target raises ConfigError before the model is read
    kind, reason = kind_of(structure(model))
    recipe = NPU_RECIPES[_NEAREST.get(kind, kind)]
    reasons = filter(None, (reason, recipe.instead(target)))
    return Choice(recipe, recipe.config_for(target), "; ".join(reasons))
