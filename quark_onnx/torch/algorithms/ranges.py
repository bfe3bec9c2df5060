"""Ranges of weights, chosen by the error that rounding to the nearest causes, weighted by the power of each input."""

from __future__ import annotations

from typing import Any

import torch

from quark_onnx.dtypes import Scaled
from quark_onnx.torch import affine
from quark_onnx.torch.affine import Params
from quark_onnx.torch.packing import in_blocks
from quark_onnx.torch.quantized import Quantized, quantize

#: Ranges are tried at these shares of the whole one.
_SHARES = tuple(1 - step / 40 for step in range(29))


def fitted(weight: Any, start: Quantized, power: Any) -> Quantized:
    """A weight with the best of several ranges for each of its scales, rounded to the nearest.

    Args:
        weight: (outputs, inputs), float32.
        start: it with scales as they are; formats without scales of their own, and scales of a whole tensor, stay so.
        power: (inputs,), how much an error in each input's weight matters.
    """
    spec = start.spec
    if not isinstance(spec.dtype, Scaled) or not (spec.group or spec.per_channel):
        return start
    view = in_blocks(weight, spec.group) if spec.group else weight
    counts = in_blocks(power[None], spec.group)[0] if spec.group else power
    lo, hi = affine.extremes(view)
    kind = affine.scale_type(spec, start.dtype)
    least: Any = None
    for share in _SHARES:
        low, high = ((end * share).squeeze(-1).to(start.dtype) for end in (lo, hi))
        params = affine.params_for(low, high, spec)
        params = Params(params.scale.to(kind), params.zero)
        wide = Params(*(None if part is None else part[..., None].float() for part in params))
        left = affine.decode(affine.encode(view, wide, spec), wide)
        error = ((left - view).square() * counts).sum(-1)
        if least is None:
            least, best = error, params
            continue
        less = error < least
        least = torch.where(less, error, least)
        chosen = zip(params, best, strict=True)
        best = Params(*(None if new is None else torch.where(less, new, old) for new, old in chosen))
    return quantize(weight.to(start.dtype), spec, params=best)
