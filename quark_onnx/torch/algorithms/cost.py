"""Cost of an algorithm in addition to running the model: memory and work.

The estimate needs only shapes and settings, and no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

#: Calls of operators in a block outside of products: norms, rotary embedding, activation,
#: residual sums, and the bookkeeping of the calibration.
_OPERATORS = 60
#: Elementwise passes over the logits of both models, in float64, to compare them; and over the
#: weights of the quantized model.
_SCORED, _DEQUANTIZED = 24, 6
#: Tokens that a block runs at once.
BATCH_TOKENS = 512
#: Cost of a backward pass in forward passes.
BACKWARD = 2
#: Elementwise passes over a weight per step of training, relative to rounding it once.
TRAINED = 4


@dataclass(frozen=True)
class Cost:
    """Additional memory and work of an algorithm.

    Attributes:
        memory: bytes.
        products: multiply-accumulate operations.
        roundings: number of weights that are rounded.
        columns: steps of a sweep over columns. Each step has a constant runtime if columns are
            short.
        elements: values that elementwise operators compute.
        operators: calls of operators outside of products. Each call has a constant runtime if
            tensors are small.
    """

    memory: int = 0
    products: float = 0.0
    roundings: float = 0.0
    columns: float = 0.0
    elements: float = 0.0
    operators: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        """Add the work, and take the maximum of the memory.

        Algorithms run in sequence, so that their memory is reused.
        """
        return Cost(
            max(self.memory, other.memory),
            self.products + other.products,
            self.roundings + other.roundings,
            self.columns + other.columns,
            self.elements + other.elements,
            self.operators + other.operators,
        )


@dataclass(frozen=True)
class Shapes:
    """Sizes of the model and the calibration data.

    Attributes:
        layers: (outputs, inputs) of the quantized matrices in blocks, by name.
        weights: number of weights in all blocks, with those that stay float.
        block: size of the largest block in bytes.
        tokens: number of calibration tokens.
        samples: number of calibration samples.
        attention: width of the queries of all blocks together.
        head: number of weights of the head; it runs in an evaluation only.
        vocabulary: number of outputs of the head.
        shares: share of the tokens that reach a module, by its name, for experts.
        idle: number of weights of experts that an average token does not reach.
    """

    layers: Mapping[str, tuple[int, int]]
    weights: int
    block: int
    tokens: int
    samples: int
    attention: int = 0
    head: int = 0
    vocabulary: int = 0
    shares: Mapping[str, float] = field(default_factory=dict)
    idle: int = 0

    @property
    def active(self) -> int:
        """Return the number of weights in all blocks that an average token reaches."""
        return self.weights - self.idle

    @property
    def length(self) -> float:
        """Return the number of tokens per sample."""
        return self.tokens / max(1, self.samples)

    @property
    def batches(self) -> int:
        """Return the number of batches in which the blocks run the samples."""
        # Short samples run together until a batch has BATCH_TOKENS tokens.
        together = max(1, int(BATCH_TOKENS // max(1.0, self.length)))
        if not self.tokens:
            return 0
        return -(-self.samples // together)

    def products(self, length: float) -> float:
        """Return the multiply-accumulates of all blocks for a token.

        Attention multiplies each query by the keys of all tokens of a sample, and the
        probabilities by the values.

        Args:
            length: tokens of a sample.
        """
        # Two products of (length, width) per token: queries by keys, and probabilities by values.
        return self.active + 2 * length * self.attention

    @cached_property
    def groups(self) -> dict[tuple[str, int], int]:
        """Return the sum of output channels per distinct input.

        Layers with the same parent and input width are assumed to share an input.
        """
        # q, k and v of a layer share an input, and so do gate and up: one Hessian serves each
        # group.
        groups = dict[tuple[str, int], int]()
        for name, (outputs, inputs) in self.layers.items():
            key = (name.rpartition(".")[0], inputs)
            groups[key] = groups.get(key, 0) + outputs
        return groups

    @property
    def blocks(self) -> int:
        """Return the number of blocks, by the first number in layer names."""
        return len({first_number(name) for name in self.layers})

    @property
    def count(self) -> int:
        """Return the number of quantized weights."""
        return sum(prod(shape) for shape in self.layers.values())

    @property
    def hessians(self) -> float:
        """Return the multiply-accumulates of accumulating the Hessians X^T X."""
        total = 0.0
        for parent, inputs in self.groups:
            # An expert sees its share of the tokens alone.
            total += inputs**2 * self.shares.get(parent, 1.0)
        return total * self.tokens

    @property
    def errors(self) -> float:
        """Return the multiply-accumulates of evaluating every layer's rounding error."""
        sizes = self.layers.values()
        # A row of E times H and times E: inputs^2 multiply-accumulates for each output.
        return float(sum(outputs * inputs**2 for outputs, inputs in sizes))

    @property
    def block_hessians(self) -> int:
        """Return the bytes of all Hessians of a block, in float32."""
        # Blocks are quantized one after the other, and their Hessians take the same memory.
        elements = sum(inputs**2 for _, inputs in self.groups)
        return 4 * elements // max(1, self.blocks)

    def runs(self, passes: float) -> Cost:
        """Return the work of running the blocks on the calibration data.

        Args:
            passes: number of runs over the full data.
        """
        return Cost(
            products=passes * self.products(self.length) * self.tokens,
            operators=passes * _OPERATORS * self.blocks * self.batches,
        )


def first_number(name: str) -> str:
    """Return the first part of a layer name that is a number, of the block; empty if none."""
    return next((part for part in name.split(".") if part.isdigit()), "")


def cost_of(algorithms: Iterable[Any], shapes: Shapes) -> tuple[Cost, tuple[str, ...]]:
    """Return the total cost of algorithms, and the names of those without ``cost``."""
    # A plug-in need not state a cost; the caller says that the estimate leaves it out.
    total, unknown = Cost(), list[str]()
    for algorithm in algorithms:
        cost = getattr(algorithm, "cost", None)
        if cost is None:
            unknown.append(algorithm.name)
        else:
            total += cost(shapes)
    return total, tuple(unknown)


def evaluation_cost(shapes: Shapes, lengths: Iterable[int]) -> Cost:
    """Return the cost of running the float and the quantized model, and comparing them.

    Args:
        shapes: sizes of the model.
        lengths: tokens of each window. Each is a batch of its own.
    """
    total = Cost()
    for length in lengths:
        models = length * (shapes.products(length) + shapes.head)
        scored = _SCORED * length * shapes.vocabulary
        total += Cost(
            products=2 * models,
            elements=scored + _DEQUANTIZED * shapes.count,
            operators=2 * _OPERATORS * shapes.blocks,
        )
    return total
