"""Quantized: a weight as codes and scales. And what is left of an activation after rounding it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from quark_onnx.dtypes import Scaled
from quark_onnx.errors import ModelError
from quark_onnx.torch.config.number_formats import TwoLevel
from quark_onnx.torch.config.spec import TensorSpec
from quark_onnx.torch.formats import affine, block_formats
from quark_onnx.torch.formats.affine import Params
from quark_onnx.torch.formats.bit_packing import in_blocks
from quark_onnx.torch.formats.block_formats import global_scale_for

#: Weights that are rounded at once: what is computed on the way is little, and stays near the
#: processor.
_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Quantized:
    """A weight of any shape, quantized as a matrix of its first axis by all others.

    Attributes:
        spec: how it is quantized.
        shape: of the weight.
        codes: (rows, columns), or (rows, blocks, block size) where a scale belongs to a block, the
            last one filled up.
        scale: () for the tensor, (rows,) or (rows, blocks); None where the codes are what is left
            of the values.
        zero: zero points, shaped as the scale; None where they are 0.
        whole: NVFP4's scale of the tensor.
        dtype: the type of the weight that it was.
    """

    spec: TensorSpec
    shape: tuple[int, ...]
    codes: Any
    scale: Any
    zero: Any
    whole: Any
    dtype: Any

    @property
    def matrix(self) -> Any:
        """The codes as (rows, columns), without what fills the last block."""
        rows = self.shape[0]
        columns = prod(self.shape[1:])
        return self.codes.reshape(rows, -1)[:, :columns]

    def dequantize(self, dtype: Any = None) -> Any:
        """The weight that is left, in the type of the original one if none is given."""
        dtype = self.dtype if dtype is None else dtype
        if isinstance(self.spec.dtype, Scaled):
            ones = (
                (..., *[None] * (self.codes.ndim - self.scale.ndim))
                if self.scale.ndim
                else ...
            )
            zero = None if self.zero is None else self.zero[ones]
            values = affine.decode(self.codes, Params(self.scale[ones], zero), dtype)
        elif self.spec.is_cast:
            values = self.codes.to(dtype)
        else:
            shared = block_formats.Shared(self.codes, self.scale, self.whole)
            values = block_formats.decode(shared, self.spec, dtype)
        return values.reshape(self.shape[0], -1)[:, : prod(self.shape[1:])].reshape(
            self.shape,
        )


def quantize(
    weight: Any,
    spec: TensorSpec,
    name: str = "weight",
    params: Params | None = None,
    whole: Any = None,
) -> Quantized:
    """A weight as codes, each rounded to the nearest.

    Args:
        weight: floats of shape (outputs, ...).
        spec: how.
        name: what it is called, for errors.
        params: scales and zero points that are known already, shaped as ``Quantized`` has them.
        whole: NVFP4's scale of the tensor, where it is not of this weight alone.

    Raises:
        ModelError: it holds a number that is infinite or none.

    >>> quantize(torch.tensor([[1.0, -2.0, 4.0]]), TensorSpec("mxfp4e2m1")).dequantize()
    tensor([[ 1., -2.,  4.]])
    """
    check_finite(weight, name)
    if spec.is_cast:
        kept = torch.float16 if spec.dtype.name == "float16" else torch.bfloat16
        return Quantized(
            spec,
            tuple(weight.shape),
            weight.reshape(len(weight), -1).to(kept),
            None,
            None,
            None,
            weight.dtype,
        )
    matrix = weight.reshape(len(weight), -1)
    if isinstance(spec.dtype, TwoLevel):
        whole = global_scale_of([weight]) if whole is None else whole
    elif (
        isinstance(spec.dtype, Scaled)
        and params is None
        and not spec.group
        and not spec.per_channel
    ):
        params = solve(matrix, spec)
    count = max(1, _AT_ONCE // max(1, matrix.shape[1]))
    starts = range(0, max(1, len(matrix)), count)
    parts = [
        _rows(
            matrix[start : start + count],
            spec,
            _params_at(params, start, count),
            whole,
        )
        for start in starts
    ]
    codes, scale, zero = (joined(each) for each in zip(*parts, strict=True))
    return Quantized(spec, tuple(weight.shape), codes, scale, zero, whole, weight.dtype)


def global_scale_of(weights: Iterable[Any]) -> Any:
    """NVFP4's scale of weights that runtimes make one of: they keep one such scale for all of it."""  # noqa: E501
    return global_scale_for(
        torch.stack(
            [
                torch.stack(affine.extremes(each.reshape(-1))).abs().max()
                for each in weights
            ],
        ).max(),
    )


