"""What algorithms take beside the plain run of a model: memory and time, from shapes and settings
alone.
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

#: Stages of a usual block; tokens that are kept in place of products of inputs.
_STAGES, _KEPT = 4, 1024
#: Copies of values that are swept: what they are to be, values on levels, errors, moves, scales and
#: zero points.
_SWEPT = 10
#: How many times a product a backward pass takes; looks of a training at all samples.
_BACKWARD, _LOOKS = 2, 21
#: Passes over a weight that rounding it takes, of those that training it or solving for its zero
#: points does.
_TRAINED, _SOLVED = 4, 1


@dataclass(frozen=True)
class Shapes:
    """What is worked on.

    Attributes:
        layers: (outputs, inputs) of the quantized matrices in blocks, by name.
        weights: of all blocks, those that stay float included.
        block: bytes of the greatest block.
        tokens: of the data.
        samples: of the data.
    """

    layers: Mapping[str, tuple[int, int]]
    weights: int
    block: int
    tokens: int
    samples: int

    @property
    def groups(self) -> dict[tuple[str, int], int]:
        """Outputs of the layers that read each input: those of the same parent with as many inputs
        are taken to.
        """
        found = dict[tuple[str, int], int]()
        for name, (outputs, inputs) in self.layers.items():
            key = (name.rpartition(".")[0], inputs)
            found[key] = found.get(key, 0) + outputs
        return found

    @property
    def widest(self) -> int:
        """Products of two inputs in the stage that has most of them: all experts of a block are one
        stage.
        """
        stages = dict[tuple[str, str, int], int]()
        for parent, inputs in self.groups:
            first = next((part for part in parent.split(".") if part.isdigit()), "")
            key = (first, pattern_of(parent), inputs)
            stages[key] = stages.get(key, 0) + inputs**2
        return max(stages.values(), default=0)


@dataclass(frozen=True)
class Cost:
    """What comes on top.

    Attributes:
        memory: bytes.
        products: multiplications of two numbers, as in products of matrices.
        roundings: weights that are rounded.
        columns: steps of a sweep over columns, each of which takes its time however short the
            columns are.
    """

    memory: int = 0
    products: float = 0.0
    roundings: float = 0.0
    columns: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        """Work adds up; memory is used by one after the other."""
        return Cost(
            max(self.memory, other.memory),
            self.products + other.products,
            self.roundings + other.roundings,
            self.columns + other.columns,
        )


def cost_of(algorithms: Iterable[Any], shapes: Shapes) -> tuple[Cost, tuple[str, ...]]:
    """The cost of all, and the names of those that nothing is known of."""
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


def _runs(shapes: Shapes, count: float) -> float:
    """Products of so many runs of all blocks on all tokens."""
    return count * shapes.weights * shapes.tokens


def _grams(shapes: Shapes) -> float:
    """Products for the sums of products of what layers read."""
    return float(sum(inputs**2 for _, inputs in shapes.groups)) * shapes.tokens


def _judged(shapes: Shapes) -> float:
    """Products for one look at what rounding costs all layers."""
    return float(sum(outputs * inputs**2 for outputs, inputs in shapes.layers.values()))


def _count(shapes: Shapes) -> int:
    return sum(outputs * inputs for outputs, inputs in shapes.layers.values())


def _rounder(shapes: Shapes) -> int:
    """The block in float once more, as its codes stand for."""
    return shapes.block


def _of_gptq(each: Any, shapes: Shapes) -> Cost:
    both = 2 if getattr(each, "alpha", float(isinstance(each, Qronos))) > 0 else 1
    # a sweep for each range, looks behind it, and what is said in the end: halves of symmetric
    # matrices, and triangles
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
    # a stage runs the part of a block that is in front of it, but for samples of which is kept what
    # that has computed
    kept, share = _replayed(shapes)
    runs = _runs(shapes, 1 + (both - share) * _STAGES / 2)
    return Cost(
        # products, and in float64 what their factor is made of, or what is swept
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
    )


def _replayed(shapes: Shapes) -> tuple[int, float]:
    """Bytes that are kept of what stages have computed, and the share of the samples that they are
    kept of.
    """
    widths = [inputs for _, inputs in shapes.layers.values()] or [0]
    each = (
        shapes.block * max(1, _blocks(shapes)) / max(1, shapes.weights)
    )  # bytes of a number
    wanted = int(shapes.tokens * (max(widths) + min(widths)) * each)
    kept = min(wanted, max(LEAST, shapes.block))
    return kept, kept / max(1, wanted)


def _sweeps(rows: int, columns: int) -> int:
    """How many parts a weight is swept in."""
    return -(-rows // max(1, AT_ONCE // max(1, columns)))


def _of_clip(each: Any, shapes: Shapes) -> Cost:
    # all stages are watched at once, and the ends of a range are tried together, and one by one
    together = (
        4 * sum(inputs**2 for _, inputs in shapes.groups) // max(1, _blocks(shapes))
    )
    work = _runs(shapes, 1) + _grams(shapes) / 2 + 1.5 * _judged(shapes)
    return Cost(
        _rounder(shapes) + together,
        work,
        3 * tries(each.steps + 1) * _count(shapes),
    )


def _of_awq(each: Any, shapes: Shapes) -> Cost:
    trials = each.steps * (1 + each.duo)
    together = (
        4 * sum(inputs**2 for _, inputs in shapes.groups) // max(1, _blocks(shapes))
    )
    work = (
        _runs(shapes, 1) + (_grams(shapes) + trials * _judged(shapes)) / 2
    )  # halves of symmetric matrices
    return Cost(together, work, trials * _count(shapes))


def _of_smoothquant(each: Any, shapes: Shapes) -> Cost:
    trials = 1 + (each.steps + 1 if isinstance(each, AutoSmoothQuant) else 1)
    kept = min(_KEPT, shapes.tokens)
    widths = sum(inputs for _, inputs in shapes.groups) // max(1, _blocks(shapes))
    return Cost(
        4 * kept * widths,
        _runs(shapes, 1) + trials * kept * _count(shapes),
        trials * _count(shapes),
    )


def _of_signed(each: Any, shapes: Shapes) -> Cost:
    share = min(each.batch, shapes.samples) / max(1, shapes.samples)
    runs = _runs(shapes, each.steps * share * (1 + _BACKWARD) + _LOOKS)
    # shifts, gradients, two moments, means and the best, in float32, beside the weights; and what
    # one sample leaves
    kept = (
        shapes.tokens
        // max(1, shapes.samples)
        * sum(outputs + inputs for outputs, inputs in shapes.layers.values())
    )
    memory = _rounder(shapes) + 4 * (9 * _count(shapes) + kept) // max(
        1,
        _blocks(shapes),
    )
    return Cost(memory, runs, _TRAINED * each.steps * _count(shapes))


def _of_distill(each: Any, shapes: Shapes) -> Cost:
    length = shapes.tokens / max(1, shapes.samples)
    learned = each.steps * each.batch * length * (2 + _BACKWARD)
    runs = (
        _runs(shapes, 1)
        / max(1, shapes.tokens)
        * (learned + each.sequences * length + 2 * LOOKS * shapes.tokens)
    )
    # all blocks, what SignedRounding has for each weight, and four numbers for what it computes
    # with and the slopes; logits of both models, and gradients of one
    memory = _blocks(shapes) * shapes.block + 4 * 13 * _count(shapes) + 3 * 4 * LOGITS
    return Cost(memory, runs, _TRAINED * each.steps * _count(shapes))


def _of_hqq(each: Any, shapes: Shapes) -> Cost:
    if not shapes.tokens:
        return Cost(0, 0.0, _SOLVED * each.iterations * _count(shapes))
    kept, share = _replayed(shapes)
    runs = (
        _runs(shapes, 1 + (1 - share) * _STAGES / 2)
        + _grams(shapes) / 2
        + 1.5 * _judged(shapes)
    )
    memory = _rounder(shapes) + kept + 4 * shapes.widest
    return Cost(memory, runs, _SOLVED * each.iterations * _count(shapes))


def _of_rotation(each: Any, shapes: Shapes) -> Cost:
    width = min((min(sides) for sides in shapes.layers.values()), default=0)
    # weights are turned in float64, which takes about as long as two products in float32 do
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
    """How many blocks there are, by the first number in names."""
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
