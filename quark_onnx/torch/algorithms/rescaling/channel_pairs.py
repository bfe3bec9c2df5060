"""Pairs of modules in a decoder block between which channels can be rescaled.

No module is known by its name. Candidates of fitting shapes are probed: channels of one part's
output are divided by random factors, inputs of other parts are multiplied by these factors, and the
output of the block must not change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from quark_onnx.torch.algorithms.rescaling.probe import BlockProbe
from quark_onnx.torch.calibration.block_stream import BlockArguments
from quark_onnx.torch.models.quantized_layer import kind_of, outputs_first


@dataclass(frozen=True, eq=False)
class Pair:
    """Channels between a part of a block and the readers of its output.

    Names are those inside of the block.

    Attributes:
        source: a norm, or a linear layer.
        readers: what reads the channels: linear layers, and routers.
        rows: (channels,) which outputs of the source they are.
        columns: (inputs of a reader,) which channel each of them is.
        gain: the parameter of the source that multiplies what it computes; its other parameters of
            one axis are added.
        unit: 1 for a norm that multiplies by 1 + its gain.
    """

    source: str
    readers: tuple[str, ...]
    rows: torch.Tensor
    columns: torch.Tensor
    gain: str = "weight"
    unit: float = 0.0

    def apply(self, block: nn.Module, scale: torch.Tensor) -> None:
        """Divide the source's outputs by a scale, and multiply the readers' weights, in place.

        Args:
            block: the block.
            scale: (channels,), positive.
        """
        # Products of a scale and its reciprocal are 1 up to rounding: the function stays.
        up, down = scale.float(), 1 / scale.float()
        source = block.get_submodule(self.source)
        for name, parameter in source.named_parameters(recurse=False):
            # Bias and gain are both divided; only the gain may count from 1.
            unit = self.unit if name == self.gain else 0.0
            factors = self._spread(source, parameter, down)
            _multiply(_outputs_first(source, parameter), factors, unit)
        for name in self.readers:
            _multiply(inputs_last(block.get_submodule(name)), up[self.columns])

    def _spread(
        self, source: nn.Module, parameter: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Spread factors of channels over all outputs of the source, in a parameter's shape."""
        weight = _outputs_first(source, parameter)
        # Outputs of the source that are no channels of the pair (queries and keys beside values)
        # keep the factor 1.
        spread = torch.ones(len(weight), device=values.device)
        spread.index_copy_(0, self.rows, values)
        return spread.reshape(-1, *[1] * (weight.ndim - 1))

    def tensors(self, block: nn.Module) -> list[Any]:
        """Return the parameters to rescale."""
        source = list(block.get_submodule(self.source).parameters(recurse=False))
        return source + [matrix_of(block.get_submodule(name)) for name in self.readers]


def _multiply(tensor: torch.Tensor, factors: torch.Tensor, unit: float = 0.0) -> None:
    # In float32: bfloat16 has 8 bits, and adding the 1 of Gemma's gains would lose most of them.
    tensor.copy_((tensor.float() + unit) * factors - unit)


def _outputs_first(module: nn.Module, parameter: torch.Tensor) -> torch.Tensor:
    if parameter.ndim > 1:
        return outputs_first(parameter.detach(), kind_of(module))
    return parameter.detach()


def matrix_of(module: nn.Module) -> torch.Tensor | None:
    """Return the only parameter with two axes of a part, or None."""
    parameters = module.parameters(recurse=False)
    weights = [parameter for parameter in parameters if parameter.ndim > 1]
    if len(weights) == 1 and weights[0].ndim == 2:
        return weights[0]
    return None


def inputs_last(module: nn.Module) -> torch.Tensor:
    """Return the weight of a linear layer or router as a view, (outputs, inputs)."""
    matrix = matrix_of(module)
    assert matrix is not None
    return outputs_first(matrix.detach(), kind_of(module))


def find_pairs(block: nn.Module, call: BlockArguments) -> list[Pair]:
    """Find the pairs of a block, in the order of execution of their readers.

    Args:
        block: a decoder block, its experts taken apart; it stays as it is.
        call: its arguments for one sample.
    """
    probe = BlockProbe(block, call)
    # Norms first: a layer after a norm cannot have a linear layer as its source, too.
    pairs = find_norms(probe)
    after_norms = {reader for pair in pairs for reader in pair.readers}
    pairs += _find_linears(probe, after_norms)
    order = {name: index for index, name in enumerate(probe.base.inputs)}
    return sorted(
        pairs,
        key=lambda pair: min(order.get(name, len(order)) for name in pair.readers),
    )


