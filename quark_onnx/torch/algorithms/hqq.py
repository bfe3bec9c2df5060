"""HQQ: scales and zero points by half-quadratic splitting, without data.

See ``quark_onnx.kernels.hqq``. Calibration data, if there is any, decides for each output whether
the new codes are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from quark_onnx.common.registry import ALGORITHMS
from quark_onnx.dtypes import Integer
from quark_onnx.kernels.hqq import HalfQuadratic, half_quadratic
from quark_onnx.optimizers.base import require_number, require_whole
from quark_onnx.torch.algorithms.base import BlockJob, Chosen, Outcome
from quark_onnx.torch.algorithms.gptq.hessian import hessians_by_stage, largest_stage
from quark_onnx.torch.algorithms.memory import Shapes
from quark_onnx.torch.algorithms.scheduling.replay import stored_bytes
from quark_onnx.torch.algorithms.weight_rounding.losses import Loss, better, squares_of
from quark_onnx.torch.config.spec import TensorSpec
from quark_onnx.torch.formats.affine import Params, scale_type
from quark_onnx.torch.formats.quantized_tensor import Quantized, quantize
from quark_onnx.torch.models.quantized_layer import kind_of

#: Elements of a weight that are processed at once.
_SLAB = 1 << 20


@ALGORITHMS.register("hqq")
@dataclass(frozen=True)
class HQQ:
    """Solve for the scales and zero points of asymmetric integers, per group or per channel.

    Attributes:
        p: the norm of the weight error to minimize, above 0 and at most 1.
        beta: the weight of the split in the first iteration.
        kappa: the growth of ``beta`` per iteration.
        iterations: alternating solutions for zero point and scale.
    """

    name: ClassVar[str] = "hqq"
    stage: ClassVar[str] = "weights"
    aims_at_float: ClassVar[bool] = False
    rounds_activations: ClassVar[bool] = True
    needs_data: ClassVar[bool] = False

    p: float = 0.7
    beta: float = 10.0
    kappa: float = 1.01
    iterations: int = 20

    def __post_init__(self) -> None:
        require_number(self, "p", "beta", "kappa")
        require_whole(self, "iterations", least=0)
        # Names the setting that is out of range.
        HalfQuadratic(**asdict(self))

    def memory(self, shapes: Shapes) -> int:
        """Return the estimated bytes of stored inputs and Hessians; 0 without data."""
        # Without data, the new codes are judged by the error of the weight: no block runs.
        if not shapes.tokens:
            return 0
        return shapes.block + stored_bytes(shapes) + 4 * largest_stage(shapes)

    def __call__(
        self,
        job: BlockJob,
        quantized_weights: Mapping[str, Quantized],
    ) -> Chosen:
        """Choose scales, zero points and codes; no output of a layer gets worse."""
        result = dict(quantized_weights)
        outcomes = list[Outcome]()
        weights = {name: weight for name, weight, _ in job.weights()}
        for name, hessian in _layer_hessians(job, result):
            weight = weights[name]
            start = result[name]
            if not can_solve(start.spec):
                note = (
                    "only asymmetric integers of blocks or outputs have zero points to"
                    " solve for; its codes stay"
                )
                outcomes.append(Outcome.unchanged(name, self.name, note))
                continue
            matrix = weight.reshape(len(weight), -1).float()
            loss = Loss(matrix, squares_of(hessian))
            # The codes follow from the scales by rounding to nearest, as the solution assumes.
            params = solved(matrix, start, HalfQuadratic(**asdict(self)))
            new = quantize(weight, start.spec, name, params)
            before = loss(start)
            result[name], after = better(start, before, new, loss(new))
            outcomes.append(Outcome(name, self.name, *loss.shares(before, after)))
        return result, outcomes


def can_solve(spec: TensorSpec) -> bool:
    """Return whether a format has zero points per group or per channel.

    >>> can_solve(TensorSpec("uint4", symmetric=False, block_size=32))
    True
    >>> can_solve(TensorSpec("int4", block_size=32))
    False
    """
    asymmetric = (
        isinstance(spec.dtype, Integer)
        and spec.dtype.bits <= 8
        and not spec.grid.symmetric
    )
    return asymmetric and not spec.grid.pow2 and not spec.per_tensor


def solved(matrix: torch.Tensor, start: Quantized, settings: HalfQuadratic) -> Params:
    """Return the scales and zero points of a weight, shaped like the present ones.

    Scales are positive.

    Args:
        matrix: (outputs, inputs) float32.
        start: the weight with its present scales.
        settings: of the iterations.
    """
    spec = start.spec
    bits = start.spec.dtype.bits
    size = spec.group or matrix.shape[1]
    # The solver is that of the ONNX flow, in NumPy.
    values = matrix.cpu().numpy()
    # Columns of full groups.
    full_columns = values.shape[1] // size * size
    # (rows, groups)
    scale = np.ones((len(values), -(-values.shape[1] // size)), np.float32)
    zero = np.ones_like(scale)
    rows = max(_SLAB // max(values.shape[1], 1), 1)
    for start_row in range(0, len(values), rows):
        chunk = slice(start_row, start_row + rows)
        # the last group may be shorter: padding would take part in the solution
        # part: (rows, columns) becomes (rows * groups, size), one problem for each row.
        for groups, part in (
            (slice(0, full_columns // size), values[chunk, :full_columns]),
            (slice(-1, None), values[chunk, full_columns:]),
        ):
            if part.size:
                problems = part.reshape(-1, min(size, part.shape[1]))
                solution = half_quadratic(problems, bits, settings)
                scale[chunk, groups] = solution.scale.reshape(len(part), -1)
                zero[chunk, groups] = solution.zero_point.reshape(len(part), -1)
    # a negative scale counts codes from the other end
    # Codes start at qmin here, and at 0 in the solver.
    zero = np.where(scale < 0, spec.grid.levels - zero, zero) + spec.grid.qmin
    params = Params(np.abs(scale), zero).each(torch.from_numpy)
    params = params.each(lambda tensor: tensor.to(start.scale.device))
    params = params.each(lambda tensor: tensor.reshape(start.scale.shape))
    return Params(params.scale.to(scale_type(spec, start.dtype)), params.zero)


def _layer_hessians(
    job: BlockJob, codes: Mapping[str, Quantized]
) -> Iterator[tuple[str, Any]]:
    """Yield layers with the products of their inputs, (inputs, inputs), or None without data."""
    matrices = [
        name for name in codes if kind_of(job.layers[name][0]) in ("Linear", "Conv1D")
    ]
    # Layers that no stage covers (convolutions, embeddings), or all without data, follow at the
    # end.
    done = set[str]()
    if job.calls and any(can_solve(codes[name].spec) for name in matrices):
        # The consumer replaces ``codes`` before the next group.
        for group, stats in hessians_by_stage(job, matrices, codes, exact=False):
            for name in group:
                yield name, stats.xx
            done.update(group)
    for name in codes:
        if name not in done:
            yield name, None
