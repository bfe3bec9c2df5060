"""ActivationStats: the statistics of activations from which scales are chosen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quark_onnx.common.containers import flattened
from quark_onnx.common.errors import DataError
from quark_onnx.torch.algorithms.gptq.triangular import add_products, quadratic_form
from quark_onnx.torch.algorithms.rescaling.channel_pairs import inputs_last
from quark_onnx.torch.calibration.block_stream import Call
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

    mean: Any
    lo: Any
    hi: Any
    second: Any = None
    tokens: Any = None

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
        self._sum: Any = None
        self._ends: list[Any] = []
        self._second: Any = None
        self._tokens = list[Any]()

    def observe(self, x: torch.Tensor) -> None:
        """Add inputs, (..., tokens, inputs)."""
        # (tokens, inputs) in float32, as sums of bfloat16 would lose digits.
        x = x.detach().flatten(0, -2).float()
        if not len(x):
            return
        self.count += len(x)
        total = x.abs().sum(0)
        if self._sum is None:
            self._sum = total
        else:
            self._sum = self._sum.add_(total)
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

    def over_ranks(self, like: torch.Tensor) -> None:
        """Add the statistics of other processes.

        Args:
            like: (inputs,) floats on the device of the layer.
        """
        if distributed.count() == 1:
            return
        zeros = torch.zeros_like(like, dtype=torch.float32)
        self.count = distributed.number(self.count)
        self._sum = distributed.summed(
            zeros.clone() if self._sum is None else self._sum,
        )
        # A rank without tokens must join the collective calls with neutral values; else the others
        # wait forever.
        lo, hi = self._ends or [zeros + torch.inf, zeros - torch.inf]
        self._ends = [distributed.least(lo), distributed.greatest(hi)]
        if self._products and len(zeros) <= PRODUCT_INPUTS:
            if self._second is None:
                second = zeros.new_zeros((len(zeros), len(zeros)))
            else:
                second = self._second
            self._second = distributed.summed(second)
        else:
            tokens = flattened(distributed.gathered(self._tokens))
            self._tokens = [tensor.to(zeros.device) for tensor in tokens]

    def moments(self, name: str) -> ActivationStats:
        """Return the statistics.

        Raises:
            DataError: numbers that are infinite or none.
        """
        # A sum of absolute values is finite only if each of them is.
        mean, (lo, hi) = self._sum / self.count, self._ends
        if not torch.isfinite(mean).all():
            raise DataError(
                f"what {name} reads is infinite or no number on the calibration data",
            )
        if self._second is not None:
            return ActivationStats(
                mean,
                lo,
                hi,
                second=self._second / self.count,
            )
        return ActivationStats(
            mean,
            lo,
            hi,
            tokens=torch.cat(self._tokens),
        )


def moments_of(
    block: nn.Module,
    calls: Sequence[Call],
    names: Iterable[str],
    *,
    products: bool = True,
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
    share = -(-KEPT_TOKENS // max(len(calls), 1))
    # Each layer once: a router and experts may be readers of several pairs.
    collectors = {name: _Collector(share, products) for name in dict.fromkeys(names)}
    if not collectors:
        return {}
    layers = dict(zip(collectors, map(block.get_submodule, collectors), strict=True))
    with (
        input_hooks(layers, lambda name: _observing(collectors[name])),
        torch.no_grad(),
    ):
        for call in calls:
            call.run(block)
    # Every rank has the same collectors, and so joins the same collective calls.
    for name, each in collectors.items():
        each.over_ranks(inputs_last(block.get_submodule(name))[0])
    found = dict[str, ActivationStats]()
    for name, each in collectors.items():
        if each.count:
            found[name] = each.moments(name)
    return found


def _observing(collector: _Collector) -> Any:
    def hook(
        module: nn.Module,
        args: tuple[Any, ...],
        named: Mapping[str, Any],
    ) -> None:
        collector.observe(split_input(args, named)[0])

    return hook
