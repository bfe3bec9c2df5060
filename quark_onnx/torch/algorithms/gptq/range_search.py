"""Search the ranges of weights by the error of rounding to nearest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from quark_onnx.dtypes import Scaled
from quark_onnx.torch.config.spec import TensorSpec
from quark_onnx.torch.formats import affine
from quark_onnx.torch.formats.affine import Params
from quark_onnx.torch.formats.bit_packing import in_blocks
from quark_onnx.torch.formats.quantized_tensor import Quantized, joined, quantize

#: Values that are looked at together: as many as caches hold.
_AT_ONCE = 1 << 18
#: Ranges are tried at these shares of the whole one.
SHARES = tuple(1 - step / 40 for step in range(29))
#: Of these, each so-manieth is tried first, and then those beside the best.
_STRIDE = 3


def has_ranges(spec: TensorSpec) -> bool:
    """Whether each row or group of a weight has a scale that may be chosen.

    >>> has_ranges(TensorSpec("int4", block_size=32)), has_ranges(TensorSpec("mxfp4e2m1"))
    (True, False)
    """
    return isinstance(spec.dtype, Scaled) and bool(spec.group or spec.per_channel)


def tries(shares: int) -> int:
    """How many of so many shares are tried.

    >>> tries(29)
    14
    """
    return -(-shares // _STRIDE) + 2 * (_STRIDE - 1)


def fitted(
    weight: Any,
    start: Quantized,
    power: Any,
    shares: tuple[float, ...] = SHARES,
    *,
    apart: bool = False,
) -> Quantized:
    """A weight with the best of several ranges for each of its scales, rounded to the nearest.

    Args:
        weight: (outputs, inputs), float32.
        start: it with scales as they are; formats without scales of their own, and scales of a
            whole tensor, stay so.
        power: how much errors matter: (inputs,) for each input's weight, or (inputs, inputs),
            products of inputs, of which those within a group count.
        shares: of the whole range, 1 first; a few, and those beside the best of them, are tried.
        apart: whether the two ends of an asymmetric range are tried one by one, too.
    """
    spec = start.spec
    if not has_ranges(spec):
        return start
    size = spec.group or weight.shape[1]
    # (outputs, blocks, size)
    view, counts = (in_blocks(weight, size), _blocks(power, size))
    rows = max(1, _AT_ONCE // max(1, view[:1].numel()))
    parts = [
        _best_params(part, counts, start, shares, apart and not spec.grid.symmetric)
        for part in view.split(rows)
    ]
    found = Params(*(joined(each) for each in zip(*parts, strict=True)))
    if not spec.group:
        found = Params(*(None if part is None else part.squeeze(-1) for part in found))
    return quantize(weight.to(start.dtype), spec, params=found)


def _best_params(
    view: Any,
    counts: Any,
    start: Quantized,
    shares: tuple[float, ...],
    apart: bool,
) -> Params:
    """Of some rows: (rows, blocks)."""
    spec = start.spec
    lo, hi = (end.squeeze(-1) for end in affine.extremes(view))
    kind = affine.scale_type(spec, start.dtype)

    def params_of(low: Any, high: Any) -> Params:
        params = affine.params_for(
            (lo * low).to(start.dtype),
            (hi * high).to(start.dtype),
            spec,
        )
        return Params(params.scale.to(kind), params.zero)

    def error_of(low: Any, high: Any) -> Any:
        wide = Params(
            *(
                None if part is None else part[..., None].float()
                for part in params_of(low, high)
            ),
        )
        off = affine.rounded(view, wide, spec).sub_(view)
        if counts.ndim == 2:
            return (off.square_() * counts).sum(-1)
        return (torch.einsum("rbi,bij->rbj", off, counts) * off).sum(-1)

    table = torch.tensor(shares, dtype=lo.dtype, device=lo.device)
    low = high = torch.ones_like(lo)
    least = error_of(low, high)
    best = torch.zeros_like(lo, dtype=torch.int64)
    for ends in _passes(apart):
        start_low = low
        start_high = high
        for places in _places(best, len(shares)):
            tried = table[places]
            trial = (
                tried if "low" in ends else start_low,
                tried if "high" in ends else start_high,
            )
            error = error_of(*trial)
            less = error < least
            least = torch.where(less, error, least)
            low = torch.where(less, trial[0], low)
            high = torch.where(less, trial[1], high)
            torch.where(less, places, best, out=best)
    return params_of(low, high)


def _places(best: Any, count: int) -> Iterator[Any]:
    """Places to try, for each range: few of all, and then those beside the best of them, which the
    caller puts into ``best``.
    """
    for place in range(0, count, _STRIDE):
        yield torch.full_like(best, place)
    middle = best.clone()
    for step in range(1, _STRIDE):
        for place in (middle - step, middle + step):
            yield place.clamp(0, count - 1)


def _passes(apart: bool) -> Iterator[tuple[str, ...]]:
    yield ("low", "high")
    if apart:
        yield ("high",)
        yield ("low",)


def _blocks(power: Any, size: int) -> Any:
    """(inputs,) as (blocks, size), and (inputs, inputs) as (blocks, size, size): those on the
    diagonal.
    """
    if power.ndim == 1:
        return in_blocks(power[None], size)[0]
    # (blocks, size, blocks, size)
    parts = in_blocks(in_blocks(power, size).permute(1, 2, 0), size)
    return parts.diagonal(dim1=0, dim2=2).permute(2, 1, 0)
