"""Rotations in torch: of tensors along an axis, and of activations at run time."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from quark_onnx.kernels.hadamard import Rotation


@dataclass(frozen=True, eq=False)
class OrthogonalMatrix:
    """Orthogonal matrix ``diag(signs) (factors[0] x factors[1] x ...)`` (Kronecker).

    Attributes:
        factors: orthogonal matrices.
        signs: +1 or -1 per channel, applied before the product; None for no signs.
    """

    factors: tuple[Any, ...]
    signs: Any = None

    @staticmethod
    def of(rotation: Rotation) -> OrthogonalMatrix:
        """Return a rotation of numpy arrays as torch tensors, in float64."""
        factors = tuple(torch.tensor(factor) for factor in rotation.factors)
        if rotation.signs is None:
            return OrthogonalMatrix(factors)
        return OrthogonalMatrix(factors, torch.from_numpy(rotation.signs))

    @property
    def size(self) -> int:
        """Number of channels of the matrix."""
        return prod(len(factor) for factor in self.factors)

    def turn(self, x: torch.Tensor, axis: int = -1) -> torch.Tensor:
        """Multiply every vector along an axis by the matrix, in the dtype of ``x``.

        An axis of several times the matrix size is rotated in consecutive parts.

        Args:
            x: float tensor whose axis has a multiple of ``size`` channels.
            axis: axis of the channels.

        Returns:
            A tensor of the shape of ``x``.

        >>> OrthogonalMatrix((torch.tensor([[0.0, 1.0], [-1.0, 0.0]]),)).turn(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        tensor([-2.,  1., -4.,  3.])
        """  # noqa: E501
        # (..., channels); the reshape below splits channels into consecutive vectors of ``size``.
        moved = x.movedim(axis, -1)
        result = moved.reshape(-1, self.size)
        if self.signs is not None:
            result = result * self.signs.to(x)
        inner = self.size
        # Row vectors times a Kronecker product: each factor mixes an axis of its own, the last one
        # the innermost. The cost is that of the factors, not of the (size, size) matrix.
        for factor in self.factors:
            inner //= len(factor)
            # (vectors and outer axes, axis of the factor, inner axes).
            parts = result.reshape(-1, len(factor), inner)
            if inner == 1:
                result = parts.squeeze(-1) @ factor.to(x)
            else:
                result = factor.to(x).T @ parts
        return result.reshape(moved.shape).movedim(-1, axis)


class OnlineRotation(nn.Module):
    """Layer whose input is rotated at run time.

    Args:
        layer: layer that reads the rotated input.
        turning: rotation. Buffers are float32, until the model is cast to another dtype.
    """

    def __init__(self, layer: Any, turning: OrthogonalMatrix) -> None:
        super().__init__()
        self.layer = layer
        self._count = len(turning.factors)
        device = next(layer.parameters()).device
        tensors = {f"factor{index}": each for index, each in enumerate(turning.factors)}
        tensors["signs"] = turning.signs
        for name, tensor in tensors.items():
            buffer = None if tensor is None else tensor.to(device, torch.float32)
            # Not part of the state: a checkpoint has no place for an online rotation.
            self.register_buffer(name, buffer, persistent=False)

    @property
    def turning(self) -> OrthogonalMatrix:
        """The rotation."""
        factors = tuple(getattr(self, f"factor{index}") for index in range(self._count))
        return OrthogonalMatrix(factors, self.signs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output for the rotated ``x`` of shape (..., features)."""
        result: torch.Tensor = self.layer(self.turning.turn(x))
        return result

    def extra_repr(self) -> str:
        """Return the number of rotated channels, for the printed module."""
        return f"rotates {self.turning.size} channels"
