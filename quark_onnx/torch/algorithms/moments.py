"""What layers read, boiled down to what errors of their outputs depend on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quark_onnx.torch.algorithms.base import Call

#: Layers with more inputs keep some of the tokens in place of all products of inputs.
_PRODUCTS = 2048
#: How many.
_TOKENS = 1024


@dataclass(frozen=True)
class Moments:
    """Of the inputs x of a layer, over all tokens.

    Attributes:
        mean, largest: (inputs,) of their absolute values.
        second: (inputs, inputs), the mean of x^T x; for more than 2048 inputs None.
        tokens: (tokens, inputs), some of them, evenly spread, divided by the root of their number; in its place.
    """

    mean: Any
    largest: Any
    second: Any = None
    tokens: Any = None

    def power(self, change: Any) -> Any:
        """The mean square of what each row of a weight makes of the inputs: (rows, inputs) to (rows,).

        >>> inputs = torch.tensor([[1.0, 0.0], [1.0, 2.0]])
        >>> Moments(None, None, inputs.t() @ inputs / 2).power(torch.tensor([[3.0, 1.0]]))
        tensor([17.])
        """
        if self.second is not None:
            return ((change @ self.second) * change).sum(-1).clamp(min=0)
        return (change @ self.tokens.t()).square().sum(-1)


class _Gathering:
    """Takes in what a layer reads."""

    def __init__(self, share: int) -> None:
        self._share = share  # tokens of each call
        self.count = 0
        self._sum: Any = 0
        self._largest: Any = None
        self._second: Any = 0
        self._tokens = list[Any]()

    def observe(self, x: Any) -> None:
        x = x.detach().flatten(0, -2).float()
        if not len(x):
            return
        self.count += len(x)
        size = x.abs()
        self._sum = self._sum + size.sum(0)
        largest = size.amax(0)
        self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)
        if x.shape[-1] <= _PRODUCTS:
            self._second = self._second + x.t() @ x
        else:
            step = -(-len(x) // self._share)
            self._tokens.append(x[step // 2 :: step])

    def moments(self) -> Moments:
        mean = self._sum / self.count
        if not self._tokens:
            return Moments(mean, self._largest, self._second / self.count)
        tokens = torch.cat(self._tokens)
        return Moments(mean, self._largest, tokens=tokens / len(tokens) ** 0.5)


def moments_of(block: Any, calls: Sequence[Call], names: Iterable[str]) -> dict[str, Moments]:
    """The moments of what layers read; those that no token reaches are missing.

    Args:
        block: runs once on each call.
        names: of the layers, inside of the block.
    """
    gathered = {name: _Gathering(-(-_TOKENS // max(len(calls), 1))) for name in dict.fromkeys(names)}
    hooks = [
        block.get_submodule(name).register_forward_pre_hook(_observing(each), with_kwargs=True)
        for name, each in gathered.items()
    ]
    try:
        with torch.no_grad():
            for each in calls:
                each.run(block)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: each.moments() for name, each in gathered.items() if each.count}


def _observing(gathering: _Gathering) -> Any:
    def hook(module: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        gathering.observe(args[0] if args else next(iter(named.values())))

    return hook
