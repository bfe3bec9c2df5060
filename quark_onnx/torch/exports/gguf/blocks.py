"""Weights in llama.cpp's blocks of 32 values.

Q4_0, Q4_1 and Q8_0 have float16 scales, MXFP4 has E8M0 scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quark_onnx.common.errors import ModelError
from quark_onnx.dtypes import Integer
from quark_onnx.torch.config.spec import TensorSpec
from quark_onnx.torch.formats.affine import explicit_zero
from quark_onnx.torch.formats.quantized_tensor import Quantized, check_finite, quantize
from quark_onnx.torch.runtime.threads import on_threads

#: Values per block.
SIZE = 32
#: Values that are rounded at once: the tensors of a fit stay in the caches.
CHUNK = 1 << 18
#: Rounds of the alternating fit of scales and codes; further rounds lower the error by 0.1 %.
ROUNDS = 6


@dataclass(frozen=True)
class Form:
    """Block format: a value is scale * code, plus an optional offset.

    Attributes:
        name: GGUF's name.
        least: the least code.
        greatest: the greatest code.
        offset: whether blocks have an offset.
    """

    name: str
    least: int
    greatest: int
    offset: bool

    @property
    def bits(self) -> int:
        """Return the number of bits of a code."""
        return 4 if self.greatest < 16 else 8


Q4_0 = Form("Q4_0", -8, 7, False)
Q4_1 = Form("Q4_1", 0, 15, True)
Q8_0 = Form("Q8_0", -128, 127, False)
#: The codes are bit patterns of FP4 values, not integers.
MXFP4 = Form("MXFP4", 0, 15, False)
FORMS = {form.name: form for form in (Q4_0, Q4_1, Q8_0, MXFP4)}
_MXFP4 = TensorSpec("mxfp4e2m1")


def round_blocks(
    weight: torch.Tensor, form: Form, name: str = "weight"
) -> NDArray[Any]:
    """Round a weight to nearest, and pack it into blocks.

    Float16 scales start with the values of llama.cpp's own quantizer. Scales (by least squares) and
    codes are then fitted in turn, as long as the squared error of a block decreases. No block is
    worse than with llama.cpp's quantizer.

    Args:
        weight: floats of shape (rows, columns), columns a multiple of 32.
        form: the block format.
        name: the name of the weight in errors.

    Returns:
        uint8 of shape (rows, bytes).

    Raises:
        ModelError: the weight holds NaN, infinity, or values too large for a float16 scale.

    >>> round_blocks(torch.linspace(-1, 1, 64).reshape(2, 32), Q4_1).shape
    (2, 20)
    """
    if form is MXFP4:
        return store_codes(quantize(weight.float(), _MXFP4, name), form, name)
    rows, columns = weight.shape
    # Rows at once; the intermediate tensors are several times as large.
    step = max(1, CHUNK // max(columns, 1))

    def part(start: int) -> NDArray[np.uint8]:
        return _rounded(weight[start : start + step], form, name)

    # The operators are short: threads within each would wait for one another most of the time.
    return np.concatenate(on_threads(part, range(0, rows, step)))


def store_codes(weight: Quantized, form: Form, name: str = "weight") -> NDArray[Any]:
    """Pack existing codes into blocks; scales of integers become float16.

    Args:
        weight: the quantized weight.
        form: the block format, see ``form_of``.
        name: the name of the weight in errors.

    Returns:
        uint8 of shape (rows, bytes).

    Raises:
        ModelError: a scale is too large for float16.
    """
    groups = weight.shape[1] // SIZE
    # (rows, blocks, 32).
    codes = weight.matrix.cpu().to(torch.int32).reshape(len(weight.codes), groups, SIZE)
    if form is MXFP4:
        # (rows, blocks, 1): a byte of E8M0 for each block.
        return _packed(codes, weight.scale.cpu()[..., None], None, form)
    least = weight.spec.grid.qmin
    scale = _float16(_for_blocks(weight.scale, weight.spec.group, codes), name)
    if not form.offset:
        # Symmetric codes are stored as they are.
        return _packed(codes, scale, None, form)
    zero = explicit_zero(weight.zero, weight.scale)
    zero = _for_blocks(zero, weight.spec.group, codes)
    # with the stored scale, so that the zero point still decodes close to zero
    # (code - zero) * scale = (code - least) * scale + (least - zero) * scale.
    offset = _float16((least - zero.float()) * scale.float(), name)
    return _packed(codes - least, scale, offset, form)


def form_of(weight: Quantized, name: str = "weight") -> Form:
    """Return the block format that holds the codes of a weight.

    Raises:
        ModelError: there is none: the weight is no matrix of integers, or a group is smaller than a
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
        # No groups (0) are a multiple, too: the scale of a row or tensor is repeated for its
        # blocks.
        if spec.dtype.bits <= 4:
            return Q4_0 if weight.zero is None and spec.grid.qmin < 0 else Q4_1
        if spec.dtype.name == "int8" and weight.zero is None:
            return Q8_0
    group = ""
    if spec.group:
        group = f" in groups of {spec.group}"
    raise ModelError(
        f"the codes of {name!r} ({spec.dtype.name}{group}) have no place in llama.cpp's"
        " blocks; mxfp4e2m1, integers of up to 4 bits and symmetric int8 have, in"
        f" groups of a multiple of {SIZE} or by channels or tensors",
    )


