"""Search the scales of a weight by the error of rounding to nearest."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quark_onnx.dtypes import Scaled
from quark_onnx.torch.config.spec import TensorSpec
from quark_onnx.torch.formats import affine
from quark_onnx.torch.formats.affine import Params
from quark_onnx.torch.formats.bit_packing import in_blocks
from quark_onnx.torch.formats.quantized_tensor import Quantized, joined, quantize

#: Elements that are searched at once: as many as a processor's cache holds.
_AT_ONCE = 1 << 18
#: Shares of the full range that are tried.
SHARES = tuple(1 - step / 40 for step in range(29))
#: Every third share is tried first, then the neighbours of the best.
_STRIDE = 3


def has_ranges(spec: TensorSpec) -> bool:
    """Return whether the scale of each row or group can be chosen.

    >>> has_ranges(TensorSpec("int4", block_size=32)), has_ranges(TensorSpec("mxfp4e2m1"))
    (True, False)
    """
    return isinstance(spec.dtype, Scaled) and not spec.per_tensor


def fitted(
    weight: torch.Tensor,
    start: Quantized,
    power: torch.Tensor,
    shares: tuple[float, ...] = SHARES,
    *,
    apart: bool = False,
) -> Quantized:
    """Choose the scale of each row or group, and round to nearest.

    Args:
        weight: (outputs, inputs) float32.
        start: the weight with its present scales. Formats without scales, and per-tensor scales,
            keep the codes.
        power: the importance of errors: (inputs,), the power of each input, or (inputs, inputs),
            the products of inputs, of which the blocks within groups count.
        shares: shares of the full range to choose from, beginning with 1.
        apart: search the two ends of asymmetric ranges separately after the common search.
    """
    spec = start.spec
    if not has_ranges(spec):
        return start
    size = spec.group or weight.shape[1]
    groups = in_blocks(weight, size)  # (outputs, groups, size)
    importance = _diagonal_blocks(power, size)
    # Rows are independent of each other.
    rows = max(1, _AT_ONCE // max(1, groups[:1].numel()))
    both_ends = apart and not spec.grid.symmetric
    parts = [
        _RangeSearch(part, importance, start).best(shares, apart=both_ends)
        for part in groups.split(rows)
    ]
    params = Params(*map(joined, zip(*parts, strict=True)))
    if not spec.group:
        # (outputs, 1) to (outputs,), as per-channel scales are stored.
        params = params.each(lambda tensor: tensor.squeeze(-1))
    # In the type of the float weight, which decides in what type codes are computed.
    return quantize(weight.to(start.dtype), spec, params=params)


class _RangeSearch:
    """A search for a chunk of rows.

    Args:
        view: (rows, groups, size), the weight.
        importance: (groups, size), or (groups, size, size).
        start: the weight, for spec and type.
    """

    def __init__(
        self, view: torch.Tensor, importance: torch.Tensor, start: Quantized
    ) -> None:
        self._view = view
        self._importance = importance
        self._spec = start.spec
        self._dtype = start.dtype
        self._scale_type = affine.scale_type(start.spec, start.dtype)
        lo, hi = affine.extremes(view)
        self._lo = lo.squeeze(-1)
        self._hi = hi.squeeze(-1)

    def _params(self, low: torch.Tensor, high: torch.Tensor) -> Params:
        """Return scales and zero points for shares of the two ends, (rows, groups)."""
        # In the type of the weight, which decides in what type scales are computed.
        params = affine.params_for(
            (self._lo * low).to(self._dtype),
            (self._hi * high).to(self._dtype),
            self._spec,
        )
        return Params(params.scale.to(self._scale_type), params.zero)

    def _error(self, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        """Return the weighted squared error of each group, (rows, groups)."""
        params = self._params(low, high).each(lambda tensor: tensor[..., None].float())
        error = affine.rounded(self._view, params, self._spec).sub_(self._view)
        if self._importance.ndim == 2:
            return (error.square_() * self._importance).sum(-1)
        # e^T (X X^T) e of each group: errors of inputs that occur together add up or cancel.
        return (torch.einsum("rbi,bij->rbj", error, self._importance) * error).sum(-1)

    def best(self, shares: tuple[float, ...], *, apart: bool) -> Params:
        """Return the scales and zero points with the least error, (rows, groups)."""
        table = torch.tensor(shares, dtype=self._lo.dtype, device=self._lo.device)
        low = high = torch.ones_like(self._lo)
        # Both shares are 1: the full range, which stays where no share is better.
        least = self._error(low, high)
        best = torch.zeros_like(self._lo, dtype=torch.int64)
        passes: list[tuple[str, ...]] = [("low", "high")]
        if apart:
            passes += [("high",), ("low",)]
        for ends in passes:
            start_low, start_high = low, high
            for indices in _share_indices(best, len(shares)):
                share = table[indices]
                trial_low = share if "low" in ends else start_low
                trial_high = share if "high" in ends else start_high
                error = self._error(trial_low, trial_high)
                # Strictly less: of equal errors, the share that was tried first stays.
                less = error < least
                least = torch.where(less, error, least)
                low = torch.where(less, trial_low, low)
                high = torch.where(less, trial_high, high)
                torch.where(less, indices, best, out=best)
        return self._params(low, high)


def _share_indices(best: torch.Tensor, count: int) -> Iterator[torch.Tensor]:
    """Iterate over the indices of shares to try, (rows, groups) each.

    Args:
        best: (rows, groups), the best indices so far, which the caller updates between steps.
        count: the number of shares.
    """
    for index in range(0, count, _STRIDE):
        yield torch.full_like(best, index)
    # A copy: the caller goes on to update ``best`` during the second round.
    middle = best.clone()
    for step in range(1, _STRIDE):
        for neighbour in (middle - step, middle + step):
            yield neighbour.clamp(0, count - 1)


def _diagonal_blocks(power: torch.Tensor, size: int) -> torch.Tensor:
    """Split (inputs,) into (groups, size), and (inputs, inputs) into (groups, size, size)."""
    # The padding of the last group has no importance.
    if power.ndim == 1:
        return in_blocks(power[None], size)[0]
    # (groups, size, groups, size)
    blocks = in_blocks(in_blocks(power, size).permute(1, 2, 0), size)
    return blocks.diagonal(dim1=0, dim2=2).permute(2, 1, 0)
