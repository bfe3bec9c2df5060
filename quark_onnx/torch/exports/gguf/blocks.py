"""Weights as llama.cpp's blocks of 32: Q4_0, Q4_1 and Q8_0, whose scales are float16, and MXFP4,
whose are E8M0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quark_onnx.dtypes import Integer
from quark_onnx.errors import ModelError
from quark_onnx.torch.config.spec import TensorSpec
from quark_onnx.torch.formats.quantized_tensor import Quantized, quantize

#: Values to a block.
SIZE = 32
#: Values that are worked on at once, which bounds the memory that is needed beside the weight.
_CHUNK = 1 << 20
#: How often scales are fitted to the codes anew; more rounds lower the error by one part in a
#: thousand.
_ROUNDS = 6


@dataclass(frozen=True)
class Form:
    """A form of blocks: a value is scale * code, plus an offset where the form has one.

    Attributes:
        name: as GGUF calls it.
        least, greatest: codes.
        offset: whether there is one.
    """

    name: str
    least: int
    greatest: int
    offset: bool

    @property
    def bits(self) -> int:
        """Of a code."""
        return 4 if self.greatest < 16 else 8


Q4_0 = Form("Q4_0", -8, 7, False)
Q4_1 = Form("Q4_1", 0, 15, True)
Q8_0 = Form("Q8_0", -128, 127, False)
#: The codes are bit patterns of FP4 values, not integers.
MXFP4 = Form("MXFP4", 0, 15, False)
FORMS = {form.name: form for form in (Q4_0, Q4_1, Q8_0, MXFP4)}
_MXFP4 = TensorSpec("mxfp4e2m1")


def round_blocks(weight: Any, form: Form, name: str = "weight") -> Any:
    """The bytes of a weight whose codes are rounded to nearest: uint8 of shape (rows, bytes).

    Scales in float16 start as llama.cpp's own quantizer has them. They are fitted to the codes by
    least squares, in turn with the codes, wherever that lowers the squared error of a block; so no
    block is worse than llama.cpp's.

    Args:
        weight: floats of shape (rows, columns), columns a multiple of 32.
        name: what it is called, for errors.

    Raises:
        ModelError: it holds numbers that are infinite or none, or too great for a scale in float16.

    >>> round_blocks(torch.linspace(-1, 1, 64).reshape(2, 32), Q4_1).shape
    (2, 20)
    """
    if form is MXFP4:
        return store_codes(quantize(weight.float(), _MXFP4, name), form, name)
    rows, columns = weight.shape
    step = max(1, _CHUNK // max(columns, 1))
    parts = [
        _rounded(weight[start : start + step], form, name)
        for start in range(0, rows, step)
    ]
    return np.concatenate(parts)


def store_codes(weight: Quantized, form: Form, name: str = "weight") -> Any:
    """The bytes of a weight whose codes stay as they are; scales of integers become float16.

    See ``form_of``.

    Raises:
        ModelError: a scale is too great for float16.
    """
    groups = weight.shape[1] // SIZE
    codes = weight.matrix.cpu().to(torch.int32).reshape(len(weight.codes), groups, SIZE)
    if form is MXFP4:
        return _packed(codes, weight.scale.cpu()[..., None], None, form)
    least = weight.spec.grid.qmin
    scale = _float16(_for_blocks(weight.scale, weight.spec.group, codes), name)
    if not form.offset:
        return _packed(codes, scale, None, form)
    zero = (
        torch.zeros_like(scale)
        if weight.zero is None
        else _for_blocks(weight.zero, weight.spec.group, codes)
    )
    # of the scale that is stored: what stands for zero then stays nearest to it
    offset = _float16((least - zero.float()) * scale.float(), name)
    return _packed(codes - least, scale, offset, form)


def form_of(weight: Quantized, name: str = "weight") -> Form:
    """The blocks that hold the codes of a weight.

    Raises:
        ModelError: there are none: it is no matrix of integers, or a scale belongs to a part of a
            block.
    """
    spec = weight.spec
    if spec.dtype == _MXFP4.dtype and len(weight.shape) == 2:
        return MXFP4
    if (
        isinstance(spec.dtype, Integer)
        and len(weight.shape) == 2
        and spec.group % SIZE == 0
    ):
        if spec.dtype.bits <= 4:
            return Q4_0 if weight.zero is None and spec.grid.qmin < 0 else Q4_1
        if spec.dtype.name == "int8" and weight.zero is None:
            return Q8_0
    group = f" in groups of {spec.group}" if spec.group else ""
    raise ModelError(
        f"the codes of {name!r} ({spec.dtype.name}{group}) have no place in llama.cpp's"
        " blocks; mxfp4e2m1, integers of up to 4 bits and symmetric int8 have, in"
        f" groups of a multiple of {SIZE} or by channels or tensors",
    )


def _rounded(weight: Any, form: Form, name: str) -> Any:
    x = weight.to(torch.float32).reshape(-1, SIZE)
    if not torch.isfinite(x).all():
        raise ModelError(
            f"the weight {name!r} holds numbers that are infinite or none; it cannot be"
            " quantized",
        )
    scale, offset = _start(x, form)
    scale, offset = _float16(scale, name), _float16(offset, name)
    codes = _nearest(x, scale, offset, form)
    error = _error(x, codes, scale, offset)
    left = torch.arange(len(x))
    for _ in range(_ROUNDS):
        part = x[left]
        fitted, moved = (
            numbers.to(torch.float16)
            for numbers in _least_squares(part, codes[left], form)
        )
        tried = _nearest(part, fitted, moved, form)
        now = _error(part, tried, fitted, moved)
        better = now < error[left]  # false where an overflow made it infinite or none
        # a block that is no better would be tried with the same scale again: it is done
        left, kept = left[better], better.nonzero().squeeze(1)
        scale[left], offset[left], codes[left], error[left] = (
            fitted[kept],
            moved[kept],
            tried[kept],
            now[kept],
        )
    codes, scale, offset = (
        numbers.unflatten(0, (len(weight), -1)) for numbers in (codes, scale, offset)
    )
    return _packed(codes, scale, offset if form.offset else None, form)


def _start(x: Any, form: Form) -> tuple[Any, Any]:
    """Scale and offset (..., 1) as llama.cpp's own quantizer chooses them."""
    if form.offset:
        least, greatest = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        return (greatest - least) / form.greatest, least
    extreme = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    # the greatest magnitude takes the code -8, whatever its sign; eight bits are even, so that -128
    # is left out
    scale = extreme / form.least if form.bits == 4 else extreme.abs() / form.greatest
    return scale, torch.zeros_like(scale)


