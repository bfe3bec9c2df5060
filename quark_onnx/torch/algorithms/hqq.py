"""HQQ: scales and zero points of weights, by half-quadratic splitting, without data.

See ``quark_onnx.kernels.hqq``.

Where data is there all the same, it decides: an output keeps the codes with which the layer
computes less wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from quark_onnx.dtypes import Integer
from quark_onnx.kernels.hqq import HalfQuadratic, half_quadratic
from quark_onnx.optimizers.base import require_number, require_whole
from quark_onnx.registry import ALGORITHMS
from quark_onnx.torch.algorithms.base import BlockJob, Outcome
from quark_onnx.torch.algorithms.gptq.hessian import grams_of
from quark_onnx.torch.algorithms.gptq.losses import Loss, better, squares_of
from quark_onnx.torch.algorithms.scheduling.replay import Replay
from quark_onnx.torch.algorithms.scheduling.stages import stages_in
from quark_onnx.torch.config.spec import TensorSpec
from quark_onnx.torch.formats.affine import Params, scale_type
from quark_onnx.torch.formats.quantized_tensor import Quantized, quantize
from quark_onnx.torch.models.quantized_layer import kind_of

#: Values of a weight that are worked on at once.
_SLAB = 1 << 20


@ALGORITHMS.register("hqq")
@dataclass(frozen=True)
class HQQ:
    """Solves for the scales and zero points of asymmetric integers, for each block or output.

    Attributes:
        p: the norm of the errors of weights that is made small, above 0 and at most 1.
        beta: weight of the split in the first iteration.
        kappa: the factor by which it grows.
        iterations: how often zero point and scale are solved for.
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
        HalfQuadratic(**asdict(self))

    def __call__(
        self,
        job: BlockJob,
        made: Mapping[str, Quantized],
    ) -> tuple[dict[str, Quantized], list[Outcome]]:
        """Choose scales, zero points and codes; no output of a layer is worse than it was."""
        result = dict(made)
        outcomes = list[Outcome]()
        weights = {name: weight for name, weight, _ in job.weights()}
        for name, gram in _readers(job, result):
            weight = weights[name]
            start = result[name]
            if not can_solve(start.spec):
                note = (
                    "only asymmetric integers of blocks or outputs have zero points to"
                    " solve for; its codes stay"
                )
                outcomes.append(Outcome(name, self.name, 0.0, 0.0, note))
                continue
            matrix = weight.reshape(len(weight), -1).float()
            loss = Loss(matrix, squares_of(gram))
            found = quantize(
                weight,
                start.spec,
                name,
                solved(matrix, start, HalfQuadratic(**asdict(self))),
            )
            before = loss(start)
            result[name], after = better(start, before, found, loss(found))
            power = float(loss.power()) or 1.0
            outcomes.append(
                Outcome(
                    name,
                    self.name,
                    float(before.sum()) / power,
                    float(after.sum()) / power,
                ),
            )
        return result, outcomes


def can_solve(spec: TensorSpec) -> bool:
    """Whether a format has zero points of its own, for blocks or outputs.

    >>> can_solve(TensorSpec("uint4", symmetric=False, block_size=32)), can_solve(TensorSpec("int4", block_size=32))
    (True, False)
    """  # noqa: E501
    asymmetric = (
        isinstance(spec.dtype, Integer)
        and spec.dtype.bits <= 8
        and not spec.grid.symmetric
    )
    return asymmetric and not spec.grid.pow2 and (spec.per_channel or bool(spec.group))


def solved(matrix: Any, start: Quantized, settings: HalfQuadratic) -> Params:
    """The scale and zero point of each block or output, shaped as ``start`` has them.

    Scales are positive.

    Args:
        matrix: (outputs, inputs), float32.
    """
    spec = start.spec
    bits = start.spec.dtype.bits
    size = spec.group or matrix.shape[1]
    values = matrix.cpu().numpy()
    whole = values.shape[1] // size * size
    scale, zero = (
        np.ones((len(values), -(-values.shape[1] // size)), np.float32)
        for _ in range(2)
    )
    rows = max(_SLAB // max(values.shape[1], 1), 1)
    for first in range(0, len(values), rows):
        own = slice(first, first + rows)
        # the padding of the last block is no part of the weight
        for place, part in (
            (slice(0, whole // size), values[own, :whole]),
            (slice(-1, None), values[own, whole:]),
        ):
            if part.size:
                found = half_quadratic(
                    part.reshape(-1, min(size, part.shape[1])),
                    bits,
                    settings,
                )
                scale[own, place] = found.scale.reshape(len(part), -1)
                zero[own, place] = found.zero_point.reshape(len(part), -1)
    # a negative scale counts codes from the other end
    zero = np.where(scale < 0, spec.grid.levels - zero, zero) + spec.grid.qmin
    kept = [
        torch.from_numpy(each).to(start.scale.device).reshape(start.scale.shape)
        for each in (np.abs(scale), zero)
    ]
    return Params(kept[0].to(scale_type(spec, start.dtype)), kept[1])


def _readers(job: BlockJob, made: Mapping[str, Quantized]) -> Iterator[tuple[str, Any]]:
    """Names of layers, each with the products of what it reads, (inputs, inputs).

    None where no data tells.
    """
    known = [
        name for name in made if kind_of(job.layers[name][0]) in ("Linear", "Conv1D")
    ]
    done: list[str] = []
    if job.calls and any(can_solve(made[name].spec) for name in known):
        stages = stages_in(job, known)
        job.replay = Replay(job, stages, made)
        for place, stage in enumerate(stages):
            job.replay.begin(place)
            grams = grams_of(job, stage, job.replay, exact=False)
            for group in stage.groups:
                gram = grams.pop(group[0]).own
                yield from ((name, gram) for name in group)
            done += [name for group in stage.groups for name in group]
        job.replay.begin(len(stages))
    yield from ((name, None) for name in made if name not in done)
