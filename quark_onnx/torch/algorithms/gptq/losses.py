"""Output error of a layer for given codes of its weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from quark_onnx.torch.algorithms.gptq.triangular import quadratic
from quark_onnx.torch.formats.quantized_tensor import Quantized

#: Random sums of outputs that stand for all, where only the size of what a layer computes is asked
#: for.
_SUMS = 128
#: Types that torch.where does not know, by those of the same size that it does.
_BITS = {torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}


@dataclass(frozen=True)
class Loss:
    """The squared error of each output, summed over tokens.

    Attributes:
        weight: (outputs, inputs).
        squares: of weights that are off by so much, (outputs, inputs), the squared error of each
            output.
        pull: (inputs, outputs): what the layer should compute beside ``weight``, times the inputs;
            None for nothing.
    """

    weight: Any
    squares: Callable[[Any], Any]
    pull: Any = None

    def __call__(self, found: Quantized) -> Any:
        """(outputs,); beside a pull it is up to a constant."""
        off = found.dequantize(torch.float32).reshape(self.weight.shape) - self.weight
        square = self.squares(off)
        if self.pull is None:
            return square
        return square - 2 * (off * self.pull.t()).sum(1)

    def power(self) -> Any:
        """The sum of squares of what the float weight computes.

        Of more outputs than a few it is estimated.

        Of sums of all outputs, with random signs, the mean square is expected to be that
        (Hutchinson 1990); its standard deviation is an eighth of it where all outputs are the same,
        and less the more they differ.
        """
        rows = len(self.weight)
        if rows <= _SUMS:
            return self.squares(self.weight).sum()
        signs = (
            torch.randint(
                0,
                2,
                (_SUMS, rows),
                generator=torch.Generator().manual_seed(0),
            )
            .mul_(2)
            .sub_(1)
        )
        return self.squares(signs.to(self.weight) @ self.weight).sum() / _SUMS


def squares_of(gram: Any) -> Callable[[Any], Any]:
    """What a loss takes the squares of: of what inputs with these products, (inputs, inputs), make
    of a weight; None stands for inputs that do not depend on each other.
    """
    if gram is None:
        return lambda off: off.square().sum(1)
    return lambda off: quadratic(off, gram, gram.diagonal())


def better(
    best: Quantized,
    error: Any,
    found: Quantized,
    new: Any,
) -> tuple[Quantized, Any]:
    """Row by row, what has less error; where a scale is the whole tensor's, all of either."""
    if best.scale.ndim == 0:
        if new.sum() < error.sum():
            return (found, new)
        return (best, error)
    wins = new < error
    return merged(best, found, wins), torch.where(wins, new, error)


def merged(one: Quantized, other: Quantized, wins: Any) -> Quantized:
    """A weight with the rows of another where a mask, (rows,), says so.

    Each row has scales of its own.
    """
    parts = dict[str, Any]()
    for part in ("codes", "scale", "zero"):
        old = getattr(one, part)
        if old is not None:
            own = getattr(other, part)
            bits = _BITS.get(old.dtype, old.dtype)
            mask = wins.reshape(-1, *[1] * (old.ndim - 1))
            parts[part] = torch.where(mask, own.view(bits), old.view(bits)).view(
                old.dtype,
            )
    return replace(one, **parts)