def _least_squares(x: Any, codes: Any, form: Form) -> tuple[Any, Any]:
    """Scale and offset (..., 1) with which the codes come nearest to the values."""
    codes = codes.float()
    if not form.offset:
        scale = (x * codes).sum(-1, keepdim=True) / (codes * codes).sum(
            -1,
            keepdim=True,
        )
        return scale, torch.zeros_like(scale)
    mean, middle = x.mean(-1, keepdim=True), codes.mean(-1, keepdim=True)
    spread = codes - middle
    scale = ((x - mean) * spread).sum(-1, keepdim=True) / (spread * spread).sum(
        -1,
        keepdim=True,
    )
    return scale, mean - scale * middle


def _nearest(x: Any, scale: Any, offset: Any, form: Form) -> Any:
    steps = (x - offset.float()) / scale.float()
    return (
        torch.round(steps)
        .nan_to_num_(0, 0, 0)
        .clamp_(form.least, form.greatest)
        .to(torch.int16)
    )


def _error(x: Any, codes: Any, scale: Any, offset: Any) -> Any:
    left = x - (codes.float() * scale.float() + offset.float())
    return (left.double() ** 2).sum(-1)


def _float16(x: Any, name: str) -> Any:
    short = x.to(torch.float16)
    if not torch.isfinite(short).all():
        raise ModelError(
            f"a scale of the weight {name!r} is too great for float16, in which GGUF"
            " stores it",
        )
    return short


def _for_blocks(params: Any, group: int, codes: Any) -> Any:
    """Scales or zero points of a weight as (rows, blocks, 1)."""
    params = params.detach().cpu().to(torch.float32)
    if group:
        params = params.repeat_interleave(group // SIZE, -1)[:, : codes.shape[1]]
    elif params.ndim:
        params = params[:, None]
    return params.expand(codes.shape[:2])[..., None]


def _packed(codes: Any, scale: Any, offset: Any, form: Form) -> Any:
    """(rows, bytes): of each block its scale, its offset, and its codes, of 4 bits the first 16 in
    the low nibbles.
    """
    if form.bits == 4:
        nibbles = (codes - form.least).to(torch.uint8)
        octets = nibbles[..., : SIZE // 2] | nibbles[..., SIZE // 2 :] << 4
    else:
        octets = codes.to(torch.int8).view(torch.uint8)
    numbers = [scale] if offset is None else [scale, offset]
    block = torch.cat(
        [*(number.contiguous().view(torch.uint8) for number in numbers), octets],
        -1,
    )
    return block.flatten(1).numpy()
