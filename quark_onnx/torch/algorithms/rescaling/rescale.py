"""Rescale the channel pairs of a block by chosen scales; the function of the block is unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

import torch

from quark_onnx.torch.algorithms.base import BlockJob, Outcome
from quark_onnx.torch.algorithms.rescaling.activation_stats import (
    ActivationStats,
    moments_of,
)
from quark_onnx.torch.algorithms.rescaling.channel_pairs import (
    Pair,
    find_pairs,
    inputs_last,
    pattern_of,
)
from quark_onnx.torch.config.spec import LayerSpec
from quark_onnx.torch.runtime import distributed

#: The greatest change of what a block computes, as a share of it; and in models of 16 bits, whose
#: weights and norms are rounded again once they are multiplied.
_BOUND = 1e-4
BOUND_SHORT = 2e-2
#: Scales beyond this, around their geometric mean, would leave a type of 16 bits for nothing.
_GREATEST_SCALE = 1e4


@dataclass(frozen=True)
class Readers:
    """The quantized layers of a pair.

    Attributes:
        names: the names in the model.
        weights: (outputs, inputs) float32 of each layer, before rescaling.
        specs: the quantization of each layer.
        columns: (inputs,), the channel of each input.
        channels: the number of channels.
        moments: the statistics of the inputs.
    """

    names: tuple[str, ...]
    weights: tuple[torch.Tensor, ...]
    specs: tuple[LayerSpec, ...]
    columns: torch.Tensor
    channels: int
    moments: ActivationStats

    def channel(self, values: torch.Tensor) -> torch.Tensor:
        """Return the greatest value of each channel: (inputs,) to (channels,)."""
        # The amax of values that are at least 0: zeros are neutral.
        zeros = values.new_zeros(self.channels)
        return zeros.scatter_reduce_(0, self.columns, values, "amax")

    def powers(self) -> list[float]:
        """Return the mean square of each layer's outputs, summed over outputs."""
        return [self.moments.power(weight) or 1.0 for weight in self.weights]


@dataclass(frozen=True)
class TriedScale:
    """Scales with their errors.

    Attributes:
        scale: (channels,); None for no scales.
        errors: the squared error of each layer.
    """

    scale: torch.Tensor | None
    errors: tuple[float, ...]


def best_of(
    first: torch.Tensor,
    candidates: Iterable[torch.Tensor],
    errors: Callable[[torch.Tensor], Iterable[float]],
) -> tuple[TriedScale, TriedScale]:
    """Return the trial without scales, and the best of all trials.

    Args:
        first: (channels,), ones.
        candidates: scales, (channels,) each.
        errors: maps scales to the errors of the layers, each at least 0; iteration ends once their
            sum exceeds the best.
    """
    plain = best = TriedScale(None, tuple(errors(first)))
    for scale in candidates:
        layer_errors = list[float]()
        most = sum(best.errors)
        for error in errors(scale):
            layer_errors.append(error)
            # Errors only add up: the candidate has lost already. `not <` also rejects NaN.
            if not sum(layer_errors) < most:
                break
        else:
            best = TriedScale(scale, tuple(layer_errors))
    return plain, best


def centred(scale: torch.Tensor) -> torch.Tensor:
    """Normalize scales to a geometric mean of 1, and limit extremes.

    A common factor of all scales has no effect.

    >>> centred(torch.tensor([8.0, 2.0]))
    tensor([2.0000, 0.5000])
    """
    logarithm = scale.log()
    limit = torch.tensor(_GREATEST_SCALE).log()
    return torch.exp((logarithm - logarithm.mean()).clamp(-limit, limit))


#: Chooses the scales of a pair: returns the trial without scales, and the best trial.
Choose = Callable[[Readers], tuple[TriedScale, TriedScale]]


def rescale(
    job: BlockJob, algorithm: str, choose: Choose, *, products: bool
) -> list[Outcome]:
    """Rescale the pairs of a block in place, in the order of execution.

    Args:
        job: the block.
        algorithm: the name for the outcomes.
        choose: chooses the scales of a pair.
        products: collect products of inputs; tokens otherwise.
    """
    # No sample reaches the block.
    if not job.floats:
        return []
    quantized = {job.local(name) for name, _, _ in job.weights()}
    # Pairs are found by probing, whose float noise may differ between ranks; all must rescale the
    # same ones.
    everywhere = distributed.from_first(find_pairs(job.block, job.floats[0]))
    # Without a quantized reader, scales have nothing to improve.
    pairs = [pair for pair in everywhere if not quantized.isdisjoint(pair.readers)]
    # The first reader of a pair reads all tokens; experts come after it.
    leaders = [pair.readers[0] for pair in pairs]
    moments = moments_of(job.block, job.calls, leaders, products=products)
    outcomes = list[Outcome]()
    for _, group in groupby(pairs, key=lambda pair: pattern_of(pair.source)):
        outcomes += _rescale_alike(job, algorithm, choose, list(group), moments)
    return outcomes


def _rescale_alike(
    job: BlockJob,
    algorithm: str,
    choose: Choose,
    pairs: list[Pair],
    moments: Mapping[str, ActivationStats],
) -> list[Outcome]:
    """Rescale a pair, or the equal pairs of all experts; undo where the block changes."""
    block = job.block
    call = job.floats[0]
    tensors = [tensor for pair in pairs for tensor in pair.tensors(block)]
    # Parameters of the pairs alone, not of the block.
    kept = [(tensor, tensor.detach().clone()) for tensor in tensors]
    outcomes = list[Outcome]()
    with torch.no_grad():
        before = call.run(block).float()
        for pair in pairs:
            # An expert without tokens has no statistics, and keeps its weights.
            if pair.readers[0] in moments:
                readers = _readers(job, pair, moments[pair.readers[0]])
                plain, best = choose(readers)
                outcomes += _outcomes(algorithm, readers, plain, best)
                if best.scale is not None:
                    pair.apply(block, best.scale)
        change = float((call.run(block).float() - before).norm() / before.norm())
        # That of the first sample, as in a single process: all ranks take back, or none does.
        change = distributed.from_first(change)
        if change <= (_BOUND if kept[0][0].dtype == torch.float32 else BOUND_SHORT):
            return outcomes
        # Copies, not the reciprocal scale, which would leave a second rounding in 16 bits.
        for tensor, values in kept:
            tensor.copy_(values)
    note = (
        f"{pairs[0].source} stays as it is: scales would change what the block"
        f" computes, by {change:.1e} of it"
    )
    return [
        Outcome(outcome.layer, algorithm, outcome.before, outcome.before, note)
        for outcome in outcomes
    ]


def _outcomes(
    algorithm: str, readers: Readers, plain: TriedScale, best: TriedScale
) -> Iterator[Outcome]:
    """Yield the outcome for each layer of a pair, with errors as shares of its power."""
    errors = zip(plain.errors, best.errors, strict=True)
    layers = zip(readers.names, readers.powers(), errors, strict=True)
    for name, power, (before, after) in layers:
        yield Outcome(name, algorithm, before / power, after / power)


def _readers(job: BlockJob, pair: Pair, moments: ActivationStats) -> Readers:
    """Return the quantized readers of a pair, with their weights as they are now."""
    layers = {
        name: (module, spec)
        for name, (module, spec) in job.layers.items()
        if job.local(name) in pair.readers and spec.weight is not None
    }
    return Readers(
        tuple(layers),
        tuple(inputs_last(module).float() for module, _ in layers.values()),
        tuple(spec for _, spec in layers.values()),
        pair.columns,
        len(pair.rows),
        moments,
    )
