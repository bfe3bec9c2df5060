"""Extension points of the package: the registries and their contents.

Packages add to a registry by entry points of its group (docs/extending.md). The registry of
calibrators is ``calibrators.CALIBRATORS``.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

import calibrators.registry
from quark_onnx.common.errors import ConfigError

T = TypeVar("T")


class Registry(calibrators.registry.Registry[T]):
    """Named values of a kind, with the package's errors."""

    # The base class raises the error of its subclass, so that messages are of this package.
    error: ClassVar[type[Exception]] = ConfigError


#: Number formats: name -> DType.
DTYPES: Registry[Any] = Registry(
    "number format", plugins="quark_onnx.formats", spelling=str.lower
)
#: Configurations by name: name -> QConfig.
PRESETS: Registry[Any] = Registry(
    "preset", plugins="quark_onnx.presets", spelling=str.upper
)
#: Rules for the tensors of an operator: operator type -> rule(node, plan).
RULES: Registry[Any] = Registry("operator", plugins="quark_onnx.rules")
#: Rewrites of the float graph: name -> pass(graph) -> number of rewrites.
PASSES: Registry[Any] = Registry("pass")
#: Optimizers of ONNX models: name -> a frozen dataclass.
OPTIMIZERS: Registry[Any] = Registry(
    "optimizer", plugins="quark_onnx.optimizers", spelling=str.lower
)
#: Algorithms for PyTorch models, which choose codes or reduce rounding errors: name -> a frozen
#: dataclass.
ALGORITHMS: Registry[Any] = Registry(
    "algorithm",
    home="quark_onnx.torch.algorithms.registered",
    plugins="quark_onnx.algorithms",
    spelling=str.lower,
)
#: Targets of quantization: name -> Target.
TARGETS: Registry[Any] = Registry("target")
#: Conversions of a model: name -> Conversion.
CONVERSIONS: Registry[Any] = Registry("conversion")
#: Engines that run models: name -> the class of an open model.
ENGINES: Registry[Any] = Registry(
    "engine", plugins="quark_onnx.engines", spelling=str.lower
)
#: Recipes by kind of model: name -> Recipe.
RECIPES: Registry[Any] = Registry("recipe", "quark_onnx.recipes.recipe")
#: Recipes for Ryzen AI processors.
NPU_RECIPES: Registry[Any] = Registry("NPU recipe", "quark_onnx.npu.recipes")
