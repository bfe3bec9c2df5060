"""GPTQ, GPTAQ and Qronos: choose codes by the output error of a layer instead of the distance to
its weights.

- GPTQ: Frantar et al. 2023, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
  Transformers".
- GPTAQ: Li et al. 2025, "GPTAQ: Efficient Finetuning-Free Quantization for Asymmetric Calibration":
  what the layers before have done wrong counts, too.
- Qronos: Zhang et al. 2025, "Qronos: Correcting the Past by Shaping the Future": it is made good as
  far as possible.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from quark_onnx.errors import ConfigError, DataError
from quark_onnx.registry import ALGORITHMS
from quark_onnx.torch.algorithms.base import UNREACHED, BlockJob, Outcome
from quark_onnx.torch.algorithms.gptq.hessian import Gram, grams_of
from quark_onnx.torch.algorithms.gptq.levels import TensorLevels
from quark_onnx.torch.algorithms.gptq.losses import Loss, better, merged, squares_of
from quark_onnx.torch.algorithms.gptq.range_search import fitted, has_ranges
from quark_onnx.torch.algorithms.gptq.solver import AT_ONCE, Solver, Swept
from quark_onnx.torch.algorithms.scheduling.replay import Replay
from quark_onnx.torch.algorithms.scheduling.stages import stages_in
from quark_onnx.torch.formats.quantized_tensor import Quantized, joined
from quark_onnx.torch.models.quantized_layer import kind_of
from quark_onnx.torch.runtime.memory import release_memory


@ALGORITHMS.register("gptq")
@dataclass(frozen=True)
class GPTQ:
    """Rounds the columns of a weight one after the other.

    Those behind make good what was done wrong.

    Attributes:
        damping: added to the diagonal of the products of inputs, as a share of its mean; it grows
            where that does not suffice.
        act_order: begin with the columns whose inputs are largest; groups keep their places and
            scales.
        fit: choose ranges first by the error that they cause, in place of the least and greatest
            value.
        polish: how often each column is looked at again, all others as they are.
        rounds_activations: whether activations are quantized, as the layers do it, while codes are
            chosen. Rounding errors of 4 bits are noise on the inputs, to which the correction
            answers by shrinking weights.
    """

    name: ClassVar[str] = "gptq"
    stage: ClassVar[str] = "weights"
    needs_data: ClassVar[bool] = True

    damping: float = 0.05
    act_order: bool = True
    fit: bool = True
    polish: int = 1
    rounds_activations: bool = False

    def __post_init__(self) -> None:
        for name, upper in self._shares().items():
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not 0 <= value <= upper
            ):
                raise ConfigError(
                    f"{name} of {self.name} is {value!r}; it must be a number from 0 to"
                    f" {upper:g}",
                )
        for name in ("act_order", "fit", "rounds_activations"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    f"{name} of {self.name} is {getattr(self, name)!r}; it must be true"
                    " or false",
                )
        if type(self.polish) is not int or self.polish < 0:
            raise ConfigError(
                f"polish of {self.name} is {self.polish!r}; it must be a whole number,"
                " 0 or more",
            )

    def _shares(self) -> dict[str, float]:
        return {"damping": 1e4}

    @property
    def _share(self) -> float:
        """How much of what the layers before have done wrong is made good."""
        return 0.0

    @property
    def aims_at_float(self) -> bool:
        """Whether what the layers before have done wrong counts."""
        return self._share > 0

    def _damping(self, gram: Any) -> float:
        """As a share of the mean of the diagonal."""
        return self.damping

    def _first(self, weight: Any, pull: Any, power: Any) -> Any:
        """What the first column is rounded from, if not from the target."""
        return None

    def __call__(
        self,
        job: BlockJob,
        made: Mapping[str, Quantized],
    ) -> tuple[dict[str, Quantized], list[Outcome]]:
        """Choose codes, stage after stage; no output of a layer is worse than it was."""
        weights = {
            name: weight
            for name, weight, _ in job.weights()
            if kind_of(job.layers[name][0]) in _KINDS
        }
        kinds = {
            name: kind_of(module)
            for name, (module, _) in job.layers.items()
            if name in made
        }
        others = {name: kind for name, kind in kinds.items() if name not in weights}
        result = dict(made)
        outcomes = [
            Outcome(name, self.name, 0.0, 0.0, f"{kind} layers keep their codes")
            for name, kind in others.items()
        ]
        if not weights or not job.calls:
            return result, outcomes
        stages = stages_in(job, weights)
        job.replay = Replay(job, stages, result)
        for place, stage in enumerate(stages):
            job.replay.begin(place)
            grams = grams_of(job, stage, job.replay, exact=self.aims_at_float)
            job.replay.rest()
            for group in stage.groups:
                release_memory()
                outcomes += self._group(group, weights, grams.pop(group[0]), result)
        release_memory()
        job.replay.begin(len(stages))
        return result, outcomes

    def _group(
        self,
        group: Sequence[str],
        weights: Mapping[str, Any],
        gram: Gram,
        result: dict[str, Quantized],
    ) -> list[Outcome]:
        """Choose codes of layers that read the same."""
        if gram.own is None:
            return [Outcome(name, self.name, 0.0, 0.0, UNREACHED) for name in group]
        own = gram.own
        gram.own = None
        power = own.diagonal().clone()
        try:
            solver = Solver.of(own, self._damping(own), self.act_order, keep=False)
        except ArithmeticError as error:
            raise DataError(
                f"{self.name} cannot use what {group[0]} reads: {error}",
            ) from error
        del own
        searches = [
            self._search(name, weights[name].float(), result[name], gram, power, solver)
            for name in group
            if TensorLevels.of(result[name]) is not None
        ]
        for batch in _together(self._try(each, power) for each in searches):
            rows = [len(each.search.target) for each in batch]
            swept = solver.rounded(
                joined([each.search.target for each in batch]),
                [
                    TensorLevels.stacked(own)
                    for own in zip(*(each.steps for each in batch), strict=True)
                ],
                self.polish,
                joined([each.search.first for each in batch]),
            )
            for each, *own in zip(
                batch,
                *(part.split(rows) for part in swept),
                strict=True,
            ):
                each.consider(Swept(*own))
        found = {each.name: each for each in searches}
        result.update({name: each.best for name, each in found.items()})
        return [
            (
                self._outcome(found[each], gram)
                if each in found
                else self._plain(each, result)
            )
            for each in group
        ]

    def _search(  # noqa: PLR0913
        self,
        name: str,
        weight: Any,
        start: Quantized,
        gram: Gram,
        power: Any,
        solver: Solver,
    ) -> _Search:
        target = weight
        first = None
        pull = None
        if self._share and gram.off is not None:
            pull = self._share * (gram.off @ weight.t())
            target = weight + solver.solve(pull).t()
            first = self._first(weight, pull, power)
        return _Search(
            name,
            Loss(weight, solver.losses, pull),
            target,
            first,
            start,
            solver,
        )

    def _try(self, search: _Search, power: Any) -> _Try:
        """Scales to sweep with."""
        start = search.best
        fit = self.fit and has_ranges(start.spec)
        return _Try(
            search,
            (start, fitted(search.loss.weight, start, power)) if fit else (start,),
        )

    def _plain(self, name: str, made: Mapping[str, Quantized]) -> Outcome:
        return Outcome(
            name,
            self.name,
            0.0,
            0.0,
            f"{made[name].spec.dtype.name} is rounded to the nearest",
        )

    def _outcome(self, search: _Search, gram: Gram) -> Outcome:
        weight = search.loss.weight
        scale = float(search.loss.power()) or 1.0
        if search.loss.pull is None:
            rest = 0.0
        else:
            rest = self._share**2 * float(squares_of(gram.gap)(weight).sum())
        before, after = (
            max(float(each.sum()) + rest, 0.0) / scale
            for each in (search.plain, search.error)
        )
        return Outcome(search.name, self.name, before, after, f"{gram.count} tokens")


class _Search:
    """The best codes of one layer that were found.

    Args:
        name: of the layer.
        loss: what codes cost.
        target: float32 as the weight; what codes are to come near to.
        first: as it, what the first column is rounded from; None for the target.
        start: the codes so far.
        solver: whose sweeps codes come from.
    """

    def __init__(  # noqa: PLR0913
        self,
        name: str,
        loss: Loss,
        target: Any,
        first: Any,
        start: Quantized,
        solver: Solver,
    ) -> None:
        self.name = name
        self.loss = loss
        self.target = target
        self.first = first
        self.best = start
        self.plain = self.error = loss(start)
        self._solver = solver

    def consider(self, found: Quantized, swept: Swept) -> None:
        """Take it, row by row, where it costs less.

        With G for the products, D for the ridge, p for the pull and (G + D)s = p, the target is w +
        s, so that the damped cost (q - w - s)(G + D)(q - w - s) is the loss (q - w)G(q - w) - 2(q -
        w)p and (q - w)D(q - w) + sp.
        """
        if self._solver.damping > _MUCH:  # next to nothing is left of the difference
            error = self.loss(found)
        else:
            error = swept.cost - self._solver.ridged(swept.values, self.loss.weight)
            if self.loss.pull is not None:
                error -= ((self.target - self.loss.weight) * self.loss.pull.t()).sum(1)
        self.best, self.error = better(self.best, self.error, found, error)


@dataclass(frozen=True)
class _Try:
    """Scales to sweep with.

    Attributes:
        starts: each has some.
    """

    search: _Search
    starts: tuple[Quantized, ...]

    @cached_property
    def steps(self) -> list[TensorLevels]:
        """Those of each start."""
        return [
            steps
            for each in self.starts
            if (steps := TensorLevels.of(each)) is not None
        ]

    @property
    def kind(self) -> object:
        """What is the same for all that are swept together."""
        return self.steps[0].levels_of, self.steps[0].scale.shape[1], len(self.steps)

    def consider(self, swept: Swept) -> None:
        """What the sweep has found, each row with the scales that were picked for it."""
        found = self.starts[0]
        for place, each in enumerate(self.starts[1:], 1):
            found = merged(found, each, swept.picked == place)
        steps = TensorLevels.of(found)
        assert steps is not None
        self.search.consider(steps.put(found, swept.values), swept)


def _together(tries: Iterable[_Try]) -> Iterator[list[_Try]]:
    """Those with the same levels, as many in a row as are swept at once: a step takes its time for
    few rows, too.
    """
    batch = list[_Try]()
    count = 0
    for each in tries:
        size = each.search.target.numel() * len(each.starts)
        if batch and (each.kind != batch[0].kind or count + size > AT_ONCE):
            yield batch
            batch = []
            count = 0
        batch.append(each)
        count += size
    if batch:
        yield batch


#: Steps of the power iteration.
_POWERS = 30
#: Damping that hides the loss in the cost of a sweep.
_MUCH = 10.0
#: What is a matrix of outputs by inputs.
_KINDS = ("Linear", "Conv1D")


@ALGORITHMS.register("gptaq")
@dataclass(frozen=True)
class GPTAQ(GPTQ):
    """GPTQ that is aimed at what the float model computes, with its own inputs.

    Attributes:
        alpha: how much of what the layers before have done wrong is made good, from 0 to 1.
    """

    name: ClassVar[str] = "gptaq"

    alpha: float = 0.5

    def _shares(self) -> dict[str, float]:
        return super()._shares() | {"alpha": 1.0}

    @property
    def _share(self) -> float:
        return self.alpha


@ALGORITHMS.register("qronos")
@dataclass(frozen=True)
class Qronos(GPTQ):
    """All that the layers before have done wrong is made good, as far as the inputs allow it.

    The first column takes the best level beside the others as they are, and all that follow those
    beside the best others.

    Attributes:
        damping: as a share of what ``relative_to`` says. More than that of the others, as all that
            is said about errors of layers before is believed; the paper's is 1e-3 of the greatest
            eigenvalue.
        relative_to: "mean" of the diagonal of the products of inputs, or their greatest
            "eigenvalue". How much greater that is depends on the model: 1e-2 of it is too much for
            one, and 1e-3 too little for another.
    """

    name: ClassVar[str] = "qronos"

    damping: float = 0.15
    relative_to: str = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.relative_to not in ("mean", "eigenvalue"):
            raise ConfigError(
                f'relative_to of {self.name} is {self.relative_to!r}; it must be "mean"'
                ' or "eigenvalue"',
            )

    @property
    def _share(self) -> float:
        return 1.0

    def _damping(self, gram: Any) -> float:
        if self.relative_to == "mean":
            return self.damping
        gram = gram.double()
        # a random start: sums of rows, say, may be at right angles to what is looked for
        vector = torch.randn(
            len(gram),
            dtype=gram.dtype,
            generator=torch.Generator().manual_seed(0),
        ).to(gram.device)
        for _ in range(_POWERS):
            vector = gram @ (vector / vector.norm().clamp(min=1e-300))
        return self.damping * float(
            vector.norm() / gram.diagonal().mean().clamp(min=1e-300),
        )

    def _first(self, weight: Any, pull: Any, power: Any) -> Any:
        return weight + (pull / power.clamp(min=1e-30)[:, None]).t()
