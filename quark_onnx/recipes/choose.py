"""The choice of a recipe from a model's structure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from onnx import ModelProto

from quark_onnx.check.inlined import inlined
from quark_onnx.common.registry import RECIPES
from quark_onnx.config import QConfig
from quark_onnx.files.io import load
from quark_onnx.graph import Graph, gather_constants
from quark_onnx.recipes.kind import kind_of
from quark_onnx.recipes.recipe import Recipe


@dataclass(frozen=True)
class Choice:
    """A recipe, and the reason for the choice.

    Attributes:
        recipe: the recipe of the model's kind.
        config: its configuration, in a format that the target takes; without the target.
        reason: the properties of the model and the consequence, in words; empty where the user
            chose, and the target takes the recipe's preset.
    """

    recipe: Recipe
    config: QConfig
    reason: str

    @property
    def described(self) -> str:
        """Return the name with the reason, if there is one."""
        return ": ".join(filter(None, (self.recipe.name, self.reason)))

    def __str__(self) -> str:
        return f"recipe {self.described}"


def structure(model: str | Path | ModelProto) -> Graph:
    """Return the graph of a model file, as read by the choice of a recipe.

    Args:
        model: a file, or a model, which is not changed.

    Raises:
        ModelError: the model cannot be read.
    """
    # Functions of a model hide its operators, and Constant nodes its weights.
    graph = Graph.of(inlined(load(model)))
    gather_constants(graph)
    return graph


def choose(model: str | Path | ModelProto, target: str = "") -> Choice:
    """Return the recipe for a float model on a CPU.

    Args:
        model: a file, or a model, which is not changed.
        target: name of the target, in whose format the configuration is; empty for none.

    Raises:
        ConfigError: the target is unknown.
        ModelError: the model cannot be read.
    """
    kind, reason = kind_of(structure(model))
    # Depthwise networks need another format on an NPU alone; on a CPU they are classifiers.
    name = "classifier" if kind == "depthwise" else kind
    recipe = RECIPES[name]
    reasons = filter(None, (reason, recipe.instead(target)))
    return Choice(recipe, recipe.config_for(target), "; ".join(reasons))
