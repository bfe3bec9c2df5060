"""ActivationStats: the statistics of activations from which scales are chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quark_onnx.common.errors import DataError
from quark_onnx.torch.algorithms.gptq.triangular import add_products, quadratic_form
from quark_onnx.torch.algorithms.rescaling.channel_pairs import inputs_last
from quark_onnx.torch.calibration.block_stream import BlockArguments
from quark_onnx.torch.models.names import input_hooks
from quark_onnx.torch.models.quantized_layer import split_input
from quark_onnx.torch.runtime import distributed
from quark_onnx.torch.runtime.reductions import total

#: Layers with more inputs keep tokens: products of inputs would take more memory.
PRODUCT_INPUTS = 2048
#: Tokens of all calls together.
KEPT_TOKENS = 1024


@dataclass(frozen=True)
class ActivationStats:
    """Statistics of the inputs x of a layer over all tokens, in float32.

    Attributes:
        mean: (inputs,), the mean absolute values.
        lo: (inputs,), the least values.
        hi: (inputs,), the greatest values.
        second: (inputs, inputs), the mean of x^T x, valid above and on the diagonal; None if tokens
            were collected.
        tokens: (tokens, inputs), evenly spread samples; None if products were collected.
    """

    mean: torch.Tensor
    lo: torch.Tensor
    hi: torch.Tensor
    second: torch.Tensor | None = None
    tokens: torch.Tensor | None = None

    @property
    def largest(self) -> torch.Tensor:
        """The greatest absolute values, (inputs,)."""
        return torch.maximum(-self.lo, self.hi)

    def power(self, weight: torch.Tensor) -> float:
        """Return the mean square of a weight's outputs, summed over outputs.

        Args:
            weight: (outputs, inputs).

        >>> x = torch.tensor([[1.0, 0.0], [1.0, 2.0]])
        >>> ActivationStats(None, None, None, x.t() @ x / 2).power(torch.tensor([[3.0, 1.0]]))
        17.0
        """
        # E[(w x)^2] = w E[x^T x] w^T: no token is needed.
        if self.second is not None:
            powers = quadratic_form(weight, self.second, self.second.diagonal())
            return float(total(powers).clamp(min=0))
        assert self.tokens is not None
        # The mean over the kept tokens, which stand for all.
        return float(total((weight @ self.tokens.t()).square()) / len(self.tokens))


class _Collector:
    """A collector of the statistics of a layer's inputs.

    Args:
        share: tokens to keep of each call.
        products: sum products of inputs instead, for layers that are not too wide.
    """

    def __init__(self, share: int, products: bool) -> None:
        self._share = share
        self._products = products
        self.count = 0
        self._sum: torch.Tensor | None = None
        self._ends: list[torch.Tensor] = []
        self._second: torch.Tensor | None = None
        self._tokens = list[torch.Tensor]()

    def observe(self, x: torch.Tensor) -> None:
        """Add inputs, (tokens, inputs) float32."""
        if not len(x):
            return
        self.count += len(x)
        total = x.abs().sum(0)
        self._sum = total if self._sum is None else self._sum.add_(total)
        lo, hi = torch.aminmax(x, dim=0)
        if self._ends:
            self._ends = [
                torch.minimum(self._ends[0], lo),
                torch.maximum(self._ends[1], hi),
            ]
        else:
            self._ends = [lo, hi]
        # Products grow with the square of the width: wider layers keep tokens.
        if self._products and x.shape[-1] <= PRODUCT_INPUTS:
            if self._second is None:
                self._second = x.new_zeros((x.shape[1], x.shape[1]))
            add_products(self._second, x)
        else:
            # From the middle of each stretch: the first token of a text is often an attention
            # sink, whose activations are unlike those of the others.
            step = -(-len(x) // self._share)
            self._tokens.append(x[step // 2 :: step].clone())

    def moments(self, name: str) -> ActivationStats:
        """Return the statistics; raise DataError for numbers that are infinite or none."""
        assert self._sum is not None
        # A sum of absolute values is finite only if each of them is.
        mean, (lo, hi) = self._sum / self.count, self._ends
        if not torch.isfinite(mean).all():
            raise DataError(
                f"what {name} reads is infinite or no number on the calibration data",
            )
        if self._second is not None:
            second = distributed.summed(self._second)
            return ActivationStats(mean, lo, hi, second=second / self.count)
        return ActivationStats(mean, lo, hi, tokens=torch.cat(self._tokens))


def moments_of(
    block: nn.Module,
    calls: Sequence[BlockArguments],
    names: Iterable[str],
    *,
    products: bool,
) -> dict[str, ActivationStats]:
    """Collect the statistics of layers' inputs; layers that no token reaches are left out.

    Args:
        block: the block.
        calls: one call of the block for each sample.
        names: the layers, by their names inside of the block.
        products: collect products of inputs; tokens otherwise.

    Raises:
        DataError: a layer reads numbers that are infinite or none.
    """
    # Tokens of each call, rounded up.
    share = -(-KEPT_TOKENS // max(distributed.number(len(calls)), 1))
    # Each layer once: a router and experts may be readers of several pairs.
    collectors = {name: _Collector(share, products) for name in dict.fromkeys(names)}
    if not collectors:
        return {}
    layers = {name: block.get_submodule(name) for name in collectors}
    device = inputs_last(next(iter(layers.values()))).device
    with torch.no_grad():
        for sample in distributed.in_order(_inputs(block, calls, layers), device):
            for name, tensors in sample.items():
                for x in tensors:
                    collectors[name].observe(x)
    return {
        name: collector.moments(name)
        for name, collector in collectors.items()
        if collector.count
    }


def _inputs(
    block: nn.Module, calls: Sequence[BlockArguments], layers: Mapping[str, nn.Module]
) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Yield the inputs of layers, (tokens, inputs) float32, call by call."""
    for call in calls:
        inputs = dict[str, list[torch.Tensor]]()
        with input_hooks(layers, lambda name: _input_hook(inputs, name)):  # noqa: B023
            call.run(block)
        yield inputs


def _input_hook(
    inputs: dict[str, list[torch.Tensor]], name: str
) -> Callable[..., None]:
    def hook(
        module: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]
    ) -> None:
        x = split_input(args, named)[0].detach().flatten(0, -2)
        # Sums of bfloat16 would lose digits; a copy, as the model may go on in place.
        inputs.setdefault(name, []).append(x.to(torch.float32, copy=True))

    return hook