def _rounded(weight: torch.Tensor, form: Form, name: str) -> NDArray[np.uint8]:
    """Return rows in packed blocks, uint8 (rows, bytes); see ``round_blocks``."""
    # (blocks, 32).
    x = weight.to(torch.float32).reshape(-1, SIZE)
    check_finite(x, name)
    scale, offset = (_float16(start, name) for start in _start(x, form))
    # Codes are chosen for the scales as they are stored.
    codes = _nearest(x, scale, offset, form)
    error = _error(x, codes, scale, offset)
    # The blocks that still improve, by index, with their values and codes.
    active, values = torch.arange(len(x)), x
    for _ in range(ROUNDS):
        # Fitted in float32, and judged as rounded to float16.
        new_scale, new_offset = (
            fitted.to(torch.float16) for fitted in _least_squares(values, codes, form)
        )
        new_codes = _nearest(values, new_scale, new_offset, form)
        new_error = _error(values, new_codes, new_scale, new_offset)
        # False for NaN and infinity after an overflow.
        improved = (new_error < error[active]).nonzero().squeeze(1)
        # A block without improvement would repeat the same scale, so that it is finished.
        active = active[improved]
        scale[active] = new_scale[improved]
        offset[active] = new_offset[improved]
        error[active] = new_error[improved]
        # index_select copies rows several times as fast as values[improved].
        values = values.index_select(0, improved)
        codes = new_codes.index_select(0, improved)
    codes = _nearest(x, scale, offset, form)
    # (blocks, ...) to (rows, blocks, ...).
    codes, scale, offset = (
        tensor.unflatten(0, (len(weight), -1)) for tensor in (codes, scale, offset)
    )
    return _packed(codes, scale, offset if form.offset else None, form)


def _start(x: torch.Tensor, form: Form) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale and offset (..., 1) of llama.cpp's own quantizer."""
    if form.offset:
        least, greatest = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        return (greatest - least) / form.greatest, least
    least, greatest = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    # the greatest magnitude takes the code -8 for either sign; 8-bit codes are symmetric, without
    # -128
    if form.bits == 4:
        extreme = torch.where(greatest > -least, greatest, least)
        # The first of two ends of equal magnitude.
        tied = (greatest == -least).squeeze(-1).nonzero().squeeze(-1)
        values = x.index_select(0, tied)
        extreme[tied] = values.gather(-1, values.abs().argmax(-1, keepdim=True))
        scale = extreme / form.least
    else:
        scale = torch.maximum(greatest, -least).abs() / form.greatest
    return scale, torch.zeros_like(scale)


