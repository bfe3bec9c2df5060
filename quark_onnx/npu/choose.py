"""choose: the recipe for a model, by what it is made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from onnx import ModelProto

from quark_onnx.config import QConfig
from quark_onnx.graph import Graph, Node, gather_constants, inlined, reach
from quark_onnx.graph.io import load
from quark_onnx.npu.recipes import Recipe
from quark_onnx.patterns.conv_and_gemm import LAYERS
from quark_onnx.registry import RECIPES, TARGETS

_ATTENTION = frozenset(
    {
        "Attention",
        "MultiHeadAttention",
        "GroupQueryAttention",
        "EmbedLayerNormalization",
    },
)
#: So many last products have detectors, which predict boxes and scores at several sizes, and
#: nothing else has.
_HEADS = 3
#: The share of a network's convolutions that are depthwise from which on it is called one of those.
_SHARE = 0.25


@dataclass(frozen=True)
class Choice:
    """A recipe, and why.

    Attributes:
        recipe: for models of that kind.
        config: its configuration, in a format that the target takes; the target itself is still to
            be set.
        reason: what the model has, and what follows, in words.
    """

    recipe: Recipe
    config: QConfig
    reason: str

    def __str__(self) -> str:
        return f"recipe {self.recipe.name}: {self.reason}"


def choose(model: str | Path | ModelProto, target: str = "stx") -> Choice:
    """The recipe for a float model.

    Raises:
        ConfigError: there is no such target.
        ModelError: the model cannot be read.

    >>> from onnx import parser
    >>> text = "g (float[1,3,9,9] x) => (float[1,8,7,7] y) <float[8,3,3,3] w> { y = Conv (x, w) }"
    >>> str(choose(parser.parse_model(f'<ir_version: 9, opset_import: ["": 17]> {text}')))
    'recipe classifier: 1 convolutions, 0 of them depthwise'
    """
    row = TARGETS[target]
    graph = Graph.of(inlined(load(model)))
    gather_constants(graph)
    name, reason = _kind(graph)
    recipe = RECIPES[name]
    if recipe.preset in row.presets:
        return Choice(recipe, recipe.config, reason)
    preset = row.presets[0]
    config = QConfig.of(preset).with_(optimizers=recipe.optimizers)
    return Choice(
        recipe,
        config,
        f"{reason}; {target} does not take {recipe.preset}, so it is {preset}",
    )


def _kind(graph: Graph) -> tuple[str, str]:
    """The name of a recipe, and what speaks for it."""
    attention = [node for node in graph.nodes if _attends(graph, node)]
    if attention:
        return (
            "transformer",
            f"{len(attention)} products of activations, as attention has them",
        )
    products = [node for node in graph.nodes if node.kind in LAYERS]
    convolutions = [node for node in products if node.kind == "Conv"]
    last = _last(graph, products)
    if len(last) >= _HEADS and convolutions:
        return (
            "detector",
            f"{len(last)} last products in parallel, as the heads of a detector",
        )
    depthwise = [node for node in convolutions if _is_depthwise(graph, node)]
    reason = f"{len(convolutions)} convolutions, {len(depthwise)} of them depthwise"
    if depthwise and len(depthwise) >= _SHARE * len(convolutions):
        return "depthwise", reason
    return "classifier", reason


def _attends(graph: Graph, node: Node) -> bool:
    return node.kind in _ATTENTION or (
        node.kind == "MatMul" and not any(map(graph.is_constant, node.inputs))
    )


def _last(graph: Graph, products: list[Node]) -> list[Node]:
    """Products that no other one reads, in however many steps."""
    behind = set(
        reach(
            [leader for node in products for leader in graph.leaders(node)],
            graph.leaders,
        ),
    )
    return [node for node in products if node not in behind]


def _is_depthwise(graph: Graph, node: Node) -> bool:
    weight = graph.shape(node.input(1)) or ()
    return len(weight) > 2 and weight[1] == 1 and weight[0] not in (1, None)
