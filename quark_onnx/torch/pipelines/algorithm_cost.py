"""Cost of algorithms in addition to running the model: memory and runtime.

The estimate needs only shapes and settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quark_onnx.torch.algorithms.gptq.gptq import GPTAQ, GPTQ, Qronos
from quark_onnx.torch.algorithms.gptq.solver import AT_ONCE
from quark_onnx.torch.algorithms.hqq import HQQ
from quark_onnx.torch.algorithms.learned_rounding.autoround import SignedRounding
from quark_onnx.torch.algorithms.learned_rounding.distill import (
    LOGITS,
    LOOKS,
    Distillation,
)
from quark_onnx.torch.algorithms.rescaling.awq import AWQ
from quark_onnx.torch.algorithms.rescaling.channel_pairs import pattern_of
from quark_onnx.torch.algorithms.rescaling.clip import Clip
from quark_onnx.torch.algorithms.rescaling.smoothquant import (
    AutoSmoothQuant,
    SmoothQuant,
)
from quark_onnx.torch.algorithms.rotation.settings import Rotation
from quark_onnx.torch.algorithms.scheduling.replay import LEAST
from quark_onnx.torch.algorithms.weight_rounding.range_search import SHARES, tries

#: Stages of a typical block; tokens that SmoothQuant keeps.
_STAGES, _KEPT = 4, 1024
#: Copies of a weight during a sweep: targets, dequantized values, errors, updates, scales and
#: zero points.
_SWEPT = 10
#: Cost of a backward pass in forward passes; evaluations of a training on all samples.
_BACKWARD, _LOOKS = 2, 21
#: Elementwise passes over a weight per step of training, and per iteration of HQQ, relative to
#: rounding it once.
_TRAINED, _SOLVED = 4, 1


#: Calls of operators in a block outside of products: norms, rotary embedding, activation,
#: residual sums, and the bookkeeping of the calibration.
_OPERATORS = 60
#: Elementwise passes over the logits of both models, in float64, to compare them; and over the
#: weights of the quantized model.
_SCORED, _DEQUANTIZED = 24, 6
#: Tokens that a block runs at once.
BATCH_TOKENS = 512


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
    """

    layers: Mapping[str, tuple[int, int]]
    weights: int
    block: int
    tokens: int
    samples: int
    attention: int = 0
    head: int = 0
    vocabulary: int = 0

    @property
    def length(self) -> float:
        """Return the number of tokens per sample."""
        return self.tokens / max(1, self.samples)

    @property
    def batches(self) -> int:
        """Return the number of batches in which the blocks run the samples."""
        together = max(1, int(BATCH_TOKENS // max(1.0, self.length)))
        return -(-self.samples // together) if self.tokens else 0

    def products(self, length: float) -> float:
        """Return the multiply-accumulates of all blocks for a token.

        Attention multiplies each query by the keys of all tokens of a sample, and the
        probabilities by the values.

        Args:
            length: tokens of a sample.
        """
        return self.weights + 2 * length * self.attention

    @property
    def groups(self) -> dict[tuple[str, int], int]:
        """Return the sum of output channels per distinct input.

        Layers with the same parent and input width are assumed to share an input.
        """
        found = dict[tuple[str, int], int]()
        for name, (outputs, inputs) in self.layers.items():
            key = (name.rpartition(".")[0], inputs)
            found[key] = found.get(key, 0) + outputs
        return found

    @property
    def widest(self) -> int:
        """Return the number of Hessian elements in the largest stage.

        All experts of a block belong to one stage.
        """
        stages = dict[tuple[str, str, int], int]()
        for parent, inputs in self.groups:
            first = next((part for part in parent.split(".") if part.isdigit()), "")
            key = (first, pattern_of(parent), inputs)
            stages[key] = stages.get(key, 0) + inputs**2
        return max(stages.values(), default=0)


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


def cost_of(algorithms: Iterable[Any], shapes: Shapes) -> tuple[Cost, tuple[str, ...]]:
    """Return the total cost of algorithms, and the names of unknown algorithms."""
    total, unknown = Cost(), list[str]()
    for each in algorithms:
        own = next(
            (cost for kind, cost in _COSTS.items() if isinstance(each, kind)),
            None,
        )
        if own is None:
            unknown.append(each.name)
        else:
            total += own(each, shapes)
    return total, tuple(unknown)


def run_cost(shapes: Shapes) -> Cost:
    """Return the cost of running the blocks once on the calibration data."""
    return Cost(
        products=_runs(shapes, 1),
        operators=_calls(shapes, 1),
    )


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
            elements=scored + _DEQUANTIZED * _count(shapes),
            operators=2 * _OPERATORS * _blocks(shapes),
        )
    return total


def _runs(shapes: Shapes, count: float) -> float:
    """Return the multiply-accumulates of running the blocks on the full data."""
    return count * shapes.products(shapes.length) * shapes.tokens


def _calls(shapes: Shapes, count: float) -> float:
    """Return the calls of operators when the blocks run on the full data."""
    return count * _OPERATORS * _blocks(shapes) * shapes.batches


def _grams(shapes: Shapes) -> float:
    """Return the multiply-accumulates of accumulating the Hessians X^T X."""
    return float(sum(inputs**2 for _, inputs in shapes.groups)) * shapes.tokens


def _judged(shapes: Shapes) -> float:
    """Return the multiply-accumulates of evaluating every layer's rounding error."""
    return float(sum(outputs * inputs**2 for outputs, inputs in shapes.layers.values()))


def _count(shapes: Shapes) -> int:
    return sum(outputs * inputs for outputs, inputs in shapes.layers.values())


def _rounder(shapes: Shapes) -> int:
    """Return the bytes of a second copy of a float block, with dequantized values."""
    return shapes.block


def _of_gptq(each: Any, shapes: Shapes) -> Cost:
    both = 2 if getattr(each, "alpha", float(isinstance(each, Qronos))) > 0 else 1
    # a sweep for each range, coordinate descent and the final error; symmetric and triangular
    # matrices cost half
    judged = (
        (1 + each.search_scales) / 2
        + max(0.0, 1.5 * each.coordinate_descent_passes - 0.5)
        + 1
        + 2.5 * (both - 1)
    )
    groups = shapes.groups.items()
    solved = sum(inputs**3 for (_, inputs), _ in groups) / 3
    most = max((inputs for _, inputs in shapes.layers.values()), default=0)
    widest = max(
        (rows * (1 + each.search_scales) * inputs for (_, inputs), rows in groups),
        default=0,
    )
    # a stage runs the preceding part of the block again, except for samples with cached outputs
    kept, share = _replayed(shapes)
    passes = 1 + (both - share) * _STAGES / 2
    runs = _runs(shapes, passes)
    return Cost(
        # Hessians, and the larger of the float64 factorization and the sweep
        _rounder(shapes)
        + kept
        + 4 * both * shapes.widest
        + max(8 * most**2, _SWEPT * 4 * min(widest, AT_ONCE)),
        runs + (2 * both - 1.5) * _grams(shapes) + solved + judged * _judged(shapes),
        tries(len(SHARES)) * each.search_scales * _count(shapes),
        (1 + each.coordinate_descent_passes)
        * sum(
            _sweeps(rows * (1 + each.search_scales), inputs) * inputs
            for (_, inputs), rows in groups
        ),
        operators=_calls(shapes, passes),
    )


def _replayed(shapes: Shapes) -> tuple[int, float]:
    """Return the bytes of cached stage outputs, and the cached share of the samples."""
    widths = [inputs for _, inputs in shapes.layers.values()] or [0]
    each = (
        shapes.block * max(1, _blocks(shapes)) / max(1, shapes.weights)
    )  # bytes of a number
    wanted = int(shapes.tokens * (max(widths) + min(widths)) * each)
    kept = min(wanted, max(LEAST, shapes.block))
    return kept, kept / max(1, wanted)


def _sweeps(rows: int, columns: int) -> int:
    """Return the number of parts in which a weight is swept."""
    return -(-rows // max(1, AT_ONCE // max(1, columns)))


def _of_clip(each: Any, shapes: Shapes) -> Cost:
    # all stages are observed in one run; both ends of a range are searched together, then singly
    together = (
        4 * sum(inputs**2 for _, inputs in shapes.groups) // max(1, _blocks(shapes))
    )
    work = _runs(shapes, 1) + _grams(shapes) / 2 + 1.5 * _judged(shapes)
    return Cost(
        _rounder(shapes) + together,
        work,
        3 * tries(each.steps + 1) * _count(shapes),
        operators=_calls(shapes, 1),
    )


def _of_awq(each: Any, shapes: Shapes) -> Cost:
    trials = each.steps * (1 + each.duo)
    together = (
        4 * sum(inputs**2 for _, inputs in shapes.groups) // max(1, _blocks(shapes))
    )
    work = (
        _runs(shapes, 1) + (_grams(shapes) + trials * _judged(shapes)) / 2
    )  # halves of symmetric matrices
    return Cost(together, work, trials * _count(shapes), operators=_calls(shapes, 1))


def _of_smoothquant(each: Any, shapes: Shapes) -> Cost:
    trials = 1 + (each.steps + 1 if isinstance(each, AutoSmoothQuant) else 1)
    kept = min(_KEPT, shapes.tokens)
    widths = sum(inputs for _, inputs in shapes.groups) // max(1, _blocks(shapes))
    return Cost(
        4 * kept * widths,
        _runs(shapes, 1) + trials * kept * _count(shapes),
        trials * _count(shapes),
        operators=_calls(shapes, 1),
    )


def _of_signed(each: Any, shapes: Shapes) -> Cost:
    share = min(each.batch, shapes.samples) / max(1, shapes.samples)
    passes = each.steps * share * (1 + _BACKWARD) + _LOOKS
    runs = _runs(shapes, passes)
    # shifts, gradients, two moments, means and the best, in float32, in addition to the weights;
    # and the activations of one sample
    kept = (
        shapes.tokens
        // max(1, shapes.samples)
        * sum(outputs + inputs for outputs, inputs in shapes.layers.values())
    )
    memory = _rounder(shapes) + 4 * (9 * _count(shapes) + kept) // max(
        1,
        _blocks(shapes),
    )
    return Cost(
        memory,
        runs,
        _TRAINED * each.steps * _count(shapes),
        operators=_calls(shapes, passes),
    )


def _of_distill(each: Any, shapes: Shapes) -> Cost:
    length = shapes.tokens / max(1, shapes.samples)
    learned = each.steps * each.batch * length * (2 + _BACKWARD)
    run_tokens = learned + each.sequences * length + 2 * LOOKS * shapes.tokens
    passes = run_tokens / max(1, shapes.tokens)
    runs = _runs(shapes, passes)
    # all blocks; the state of SignedRounding and four more numbers per weight; logits of both
    # models, and gradients of one
    memory = _blocks(shapes) * shapes.block + 4 * 13 * _count(shapes) + 3 * 4 * LOGITS
    return Cost(
        memory,
        runs,
        _TRAINED * each.steps * _count(shapes),
        operators=_calls(shapes, passes),
    )


def _of_hqq(each: Any, shapes: Shapes) -> Cost:
    if not shapes.tokens:
        return Cost(0, 0.0, _SOLVED * each.iterations * _count(shapes))
    kept, share = _replayed(shapes)
    passes = 1 + (1 - share) * _STAGES / 2
    runs = _runs(shapes, passes) + _grams(shapes) / 2 + 1.5 * _judged(shapes)
    memory = _rounder(shapes) + kept + 4 * shapes.widest
    rounded = _SOLVED * each.iterations * _count(shapes)
    return Cost(memory, runs, rounded, operators=_calls(shapes, passes))


def _of_rotation(each: Any, shapes: Shapes) -> Cost:
    width = min((min(sides) for sides in shapes.layers.values()), default=0)
    # weights are rotated in float64, at about twice the runtime of float32
    learned = (
        3 * each.steps * shapes.weights * (shapes.tokens / max(1, shapes.samples) * 8)
        if each.trained
        else 0.0
    )
    return Cost(
        2 * 8 * max(map(math.prod, shapes.layers.values()), default=0),
        2.0 * _count(shapes) * width + learned,
    )


def _blocks(shapes: Shapes) -> int:
    """Return the number of blocks, by the first number in layer names."""
    return len(
        {
            next((part for part in name.split(".") if part.isdigit()), "")
            for name in shapes.layers
        },
    )


_COSTS: dict[Any, Callable[[Any, Shapes], Cost]] = {
    **dict.fromkeys((GPTQ, GPTAQ, Qronos), _of_gptq),
    Clip: _of_clip,
    AWQ: _of_awq,
    **dict.fromkeys((SmoothQuant, AutoSmoothQuant), _of_smoothquant),
    SignedRounding: _of_signed,
    Distillation: _of_distill,
    HQQ: _of_hqq,
    Rotation: _of_rotation,
}