def _least_squares(
    x: torch.Tensor, codes: torch.Tensor, form: Form
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale and offset (..., 1) of least squared error for given codes."""
    # Equal codes give 0 / 0, or a scale of NaN, whose error is never less: the caller drops it.
    if not form.offset:
        # sum(x q) / sum(q^2).
        scale = _row_sum(x * codes) / _row_sum(codes.square())
        return scale, torch.zeros_like(scale)
    # Regression: the slope is cov(x, q) / var(q), and the offset mean(x) - slope * mean(q).
    x_mean, code_mean = x.mean(-1, keepdim=True), codes.mean(-1, keepdim=True)
    deviation = codes - code_mean
    covariance = _row_sum((x - x_mean).mul_(deviation))
    scale = covariance / _row_sum(deviation.square_())
    return scale, x_mean - scale * code_mean


def _row_sum(x: torch.Tensor) -> torch.Tensor:
    return x.sum(-1, keepdim=True)


def _nearest(
    x: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, form: Form
) -> torch.Tensor:
    """Return the nearest codes (blocks, 32), float32, for scales and offsets (blocks, 1)."""
    steps = (x - offset.float()).div_(scale.float())
    # A block of zeros has scale 0: NaN and infinities take code 0.
    return steps.round_().nan_to_num_(0, 0, 0).clamp_(form.least, form.greatest)


def _error(
    x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor
) -> torch.Tensor:
    """Return the squared error of each block, (blocks,)."""
    residual = x - (codes * scale.float()).add_(offset.float())
    # In float64, as squares of great float32 numbers overflow.
    return residual.double().square_().sum(-1)


def _as_bytes(codes: torch.Tensor, dtype: type[Any]) -> torch.Tensor:
    """Return whole numbers that an 8-bit type holds as uint8."""
    # NumPy converts floats to 8 bits six times as fast as torch (2.13).
    return torch.from_numpy(codes.numpy().astype(dtype).view(np.uint8))


def _float16(x: torch.Tensor, name: str) -> Any:
    """Return scales or offsets in float16.

    Raises:
        ModelError: a number is too large.
    """
    short = x.to(torch.float16)
    if not torch.isfinite(short).all():
        raise ModelError(
            f"a scale of the weight {name!r} is too great for float16, in which GGUF"
            " stores it",
        )
    return short


def _for_blocks(params: Any, group: int, codes: torch.Tensor) -> Any:
    """Return the scales or zero points of a weight as (rows, blocks, 1)."""
    params = params.detach().cpu().to(torch.float32)
    if group:
        # A group of several blocks repeats its scale; the last one may be cut.
        params = params.repeat_interleave(group // SIZE, -1)[:, : codes.shape[1]]
    elif params.ndim:
        params = params[:, None]
    return params.expand(codes.shape[:2])[..., None]


def _packed(
    codes: torch.Tensor, scale: torch.Tensor, offset: Any, form: Form
) -> NDArray[Any]:
    """Pack blocks into (rows, bytes): scale, offset and codes of each block.

    The low nibbles hold the first 16 codes of 4 bits.
    """
    # The structs block_q4_0, block_q4_1, block_q8_0 and block_mxfp4 of ggml/src/ggml-common.h.
    if form.bits == 4:
        nibbles = codes - form.least
        low, high = nibbles[..., : SIZE // 2], nibbles[..., SIZE // 2 :]
        octets = _as_bytes(torch.add(low, high, alpha=16), np.uint8)
    else:
        octets = _as_bytes(codes, np.int8)
    numbers = [scale] if offset is None else [scale, offset]
    # A float16 is two bytes, and E8M0 is one.
    block = torch.cat(
        [*(number.contiguous().view(torch.uint8) for number in numbers), octets],
        -1,
    )
    return block.flatten(1).numpy()
