"""GPTQ: round column by column, and compensate the error by the remaining columns.

Follows Frantar et al. 2023, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers": Cholesky form, lazy batches, and activation order. Groups of a layer come first in
every array. Names follow the paper: W, Q, H, Hinv, Err.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark_onnx.kernels.levels import Levels
from quark_onnx.kernels.parallel import side_by_side, slabs

Doubles = NDArray[np.float64]
Floats = NDArray[np.float32]

#: Columns of a lazy batch: their errors are applied to later columns together (paper, section 3.3).
_BATCH = 128
#: Outputs that a core processes at a time.
_ROWS = 256
#: Factor by which damping grows until the Hessian is invertible, and its limit, as a multiple of
#: the mean of the diagonal.
_ESCALATION = 10.0
_MOST_DAMPING = 1e4


class Compensation:
    """The error compensation of GPTQ for a Hessian."""

    def __init__(
        self, H: Doubles, *, damping: float = 0.01, act_order: bool = True
    ) -> None:
        """Compute Hinv.

        Args:
            H: the Hessian X X^T, (groups, inputs, inputs).
            damping: added to the diagonal, as a share of its mean; increased if it does not
                suffice.
            act_order: quantize columns in order of decreasing diagonal of H.
        """
        diagonal = np.diagonal(H, axis1=1, axis2=2)
        if act_order:
            self._order = np.argsort(-diagonal, axis=1, kind="stable")
        else:
            self._order = np.zeros(diagonal.shape, int) + np.arange(diagonal.shape[1])
        self._Hinv = _inverse_factor(H, self._order, damping)
        self._H = H

    def rounded(self, weight: Doubles, levels: Levels) -> tuple[Floats, Doubles]:
        """Round a weight, and return the squared error per output, never above RTN.

        Args:
            weight: (groups, outputs, inputs).
            levels: possible values of the weight.

        Returns:
            The rounded weight, and the error of each output, (groups, outputs).
        """
        nearest = levels.nearest(weight)
        order = self._order[:, None, :]

        def ordered(array: NDArray[Any]) -> NDArray[Any]:
            return np.take_along_axis(array, np.broadcast_to(order, array.shape), 2)

        W, columns = ordered(weight), levels.mapped(ordered)
        Q = np.empty(W.shape, np.float32)

        def sweep(part: slice) -> None:
            position = (slice(None), part)
            Q[:, part] = _sweep(W[:, part], self._Hinv, columns.part(position))

        for _ in side_by_side(sweep, slabs(W.shape[1], _ROWS)):
            pass
        result = np.empty_like(nearest)
        np.put_along_axis(result, np.broadcast_to(order, result.shape), Q, 2)
        error = error_of(weight, result, self._H)
        nearest_error = error_of(weight, nearest, self._H)
        # An output for which the compensation does not pay keeps RTN.
        better = error < nearest_error
        return (
            np.where(better[..., None], result, nearest),
            np.where(better, error, nearest_error),
        )


def gptq(
    weight: Doubles,
    H: Doubles,
    levels: Levels,
    *,
    damping: float = 0.01,
    act_order: bool = True,
) -> Floats:
    """Round a weight by GPTQ; no output has a larger error than under RTN.

    Args:
        weight: (groups, outputs, inputs).
        H: the Hessian X X^T, (groups, inputs, inputs).
        levels: possible values of the weight.
        damping: see ``Compensation``.
        act_order: see ``Compensation``.
    """
    compensation = Compensation(H, damping=damping, act_order=act_order)
    return compensation.rounded(weight, levels)[0]


def error_of(weight: Doubles, rounded: Floats, H: Doubles) -> Doubles:
    """Return the squared errors of the outputs, summed over rows, (groups, outputs)."""
    difference = rounded - weight
    error: Doubles = ((difference @ H) * difference).sum(axis=2)
    return np.maximum(error, 0.0)


def _sweep(W: Doubles, Hinv: Doubles, levels: Levels) -> Floats:
    """Round the columns in order, by Algorithm 1 of the paper; ``W`` is overwritten."""
    count = W.shape[2]
    Q = np.empty(W.shape, np.float32)
    for start in range(0, count, _BATCH):
        stop = min(count, start + _BATCH)
        Err = np.empty((*W.shape[:2], stop - start))
        for j in range(start, stop):
            column = (..., j)
            Q[column] = levels.part(column).nearest(W[column])
            error = (W[:, :, j] - Q[:, :, j]) / Hinv[:, None, j, j]
            Err[:, :, j - start] = error
            # An error spreads to the rest of its batch at once, and to later columns by a single
            # product after the batch.
            W[:, :, j:stop] -= error[:, :, None] * Hinv[:, None, j, j:stop]
        W[:, :, stop:] -= Err @ Hinv[:, start:stop, stop:]
    return Q


def _inverse_factor(H: Doubles, order: NDArray[np.int64], damping: float) -> Doubles:
    """Return the upper Cholesky factors of the inverse damped Hessians, with columns in order.

    Inputs that are always zero get a one on the diagonal: their weights have no effect.
    """
    permuted = np.take_along_axis(
        np.take_along_axis(H, order[:, :, None], 1), order[:, None, :], 2
    )
    index = np.arange(permuted.shape[1])
    diagonal = permuted[:, index, index]
    tiny = np.finfo(np.float64).tiny
    mean = np.maximum(diagonal.mean(axis=1, keepdims=True), tiny)
    # In units of the mean diagonal, of which damping is a share.
    base = permuted / mean[..., None]
    base[:, index, index] += np.where(diagonal == 0, 1.0, 0.0)
    return _escalate(lambda share: _factor(base, index, share), damping)


def _escalate(attempt: Callable[[float], Doubles], damping: float) -> Doubles:
    """Return the first factor that exists, with damping that grows tenfold after each failure.

    Args:
        attempt: computes the factor for a share of damping.
        damping: first share.

    Raises:
        numpy.linalg.LinAlgError: no factor exists, as the Hessian is not finite.
    """
    share = damping
    while True:
        try:
            factor = attempt(share)
            if np.isfinite(factor).all():
                return factor
        except np.linalg.LinAlgError:
            pass
        # Damping of 0 cannot be multiplied: it goes on from a millionth.
        share = max(share, 1e-6) * _ESCALATION
        if share > _MOST_DAMPING:
            raise np.linalg.LinAlgError("the products of the inputs are not finite")


def _factor(base: Doubles, index: NDArray[np.int64], share: float) -> Doubles:
    """Return Hinv, (groups, inputs, inputs), for a share of damping.

    Args:
        base: Hessians in units of their mean diagonal, (groups, inputs, inputs).
        index: 0, 1, ..., inputs - 1.
        share: damping that is added to the diagonal.
    """
    damped = base.copy()
    damped[:, index, index] += share
    # H = L L^T, so that H^-1 = L^-T L^-1, whose upper Cholesky factor is Hinv of the paper.
    inverse = np.linalg.inv(np.linalg.cholesky(damped))
    full_inverse = inverse.swapaxes(1, 2) @ inverse
    upper: Doubles = np.linalg.cholesky(full_inverse).swapaxes(1, 2)
    return upper
