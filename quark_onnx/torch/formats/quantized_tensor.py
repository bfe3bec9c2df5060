"""Quantized weights, as codes and scales; fake quantization of activations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from quark_onnx.common.errors import ModelError
from quark_onnx.dtypes import Scaled
from quark_onnx.torch.config.number_formats import TwoLevel
from quark_onnx.torch.config.spec import TensorSpec
from quark_onnx.torch.formats import affine, block_formats
from quark_onnx.torch.formats.affine import Params
from quark_onnx.torch.formats.bit_packing import in_blocks
from quark_onnx.torch.formats.block_formats import global_scale_for
from quark_onnx.torch.runtime.threads import on_threads

#: Number of weights that are rounded at once: intermediate tensors then stay in caches of the
#: processor.
AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Quantized:
    """Quantized weight of any shape, as a matrix (first axis, product of further axes).

    Attributes:
        spec: how the weight is quantized.
        shape: shape of the weight.
        codes: (rows, columns), or (rows, blocks, block size) with per-block scales; the last block
            is padded.
        scale: () per-tensor, (rows,) per-channel or (rows, blocks) per-group; None if ``codes`` are
            dequantized values.
        zero: zero points of the shape of ``scale``; None if they are 0.
        whole: global scale (NVFP4).
        dtype: dtype of the float weight.
    """

    spec: TensorSpec
    shape: tuple[int, ...]
    codes: torch.Tensor
    scale: Any
    zero: Any
    whole: Any
    dtype: torch.dtype

    @property
    def matrix(self) -> torch.Tensor:
        """The codes as (rows, columns), without the padding of the last block."""
        rows = self.shape[0]
        columns = prod(self.shape[1:])
        return self.codes.reshape(rows, -1)[:, :columns]

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the dequantized weight.

        Args:
            dtype: dtype of the result; None for the float weight's dtype.
        """
        if dtype is None:
            dtype = self.dtype
        if isinstance(self.spec.dtype, Scaled):
            params = _broadcast(Params(self.scale, self.zero), self.codes.ndim)
            values = affine.decode(self.codes, params, dtype)
        elif self.spec.is_cast:
            values = self.codes.to(dtype)
        else:
            shared = block_formats.Shared(self.codes, self.scale, self.whole)
            values = block_formats.decode(shared, self.spec, dtype)
        # (rows, blocks, size) to (rows, columns): the padding of the last block is dropped.
        return values.reshape(self.shape[0], -1)[:, : prod(self.shape[1:])].reshape(
            self.shape,
        )


