"""SignedRounding: train the rounding and the ranges of the weights of a block on its output error.

Cheng et al. 2023, "Optimize Weight Rounding via Signed Gradient Descent for the Quantization of
LLMs" (AutoRound).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from quark_onnx.common.errors import DataError
from quark_onnx.common.registry import ALGORITHMS
from quark_onnx.config.checks import require_one_of
from quark_onnx.optimizers.base import require_flag, require_number, require_whole
from quark_onnx.torch.algorithms.base import BlockJob, Chosen, Outcome
from quark_onnx.torch.algorithms.learned_rounding.trainable_weight import (
    TrainableWeight,
    through,
)
from quark_onnx.torch.algorithms.learned_rounding.training_state import (
    OPTIMIZERS,
    Descent,
    draws,
    looks,
)
from quark_onnx.torch.algorithms.memory import Shapes
from quark_onnx.torch.algorithms.weight_rounding.levels import TensorLevels
from quark_onnx.torch.formats.quantized_tensor import Quantized
from quark_onnx.torch.models.quantized_layer import QuantizedLayer, outputs_first
from quark_onnx.torch.runtime.reductions import total

#: How many times the error on all samples is computed during the descent.
_LOOKS = 10


@ALGORITHMS.register("autoround")
@dataclass(frozen=True)
class SignedRounding:
    """Train the rounding and the ranges of a block's weights on the output error of the block.

    The best of all evaluated states is kept: the start, states during the descent, and running
    means of the last steps.

    The same number of threads gives the same codes. Products of float32 differ in their last bits
    between numbers of threads, so that the descent takes another course.

    Attributes:
        steps: number of steps of the descent.
        lr: the learning rate of roundings in the first step, as a share of the distance of two
            codes. The rate falls to nothing towards the last step. 1 / steps if None.
        minmax_lr: the learning rate of the ends of ranges, as a share of the range, and accordingly
            less for ranges of more than 15 steps; as lr if None.
        batch: samples per step; more where a batch of the data has more samples, which run
            together.
        tune_ranges: whether to train ranges at all.
        optimizer: "adam", or "sign" as in the paper: every step has the same length.
        seed: the seed of the order of samples.
    """

    name: ClassVar[str] = "autoround"
    sums: ClassVar[bool] = False
    stage: ClassVar[str] = "weights"
    aims_at_float: ClassVar[bool] = True
    rounds_activations: ClassVar[bool] = True
    needs_data: ClassVar[bool] = True

    steps: int = 200
    lr: float | None = None
    minmax_lr: float | None = None
    batch: int = 8
    tune_ranges: bool = True
    optimizer: str = "adam"
    seed: int = 0

    def __post_init__(self) -> None:
        require_whole(self, "steps", "batch")
        require_whole(self, "seed", least=0)
        require_flag(self, "tune_ranges")
        for rate in ("lr", "minmax_lr"):
            if getattr(self, rate) is not None:
                require_number(self, rate, least=0, most=1)
        require_one_of(f"optimizer of {self.name}", self.optimizer, OPTIMIZERS)

    def memory(self, shapes: Shapes) -> int:
        """Return the estimated bytes of a block in training."""
        # shifts, gradients, two moments, means and the best, in float32, in addition to the
        # weights; and the activations of one sample
        widths = sum(sum(shape) for shape in shapes.layers.values())
        kept = shapes.tokens // max(1, shapes.samples) * widths
        state = 4 * (9 * shapes.count + kept) // max(1, shapes.blocks)
        return shapes.block + state

    def __call__(
        self, job: BlockJob, quantized_weights: Mapping[str, Quantized]
    ) -> Chosen:
        """Choose codes; the error of the block on the data does not grow.

        Raises:
            DataError: the output of the float block is infinite or no number.
        """
        trained = dict[str, TrainableWeight]()
        outcomes = list[Outcome]()
        for name, weight, _ in job.weights():
            if (steps := TensorLevels.of(quantized_weights[name])) is not None:
                trained[name] = TrainableWeight(weight, quantized_weights[name], steps)
            else:
                outcomes.append(untrainable(name, self.name, quantized_weights[name]))
        if not trained or not job.calls:
            return dict(quantized_weights), outcomes
        # Layers that are not trained run with their codes: their errors are part of the block's.
        layers = {
            name: TrainedLayer(layer, trained.get(name))
            for name, layer in job.quantized(quantized_weights).items()
        }
        block = _Block(job, list(layers.values()))
        # Before training: no error would be finite, and every state as good as any other.
        if not all(torch.isfinite(target).all() for target in job.targets):
            raise DataError(
                f"what {job.name} computes is infinite or no number on the calibration"
                " data",
            )
        with job.put(layers):
            before, after = self._train(block, list(trained.values()))
        # The error is reported as a share of the power of the float block's outputs.
        power = (
            sum(float(total(target.float().square())) for target in job.targets) or 1.0
        )
        note = f"{self.steps} steps"
        outcome = Outcome(job.name, self.name, before / power, after / power, note)
        codes = {name: weight.made() for name, weight in trained.items()}
        return dict(quantized_weights) | codes, [*outcomes, outcome]

    def _train(
        self, block: _Block, trained: Sequence[TrainableWeight]
    ) -> tuple[float, float]:
        """Train, restore the best state, and return the squared error before and after."""
        # As in the paper: with a rate that falls linearly, signed steps sum up to half a code.
        lr = 1 / self.steps if self.lr is None else self.lr
        range_lr = None
        if self.tune_ranges:
            range_lr = lr if self.minmax_lr is None else self.minmax_lr
        descent = Descent(trained, self.steps, lr, range_lr, self.optimizer)
        # The start is a candidate as well, so that the error never grows.
        before = descent.look(block.error)
        looked_at = set(looks(self.steps, _LOOKS))
        # draws() never ends; range() sets the number of steps.
        batches = draws(len(block), block.calls(self.batch), self.seed)
        for step, chosen in zip(range(self.steps), batches, strict=False):
            block.descend(chosen, descent.leaves)
            # The rate falls linearly to 1 / steps of the first.
            descent.step(1 - step / self.steps)
            if step + 1 in looked_at:
                descent.look(block.error)
                descent.look_at_means(block.error)
        return before, descent.finish()


def untrainable(name: str, algorithm: str, codes: Quantized) -> Outcome:
    """Return the outcome for a layer whose format has no steps that can be trained.

    Args:
        name: the name of the layer.
        algorithm: the name of the algorithm.
        codes: the layer's weight.
    """
    note = f"{codes.spec.dtype.name} has no steps that can be trained; its codes stay"
    return Outcome.unchanged(name, algorithm, note)


class TrainedLayer(nn.Module):
    """A layer that computes with a weight in training.

    Roundings of activations hand gradients through.

    Args:
        layer: the quantized layer.
        trained: the weight in training; None for a layer that keeps its weight.
    """

    def __init__(self, layer: QuantizedLayer, trained: TrainableWeight | None) -> None:
        super().__init__()
        self.layer = layer
        self.trained = trained
        self.current: torch.Tensor | None = None

    @property
    def weight(self) -> Any:
        """The present weight."""
        # Without a trained weight, the layer computes with its own codes.
        return self.layer.weight if self.current is None else self.current

    @property
    def bias(self) -> Any:
        """The bias of the layer, for blocks that multiply by the weight themselves (Mamba)."""
        return self.layer.bias

    @property
    def round_keys(self) -> Any:
        """The rounding of rotated keys; None for a layer that computes no keys."""
        return _straight_through(self.layer.round_keys)

    @property
    def round_probabilities(self) -> Any:
        """The rounding of attention probabilities; None if their scale is in another layer."""
        return _straight_through(self.layer.round_probabilities)

    def forward(self, input: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        """Compute the output of the quantized layer."""
        layer = self.layer
        if layer.input is not None and layer.kind not in ("Embedding", "EmbeddingBag"):
            input = through(input, layer.input(input.detach()))
        output = layer.compute(input, self.weight, more, named)
        if layer.output is None:
            return output
        return through(output, layer.rounded(output.detach()))


def _straight_through(rounding: Any) -> Any:
    """Return a rounding with the gradients of the identity, if there is a rounding."""
    if rounding is None:
        return None
    return lambda x: through(x, rounding(x.detach()))


def renew(layers: Iterable[TrainedLayer]) -> None:
    """Install the present weights in the layers."""
    for layer, weight in zip(layers, _weights(layers), strict=True):
        layer.current = weight


def descend(
    layers: Sequence[TrainedLayer],
    losses: Iterator[torch.Tensor],
    leaves: Sequence[torch.Tensor],
) -> None:
    """Add the gradients of a sum of losses to the leaves, one loss at a time to save memory."""
    with torch.enable_grad():
        weights = _weights(layers)
        # The graph is cut at the weights: every sample adds to their gradients, and the gradients
        # of roundings and ranges follow from these only once.
        ends = [weight.detach().requires_grad_(True) for weight in weights]
        for layer, end in zip(layers, ends, strict=True):
            layer.current = end
        for loss in losses:
            # A loss requires no gradient if the block runs none of the trained layers.
            if loss.requires_grad:
                loss.backward(inputs=ends)
        # The gradients of the last step are dropped.
        for leaf in leaves:
            leaf.grad = torch.zeros_like(leaf)
        # Zeros for a layer that no sample reaches, such as an expert.
        gradients = [
            torch.zeros_like(end) if end.grad is None else end.grad for end in ends
        ]
        torch.autograd.backward(weights, gradients, inputs=list(leaves))


def _weights(layers: Iterable[TrainedLayer]) -> list[torch.Tensor]:
    return [
        outputs_first(layer.trained.weight(), layer.layer.kind)
        for layer in layers
        if layer.trained is not None
    ]


class _Block:
    """A block with layers in training.

    Args:
        job: the block.
        layers: all of its quantized layers.
    """

    def __init__(self, job: BlockJob, layers: Sequence[TrainedLayer]) -> None:
        self._job = job
        self._layers = [layer for layer in layers if layer.trained is not None]

    def __len__(self) -> int:
        return len(self._job.calls)

    def calls(self, samples: int) -> int:
        """Return the number of calls, at least 1, that hold the given samples."""
        # (samples, tokens, features): a call may hold several samples.
        count: int = sum(call.hidden.shape[0] for call in self._job.calls)
        return max(1, round(samples * len(self) / max(1, count)))

    def _squares(self, index: int) -> torch.Tensor:
        output: torch.Tensor = self._job.calls[index].run(self._job.block)
        return (output.float() - self._job.targets[index].float()).square()

    def error(self) -> float:
        """Return the sum of squared errors over all samples; infinite for NaN."""
        with torch.no_grad():
            renew(self._layers)
            error = sum(
                # Sums over all outputs of a sample: the order does not depend on the number of
                # threads.
                float(total(self._squares(index), torch.float64))
                for index in range(len(self))
            )
        # NaN would compare as no worse than anything.
        return error if error == error else float("inf")

    def descend(self, chosen: Sequence[int], leaves: Sequence[torch.Tensor]) -> None:
        """Add the gradients of some samples to the leaves."""
        losses = (self._squares(index).mean() for index in chosen)
        descend(self._layers, losses, leaves)
