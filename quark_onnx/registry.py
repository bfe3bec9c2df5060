"""The extension points of the package in one list: every registry, and what goes into it.

Packages add to a registry by entry points of its group (docs/extending.md). The registry of
calibrators is ``calibrators.CALIBRATORS``.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

import calibrators.registry
from quark_onnx.errors import ConfigError

T = TypeVar("T")


class Registry(calibrators.registry.Registry[T]):
    """Named values of one kind, whose errors are those of this package."""

    error: ClassVar[type[Exception]] = ConfigError


#: Number formats: name -> DType.
DTYPES: Registry[Any] = Registry(
    "number format",
    plugins="quark_onnx.formats",
    spelling=str.lower,
)
#: Configurations by name: name -> QConfig.
PRESETS: Registry[Any] = Registry(
    "preset",
    plugins="quark_onnx.presets",
    spelling=str.upper,
)
#: What becomes of an operator's tensors: operator type -> rule(node, plan).
RULES: Registry[Any] = Registry("operator", plugins="quark_onnx.rules")
#: Rewrites of the float graph: name -> pass(graph) -> number of rewrites.
PASSES: Registry[Any] = Registry("pass")
#: What makes a quantized model better: name -> a frozen dataclass.
OPTIMIZERS: Registry[Any] = Registry(
    "optimizer",
    plugins="quark_onnx.optimizers",
    spelling=str.lower,
)
#: What chooses better codes for PyTorch models, or makes them easier to round: name -> a frozen
#: dataclass.
ALGORITHMS: Registry[Any] = Registry(
    "algorithm",
    home="quark_onnx.torch.algorithms.registered",
    plugins="quark_onnx.algorithms",
    spelling=str.lower,
)
#: What models are quantized for: name -> Target.
TARGETS: Registry[Any] = Registry("target")
#: What a model can be converted to: name -> Conversion.
CONVERSIONS: Registry[Any] = Registry("conversion")
#: Which configuration for which kind of model: name -> Recipe.
RECIPES: Registry[Any] = Registry("recipe", "quark_onnx.recipes.recipe")
#: The same for Ryzen AI processors.
NPU_RECIPES: Registry[Any] = Registry("NPU recipe", "quark_onnx.npu.recipes")