def quantize(
    weight: torch.Tensor,
    spec: TensorSpec,
    name: str = "weight",
    params: Params | None = None,
    whole: torch.Tensor | None = None,
) -> Quantized:
    """Quantize a weight, with round to nearest.

    Args:
        weight: floats of shape (outputs, ...).
        spec: how the weight is quantized.
        name: name of the weight, for errors.
        params: known scales and zero points, shaped as in ``Quantized``.
        whole: global scale (NVFP4), if shared with other weights.

    Returns:
        The codes and scales.

    Raises:
        ModelError: the weight holds an infinity or NaN.

    >>> quantize(torch.tensor([[1.0, -2.0, 4.0]]), TensorSpec("mxfp4e2m1")).dequantize()
    tensor([[ 1., -2.,  4.]])
    """
    check_finite(weight, name)
    shape = tuple(weight.shape)
    matrix = weight.reshape(len(weight), -1)
    # 16-bit floats are their own codes: nothing is scaled.
    if spec.is_cast:
        codes = matrix.to(affine.HALVES[spec.dtype.name])
        return Quantized(spec, shape, codes, None, None, None, weight.dtype)
    if isinstance(spec.dtype, TwoLevel):
        if whole is None:
            whole = global_scale_of([weight])
    elif isinstance(spec.dtype, Scaled) and params is None and spec.per_tensor:
        # A per-tensor scale needs the whole weight; the codes below are made a part at a time.
        params = solve(matrix, spec)
    # Whole rows, at least one, since groups do not cross rows.
    count = max(1, AT_ONCE // max(1, matrix.shape[1]))

    def part(start: int) -> tuple[Any, Any, Any]:
        rows = matrix[start : start + count]
        return _rows(rows, spec, _params_at(params, start, count), whole)

    starts = range(0, max(1, len(matrix)), count)
    if len(starts) > 1 and matrix.device.type == "cpu":
        parts = on_threads(part, starts)
    else:
        parts = [part(start) for start in starts]
    # Scales of () are those of the first part: all parts share a per-tensor scale.
    codes, scale, zero = map(joined, zip(*parts, strict=True))
    return Quantized(spec, shape, codes, scale, zero, whole, weight.dtype)


def global_scale_of(weights: Iterable[Any]) -> torch.Tensor:
    """Return NVFP4's common global scale for weights that runtimes fuse."""
    greatest = [
        torch.stack(affine.extremes(weight.reshape(-1))).abs().max()
        for weight in weights
    ]
    return global_scale_for(torch.stack(greatest).max())


def _rows(
    matrix: torch.Tensor,
    spec: TensorSpec,
    params: Params | None,
    whole: torch.Tensor | None,
) -> tuple[Any, Any, Any]:
    """Return codes, scales and zero points of rows."""
    view = in_blocks(matrix, spec.group)
    if not isinstance(spec.dtype, Scaled):
        shared = block_formats.encode(view, spec, whole)
        return shared.codes, shared.scale, None
    # Dividing bfloat16 weights in their own type would round the quotient before it is rounded to
    # a code.
    if spec.scale == "float32":
        view = view.float()
    if params is None:
        params = solve(view, spec)
    return affine.encode(view, _broadcast(params, view.ndim), spec), *params


def _broadcast(params: Params, rank: int) -> Params:
    """Return the parameters with trailing axes of length 1, up to a rank."""
    missing = rank - params.scale.ndim
    if not params.scale.ndim or not missing:
        return params
    # (rows,) to (rows, 1), and (rows, groups) to (rows, groups, 1).
    index = (..., *[None] * missing)
    return params.each(lambda tensor: tensor[index])


def _params_at(params: Params | None, start: int, count: int) -> Params | None:
    """Return the parameters of ``count`` rows."""
    if params is None or not params.scale.ndim:
        return params
    return params.each(lambda tensor: tensor[start : start + count])


def joined(parts: Sequence[Any]) -> Any:
    """Concatenate per-row parts along axis 0.

    A single part is returned uncopied. Scalars and None are returned unchanged.
    """
    first = parts[0]
    if len(parts) == 1 or first is None or not first.ndim:
        return first
    return torch.cat(list(parts))


def is_finite(weight: torch.Tensor) -> bool:
    """Return whether a tensor holds neither infinities nor NaN."""
    if not weight.numel():
        return True
    # aminmax propagates NaN, and makes no mask of the size of the weight.
    ends = torch.stack(torch.aminmax(weight.detach()))
    return bool(torch.isfinite(ends).all())


def check_finite(weight: torch.Tensor, name: str) -> None:
    """Raise ModelError if a weight holds an infinity or NaN."""
    if not is_finite(weight):
        raise ModelError(
            f"the weight {name!r} holds numbers that are infinite or none; it cannot be"
            " quantized",
        )


def solve(view: torch.Tensor, spec: TensorSpec) -> Params:
    """Return min-max scales of a weight, of shape (), (rows,) or (rows, blocks)."""
    lo, hi = _extremes(view, spec)
    if spec.scale == "float32":
        lo, hi = lo.float(), hi.float()
    return affine.params_for(lo.squeeze(-1), hi.squeeze(-1), spec)


def fake_quantize(
    x: torch.Tensor,
    spec: TensorSpec,
    params: Params | None = None,
    whole: torch.Tensor | None = None,
) -> torch.Tensor:
    """Quantize and dequantize an activation; shape and dtype stay.

    Args:
        x: floats of shape (..., features).
        spec: how the activation is quantized.
        params: calibrated scale; None for dynamic quantization.
        whole: global scale (NVFP4).

    >>> fake_quantize(torch.tensor([[0.3, 9.0], [1.0, 0.0]]), TensorSpec("int8", per_channel=True, dynamic=True))
    tensor([[0.2824, 8.9647],
            [0.9961, 0.0000]])
    """  # noqa: E501
    if spec.is_cast:
        return x.to(affine.HALVES[spec.dtype.name]).to(x.dtype)
    # (..., features) to (..., blocks, size); zeros that fill the last block widen no range.
    view = in_blocks(x, spec.group)
    if not isinstance(spec.dtype, Scaled):
        return _without_filling(block_formats.rounded(view, spec, whole).to(x.dtype), x)
    if params is None:
        params = affine.params_for(*_extremes(view, spec), spec)
    values = affine.rounded(view, params, spec, x.dtype)
    if spec.group:
        return _without_filling(values, x)
    return values


def _extremes(view: torch.Tensor, spec: TensorSpec) -> tuple[Any, Any]:
    """Return minimum and maximum for each scale, (..., 1), or (1,) per-tensor, including zero."""
    return affine.extremes(view.reshape(-1) if spec.per_tensor else view)


def _without_filling(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.flatten(-2)[..., : like.shape[-1]]
