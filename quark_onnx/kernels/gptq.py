"""GPTQ: column by column, what rounding did is made good by the columns that are still to be
rounded.

Follows Frantar et al. 2023, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers": Cholesky form, lazy batches, and the order of falling activation. Groups of a layer
come first in every array.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from quark_onnx.kernels.levels import Levels
from quark_onnx.kernels.parallel import side_by_side, slabs

Doubles = NDArray[np.float64]
Floats = NDArray[np.float32]

#: Columns whose effect on the columns behind is gathered before it is applied.
_BATCH = 128
#: Outputs that a core deals with at a time.
_ROWS = 256
#: Damping grows by this factor until the matrix can be inverted, and no further than so often the
#: mean of the diagonal.
_ESCALATION, _MOST_DAMPING = 10.0, 1e4


class Compensation:
    """How an error in one column is made good by the columns behind it, for one matrix of inputs."""  # noqa: E501

    def __init__(
        self,
        gram: Doubles,
        *,
        damping: float = 0.01,
        act_order: bool = True,
    ) -> None:
        """Invert the matrix.

        Args:
            gram: (groups, inputs, inputs), sums of products of two inputs.
            damping: added to the diagonal, as a share of its mean; it grows where that does not
                suffice.
            act_order: begin with the columns whose inputs are largest.
        """
        diagonal = np.diagonal(gram, axis1=1, axis2=2)
        order = (
            np.argsort(-diagonal, axis=1, kind="stable")
            if act_order
            else np.zeros(diagonal.shape, int)
        )
        self._order = order if act_order else order + np.arange(diagonal.shape[1])
        self._inverse = _inverse_root(gram, self._order, damping)
        self._gram = gram

    def rounded(self, weight: Doubles, lattice: Levels) -> tuple[Floats, Doubles]:
        """The weight, rounded to values of the lattice, and the error of each output: none is worse
        than to nearest.

        Args:
            weight: (groups, outputs, inputs).
        """
        nearest = lattice.nearest(weight)
        along = self._order[:, None, :]
        left = np.take_along_axis(weight, np.broadcast_to(along, weight.shape), 2)
        turned = [
            np.take_along_axis(v, np.broadcast_to(along, v.shape), 2)
            for v in _fields(lattice)
        ]
        swept = np.empty(left.shape, np.float32)

        def sweep(part: slice) -> None:
            scale, least, greatest = (field[:, part] for field in turned)
            swept[:, part] = _sweep(
                left[:, part],
                self._inverse,
                Levels(scale, lattice.levels, least, greatest),
            )

        for _ in side_by_side(sweep, slabs(left.shape[1], _ROWS)):
            pass
        result = np.empty_like(nearest)
        np.put_along_axis(result, np.broadcast_to(along, result.shape), swept, 2)
        error, plain = (
            error_of(weight, found, self._gram) for found in (result, nearest)
        )
        better = error < plain
        return np.where(better[..., None], result, nearest), np.where(
            better,
            error,
            plain,
        )


def gptq(
    weight: Doubles,
    gram: Doubles,
    lattice: Levels,
    *,
    damping: float = 0.01,
    act_order: bool = True,
) -> Floats:
    """The weight, rounded to values of the lattice; no output is worse than rounded to nearest.

    Args:
        weight: (groups, outputs, inputs).
        gram, damping, act_order: as ``Compensation`` takes them.
    """
    return Compensation(gram, damping=damping, act_order=act_order).rounded(
        weight,
        lattice,
    )[0]


def error_of(weight: Doubles, rounded: Floats, gram: Doubles) -> Doubles:
    """The sum over all rows of the squared error of each output, (groups, outputs)."""
    off = rounded - weight
    found: Doubles = np.maximum(((off @ gram) * off).sum(axis=2), 0.0)
    return found


def _fields(lattice: Levels) -> tuple[Floats, Floats, Floats]:
    return lattice.scale, lattice.least, lattice.greatest


def _sweep(left: Doubles, inverse: Doubles, lattice: Levels) -> Floats:
    """Round all columns in their order; ``left`` is changed."""
    count = left.shape[2]
    rounded = np.empty(left.shape, np.float32)
    for start in range(0, count, _BATCH):
        stop = min(count, start + _BATCH)
        errors = np.empty((*left.shape[:2], stop - start))
        for place in range(start, stop):
            scale, least, greatest = (field[:, :, place] for field in _fields(lattice))
            column = Levels(scale, lattice.levels, least, greatest).nearest(
                left[:, :, place],
            )
            rounded[:, :, place] = column
            error = (left[:, :, place] - column) / inverse[:, None, place, place]
            left[:, :, place:stop] -= (
                error[:, :, None] * inverse[:, None, place, place:stop]
            )
            errors[:, :, place - start] = error
        left[:, :, stop:] -= errors @ inverse[:, start:stop, stop:]
    return rounded


def _inverse_root(gram: Doubles, order: NDArray[np.int64], damping: float) -> Doubles:
    """The upper Cholesky factor of the inverse of the damped matrices, columns in their order.

    Inputs that were always zero get a one on the diagonal: whatever their weights become, nothing
    changes.
    """
    turned = np.take_along_axis(
        np.take_along_axis(gram, order[:, :, None], 1),
        order[:, None, :],
        2,
    )
    index = np.arange(turned.shape[1])
    diagonal = turned[:, index, index]
    mean = np.maximum(diagonal.mean(axis=1, keepdims=True), np.finfo(np.float64).tiny)
    base = turned / mean[..., None]
    base[:, index, index] += np.where(diagonal == 0, 1.0, 0.0)
    return _escalate(lambda share: _factor(base, index, share), damping)


def _escalate(attempt: Callable[[float], Doubles], damping: float) -> Doubles:
    share = damping
    while True:
        try:
            found = attempt(share)
            if np.isfinite(found).all():
                return found
        except np.linalg.LinAlgError:
            pass
        share = max(share, 1e-6) * _ESCALATION
        if share > _MOST_DAMPING:
            raise np.linalg.LinAlgError("the products of the inputs are not finite")


def _factor(base: Doubles, index: NDArray[np.int64], share: float) -> Doubles:
    damped = base.copy()
    damped[:, index, index] += share
    inverse = np.linalg.inv(np.linalg.cholesky(damped))
    whole = inverse.swapaxes(1, 2) @ inverse
    upper: Doubles = np.linalg.cholesky(whole).swapaxes(1, 2)
    return upper
