"""Probe a block with a short call and random factors on channels of inputs or outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from quark_onnx.torch.calibration.block_stream import BlockArguments
from quark_onnx.torch.models.recording import recording

#: Tokens of a short call.
_TOKENS = 32


@dataclass(frozen=True)
class Trace:
    """The record of a run, by local names of the parts, in the order of their first run.

    Attributes:
        output: the hidden states after the block.
        inputs: the inputs of parts, (tokens, features); runs of a part are concatenated.
        outputs: the outputs of parts, likewise.
    """

    output: torch.Tensor
    inputs: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]


class BlockProbe:
    """A block that is run repeatedly with factors.

    Factors are powers of two: multiplication by them is exact in any floating type, so that results
    that should be equal are equal.

    Args:
        block: a decoder block; it stays as it is.
        call: its arguments for one sample.

    Attributes:
        parts: the innermost modules that have parameters of their own, none of them shared, by
            their local names.
        base: the record of a run without factors.
    """

    def __init__(self, block: nn.Module, call: BlockArguments) -> None:
        self._block = block
        self.parts = dict(_parts(block))
        self._call = short(block, call)
        self.base = self.run()
        # Relative to what the block adds: the hidden states that pass through it may be a thousand
        # times larger, and would hide any difference.
        self._least = 1e-3 * self._change().float().abs().median()

    def _change(self) -> torch.Tensor:
        """Return the block's addition to the residual stream; the output if widths differ."""
        output = self.base.output
        hidden: torch.Tensor = self._call.hidden
        # Blocks add to their input; one that changes the width cannot.
        if output.shape == hidden.shape:
            return output - hidden
        return output

    def run(
        self,
        divide: Mapping[str, torch.Tensor] = MappingProxyType({}),
        multiply: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> Trace:
        """Run the block with factors on parts.

        Args:
            divide: the divisors of each output channel, by part.
            multiply: the factors of each input channel, by part; inputs are recorded before.
        """
        read = {name: _times(factors) for name, factors in multiply.items()}
        computed = {name: _times(1 / factors) for name, factors in divide.items()}
        with torch.no_grad(), recording(self.parts, read, computed) as record:
            output = self._call.run(self._block)
        return Trace(
            output, _concatenated(record.inputs), _concatenated(record.outputs)
        )

    def same(self, trace: Trace) -> bool:
        """Return whether a run has the output of the run without factors."""
        # The root mean square, against the median of what the block adds: both in units of hidden
        # states.
        error = (trace.output - self.base.output).float().square().mean().sqrt()
        # A block that adds nothing cannot tell whether anything has changed.
        return bool(error <= self._least) and bool(self._least > 0)

    def unscaled(self, trace: Trace, name: str, factors: torch.Tensor) -> bool:
        """Return whether a part reads its input of the run without factors, divided by them."""
        before = self.base.inputs.get(name)
        now = trace.inputs.get(name)
        if (
            before is None
            or now is None
            or before.shape != now.shape
            or before.shape[-1] != len(factors)
        ):
            return False
        kind = torch.finfo(now.dtype)
        # below, powers of two do not commute with rounding
        least = 4 * kind.smallest_normal * kind.eps
        # An input of zeros would pass with any factors.
        return bool(before.any()) and torch.allclose(
            now * factors.to(now.dtype), before, rtol=1e-3, atol=least
        )

    def factors(self, count: int) -> torch.Tensor:
        """Return factors for channels, 1/2 or 2, from a fixed seed."""
        device = self.base.output.device
        # The seed is the count: equal factors for equal widths, in all runs of a probe.
        generator = torch.Generator().manual_seed(count)
        bits = torch.randint(0, 2, (count,), generator=generator)
        # 4^0 / 2 and 4^1 / 2.
        return (4.0**bits / 2).to(device)


def _concatenated(runs: Mapping[str, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {
        name: torch.cat([tensor.flatten(0, -2) for tensor in tensors])
        for name, tensors in runs.items()
    }


def _times(factors: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * factors.to(x.dtype)


def short(
    block: nn.Module, call: BlockArguments, tokens: int = _TOKENS
) -> BlockArguments:
    """Return the first tokens of a call; the whole call if outputs depend on later tokens."""
    length = call.hidden.shape[1]
    if length <= tokens:
        return call
    args = _first(call.args, length, tokens)
    kwargs = _first(call.kwargs, length, tokens)
    cut = BlockArguments(call.hidden[:, :tokens], args, kwargs)
    with torch.no_grad():
        expected = call.run(block)[:, :tokens].float()
        try:
            output = cut.run(block).float()
        except RuntimeError:  # something else is as long as the sample
            return call
    if output.shape != expected.shape:
        return call
    # Causal attention gives the first tokens the same outputs; other blocks mix in later tokens.
    is_close = (output - expected).norm() <= 1e-2 * expected.norm()
    return cut if is_close else call


def _first(value: Any, length: int, tokens: int) -> Any:
    """Truncate arguments with an entry per token: positions, rotary embeddings, masks."""
    if isinstance(value, Mapping):
        return {name: _first(item, length, tokens) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_first(item, length, tokens) for item in value)
    if not isinstance(value, torch.Tensor):
        return value
    # (tokens,), (batch, tokens), (batch, tokens, features), masks (batch, heads, queries, keys).
    axes = {1: [0], 2: [1], 3: [1], 4: [2, 3]}.get(value.ndim, [])
    # Tables of another length, such as rotary embeddings of all positions, stay as they are.
    for axis in axes:
        if value.shape[axis] != length:
            break
        value = value.narrow(axis, 0, tokens)
    return value


def _parts(block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    parameters = dict(block.named_parameters(remove_duplicate=False))
    # A parameter with two owners cannot be rescaled for one of them.
    owners = Counter(id(parameter) for parameter in parameters.values())
    for name, module in block.named_modules():
        direct = list(module.parameters(recurse=False))
        owned_once = {owners[id(parameter)] for parameter in direct} == {1}
        innermost = len(direct) == len(list(module.parameters()))
        if name and innermost and owned_once:
            yield name, module