def _rows(
    matrix: Any,
    spec: TensorSpec,
    params: Params | None,
    whole: Any,
) -> tuple[Any, Any, Any]:
    """Codes, scales and zero points of rows."""
    view = in_blocks(matrix, spec.group) if spec.group else matrix
    if not isinstance(spec.dtype, Scaled):
        shared = block_formats.encode(view, spec, whole)
        return shared.codes, shared.scale, None
    if spec.scale == "float32":
        view = view.float()
    if params is None:
        params = solve(view, spec)
    ones = (
        (..., *[None] * (view.ndim - params.scale.ndim)) if params.scale.ndim else ...
    )
    zero = None if params.zero is None else params.zero[ones]
    return affine.encode(view, Params(params.scale[ones], zero), spec), *params


def _params_at(params: Params | None, start: int, count: int) -> Params | None:
    """Those of rows."""
    if params is None or not params.scale.ndim:
        return params
    return Params(
        *(None if each is None else each[start : start + count] for each in params),
    )


def joined(parts: Sequence[Any]) -> Any:
    """What belongs to rows one after the other, a single part without a copy; what belongs to the
    tensor, and None, as it is.
    """
    first = parts[0]
    return (
        first
        if len(parts) == 1 or first is None or not first.ndim
        else torch.cat(list(parts))
    )


def check_finite(weight: Any, name: str) -> None:
    """Raise ModelError if a weight holds a number that is infinite or none."""
    if (
        weight.numel()
        and not torch.isfinite(torch.stack(torch.aminmax(weight.detach()))).all()
    ):
        raise ModelError(
            f"the weight {name!r} holds numbers that are infinite or none; it cannot be"
            " quantized",
        )


def solve(view: Any, spec: TensorSpec) -> Params:
    """The scales of a weight, from its least and greatest values: shaped (), (rows,) or (rows,
    blocks).
    """
    whole = not spec.group and not spec.per_channel
    lo, hi = affine.extremes(view.reshape(-1) if whole else view)
    if spec.scale == "float32":
        lo, hi = lo.float(), hi.float()
    return affine.params_for(lo.squeeze(-1), hi.squeeze(-1), spec)


def fake_quantize(
    x: Any,
    spec: TensorSpec,
    params: Params | None = None,
    whole: Any = None,
) -> Any:
    """What is left of an activation: same shape and type.

    Args:
        x: floats of shape (..., features).
        params: the scale where data has told it; each run computes it otherwise.
        whole: NVFP4's scale of the tensor.

    >>> fake_quantize(torch.tensor([[0.3, 9.0], [1.0, 0.0]]), TensorSpec("int8", per_channel=True, dynamic=True))
    tensor([[0.2824, 8.9647],
            [0.9961, 0.0000]])
    """  # noqa: E501
    if spec.is_cast:
        return x.to(
            torch.float16 if spec.dtype.name == "float16" else torch.bfloat16,
        ).to(x.dtype)
    view = in_blocks(x, spec.group) if spec.group else x
    if not isinstance(spec.dtype, Scaled):
        return _without_filling(block_formats.rounded(view, spec, whole).to(x.dtype), x)
    if params is None:
        params = affine.params_for(
            *affine.extremes(
                view if spec.per_channel or spec.group else view.reshape(-1),
            ),
            spec,
        )
    values = affine.rounded(view, params, spec, x.dtype)
    return _without_filling(values, x) if spec.group else values


def _without_filling(values: Any, like: Any) -> Any:
    return values.flatten(-2)[..., : like.shape[-1]]
