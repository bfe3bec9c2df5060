"""The output error of a layer for given codes of the weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from quark_onnx.torch.algorithms.gptq.triangular import quadratic_form
from quark_onnx.torch.formats.quantized_tensor import Quantized
from quark_onnx.torch.runtime.reductions import total

#: Random sums of outputs that estimate the power of many outputs.
_SUMS = 128
#: torch.where (torch 2.13) knows no float8; integers of the same size are selected instead.
_BITS = {torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}


@dataclass(frozen=True)
class Loss:
    """The squared error of each output, summed over tokens.

    Attributes:
        weight: (outputs, inputs), the float weight W.
        squares: maps E = Q - W, (outputs, inputs), to the squared error of each output.
        cross_products: (inputs, outputs), the products of the inputs and a correction that the
            layer should add to its float outputs; None for no correction.
    """

    weight: torch.Tensor
    squares: Callable[[torch.Tensor], torch.Tensor]
    cross_products: torch.Tensor | None = None

    def __call__(self, quantized: Quantized) -> torch.Tensor:
        """Return the loss of each output, (outputs,); with a correction, up to a constant."""
        E = quantized.dequantize(torch.float32).reshape(self.weight.shape) - self.weight
        square = self.squares(E)
        if self.cross_products is None:
            return square
        # (q - w) H (q - w) - 2 (q - w) p: the squared error of the corrected outputs, less a
        # constant.
        return square - 2 * (E * self.cross_products.t()).sum(1)

    def power(self) -> torch.Tensor:
        """Return the sum of squares of the float outputs; an estimate for many outputs.

        The mean square of sums of all outputs with random signs is an unbiased estimate (Hutchinson
        1990). The standard deviation is an eighth of the power where all outputs are equal, and
        less where outputs differ.
        """
        rows = len(self.weight)
        if rows <= _SUMS:
            return total(self.squares(self.weight))
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, (_SUMS, rows), generator=generator)
        signs.mul_(2).sub_(1)
        # (_SUMS, outputs) times (outputs, inputs): the squares of 128 sums in place of those of all
        # outputs.
        return self.squares(signs.to(self.weight) @ self.weight).sum() / _SUMS

    def shares(self, before: torch.Tensor, after: torch.Tensor) -> tuple[float, float]:
        """Return two errors of outputs, (outputs,), as shares of the power of all outputs."""
        # A layer of zeros has no power; its error is 0 as well.
        power = float(self.power()) or 1.0
        return float(before.sum()) / power, float(after.sum()) / power


def squares_of(H: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function ``squares`` of a loss.

    Args:
        H: (inputs, inputs), the products of inputs; None for uncorrelated inputs of power 1.
    """
    if H is None:
        return lambda E: E.square().sum(1)
    # Only the elements above the diagonal and on it are read.
    return lambda E: quadratic_form(E, H, H.diagonal())


def better(
    best: Quantized,
    error: torch.Tensor,
    new: Quantized,
    new_error: torch.Tensor,
) -> tuple[Quantized, torch.Tensor]:
    """Select the rows with less error; all rows at once for a per-tensor scale.

    Args:
        best: the present weight.
        error: (rows,), the errors of ``best``.
        new: the weight to compare.
        new_error: (rows,), the errors of ``new``.

    Returns:
        The selected weight and errors.
    """
    # One scale for all rows: a mixture of rows would need two.
    if best.scale.ndim == 0:
        if total(new_error) < total(error):
            return new, new_error
        return best, error
    # Not where errors are NaN: the present codes stay.
    wins = new_error < error
    return merged(best, new, wins), torch.where(wins, new_error, error)


def merged(first: Quantized, second: Quantized, wins: torch.Tensor) -> Quantized:
    """Replace rows of a weight with scales per row.

    Args:
        first: the weight.
        second: a weight of the same format.
        wins: (rows,) bool, the rows to take from ``second``.
    """
    tensors = dict[str, Any]()
    for name in ("codes", "scale", "zero"):
        old, new = getattr(first, name), getattr(second, name)
        if old is not None:
            bits = _BITS.get(old.dtype, old.dtype)
            # (rows, 1) or (rows, 1, 1), as codes of blocks have three axes.
            mask = wins.reshape(-1, *[1] * (old.ndim - 1))
            selected = torch.where(mask, new.view(bits), old.view(bits))
            tensors[name] = selected.view(old.dtype)
    return replace(first, **tensors)