def find_norms(probe: BlockProbe) -> list[Pair]:
    """Find the pairs with a source that has a gain per channel."""
    pairs = []
    for name, output in probe.base.outputs.items():
        parameters = list(probe.parts[name].parameters(recurse=False))
        size = output.shape[-1]
        # Gain and bias have an entry for each channel; a linear layer has a matrix.
        per_channel = all(parameter.shape == (size,) for parameter in parameters)
        if not per_channel or name not in probe.base.inputs:
            continue
        readers = _readers(probe, name, size)
        gain = _gain(probe, name, probe.factors(size)) if readers else None
        if gain is not None:
            every = torch.arange(size, device=parameters[0].device)
            pairs.append(Pair(name, readers, every, every, *gain))
    return pairs


def _readers(probe: BlockProbe, source: str, size: int) -> tuple[str, ...]:
    """Return the readers of a part's channels, or nothing if another part reads them, too."""
    factors = probe.factors(size)
    readers = list[str]()
    while True:
        # Each round takes back the factors at all known readers: after a router that reads its
        # usual input, the same experts run, and show up as readers.
        trace = probe.run({source: factors}, dict.fromkeys(readers, factors))
        others = [name for name in probe.parts if name not in readers]
        scaled = [name for name in others if probe.unscaled(trace, name, factors)]
        new = [name for name in scaled if _linear(probe, name, factors)]
        if not new:
            break
        readers += new
    # The block's output is unchanged only if no other part reads the scaled channels.
    if not probe.same(trace):
        return ()
    return tuple(_with_unreached(probe, readers))


def _linear(probe: BlockProbe, name: str, factors: torch.Tensor) -> bool:
    """Return whether factors of a part's input can move into its weight."""
    module = probe.parts[name]
    weight = matrix_of(module)
    if weight is None or kind_of(module) == "Embedding":
        return False
    if kind_of(module) is not None:
        return True
    # The inputs of the matrix must be the channels, in their order.
    if weight.shape[-1] != len(factors):
        return False
    (key,) = (key for key, value in module.named_parameters() if value is weight)
    x = probe.base.inputs[name]
    # A router is no Linear, and its class is unknown: scaling its input and its weight must cancel.
    factors = factors.to(weight.dtype)
    try:
        before = module(x)
        after = functional_call(module, {key: weight * factors}, (x / factors,))
    except (RuntimeError, TypeError, ValueError):  # it takes more than this
        return False
    return _close(before, after)


def _find_linears(probe: BlockProbe, after_norms: set[str]) -> list[Pair]:
    """Find the pairs whose source is a linear layer, for readers without a norm."""
    groups = _groups(probe)
    pairs = list[Pair]()
    for index, readers in enumerate(groups):
        if not after_norms.isdisjoint(readers.values()):
            continue
        # The nearest source first.
        for sources in reversed(groups[max(0, index - _BEFORE) : index]):
            matched = _matched(probe, sources, readers)
            if matched:
                pairs += matched
                break
    return pairs


#: Number of layers before a reader among which its source is sought.
_BEFORE = 4


def _groups(probe: BlockProbe) -> list[dict[tuple[str, ...], str]]:
    """Return the linear layers in the order of execution, a layer of all experts in one group."""
    # Keys: the pattern and the shape; then the numbers in a name, which pair the experts' layers.
    groups = dict[tuple[Any, ...], dict[tuple[str, ...], str]]()
    for name in {**probe.base.inputs, **probe.parts}:
        if kind_of(probe.parts[name]) in ("Linear", "Conv1D"):
            shape = tuple(inputs_last(probe.parts[name]).shape)
            numbers = tuple(part for part in name.split(".") if part.isdigit())
            groups.setdefault((pattern_of(name), shape), {})[numbers] = name
    return list(groups.values())


def _matched(
    probe: BlockProbe,
    sources: Mapping[tuple[str, ...], str],
    readers: Mapping[tuple[str, ...], str],
) -> list[Pair]:
    """Return the pairs of two groups of layers that belong together."""
    if len(sources) == len(readers) == 1:
        # Whatever numbers their names have.
        readers = dict.fromkeys(sources, next(iter(readers.values())))
    # Each expert needs its own source.
    if sources.keys() != readers.keys():
        return []
    names = {source: readers[numbers] for numbers, source in sources.items()}
    # A guess is cheap, and a run with random factors decides.
    for rows, columns in _layouts(probe, names):
        if _confirmed(probe, names, rows, columns):
            return [
                Pair(source, (reader,), rows, columns)
                for source, reader in names.items()
            ]
    return []


def _layouts(
    probe: BlockProbe, names: Mapping[str, str]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield candidates for the rows of a source: all, or a half of a gated layer."""
    source, reader = next(iter(names.items()))
    device = inputs_last(probe.parts[source]).device
    outputs = len(inputs_last(probe.parts[source]))
    inputs = inputs_last(probe.parts[reader]).shape[1]
    every = torch.arange(inputs, device=device)
    if outputs == inputs:
        yield every, every
    elif outputs == 2 * inputs:
        # The second half, the first half, odd and even rows: where gated layers keep what they
        # multiply.
        for start, step in ((inputs, 1), (0, 1), (1, 2), (0, 2)):
            yield start + step * every, every
    if len(names) == 1:
        # Values of heads that are repeated for groups of queries follow neither layout.
        indices = _values_of(probe, source, reader, outputs)
        if indices is not None:
            yield torch.unique(indices, return_inverse=True)


def _values_of(
    probe: BlockProbe, source: str, reader: str, outputs: int
) -> torch.Tensor | None:
    """Return the index of the source output for each input of a reader at the first token.

    The outputs are told apart by powers of two that stand for the digits of their indices. A reader
    that the call does not reach follows none: cross attention without an encoder, and a layer whose
    weight the block multiplies itself.
    """
    if reader not in probe.base.inputs or source not in probe.base.outputs:
        return None
    # (inputs,) of the first token, which attends to itself alone.
    before = probe.base.inputs[reader][0].float()
    every = torch.arange(outputs, device=before.device)
    indices = torch.zeros_like(before)
    step = 1
    while step < outputs:
        # Powers of two scale floats exactly, so that two bits of the index are read off per run.
        trace = probe.run({source: 2.0 ** -(every // step % 4)})
        digits = torch.log2(trace.inputs[reader][0].float() / before)
        rounded = digits.round()
        are_digits = ((digits - rounded).abs() < 0.01) & (rounded >= 0) & (rounded <= 3)
        if not are_digits.all() or not rounded.any():
            return None
        indices = indices + rounded * step
        step = 4 * step
    return indices.long() if indices.max() < outputs else None


def _confirmed(
    probe: BlockProbe,
    names: Mapping[str, str],
    rows: torch.Tensor,
    columns: torch.Tensor,
) -> bool:
    """Return whether factors pass from sources to readers without a change of the block."""
    factors = probe.factors(len(rows))
    divide = dict[str, torch.Tensor]()
    multiply = dict[str, torch.Tensor]()
    for source, reader in names.items():
        # Experts without tokens are taken to be like those with tokens.
        if reader not in probe.base.inputs:
            continue
        # (outputs of the source,): 1 but for the rows of the pair.
        outputs = probe.base.outputs[source].shape[-1]
        ones = torch.ones(outputs, device=factors.device)
        divide[source] = ones.index_copy_(0, rows, factors)
        multiply[reader] = factors[columns]
    if not multiply:
        return False
    trace = probe.run(divide, multiply)
    unscaled = (
        probe.unscaled(trace, reader, passed) for reader, passed in multiply.items()
    )
    return all(unscaled) and probe.same(trace)


def _close(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return bool(torch.allclose(first.float(), second.float(), rtol=1e-3, atol=1e-5))
    if not isinstance(first, tuple | list):
        return False
    return all(_close(one, other) for one, other in zip(first, second, strict=False))


def _with_unreached(probe: BlockProbe, readers: list[str]) -> list[str]:
    """Add experts without tokens to the readers of the experts with tokens."""
    # The short call reaches a few experts; all of them read what their router reads.
    patterns = {pattern_of(name) for name in readers}
    unreached = [name for name in probe.parts if name not in probe.base.inputs]
    return [*readers, *(name for name in unreached if pattern_of(name) in patterns)]


def pattern_of(name: str) -> str:
    """Replace the numbers of a name by stars: the common pattern of experts.

    >>> pattern_of("experts.3.up_proj")
    'experts.*.up_proj'
    """
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _gain(
    probe: BlockProbe, name: str, factors: torch.Tensor
) -> tuple[str, float] | None:
    """Return the gain parameter of a norm, and the summand of the gain."""
    module = probe.parts[name]
    x = probe.base.inputs[name].float()
    parameters = {
        key: parameter.detach().float()
        for key, parameter in module.named_parameters(recurse=False)
    }
    # The output that readers need whose weights are multiplied by the factors.
    wanted = functional_call(module, parameters, (x,)) / factors
    for gain in parameters:
        # A norm computes gain * x, or (1 + gain) * x as Gemma's does; its other parameters are
        # added.
        for unit in (0.0, 1.0):
            changed = {key: value / factors for key, value in parameters.items()}
            changed[gain] = (parameters[gain] + unit) / factors - unit
            error = functional_call(module, changed, (x,)) - wanted
            if error.norm() <= 1e-4 * wanted.norm():
                return gain, unit
    return None
