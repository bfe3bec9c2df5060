"""GPTQ, GPTAQ and Qronos: round weights by the output error of a layer.

- GPTQ: Frantar et al. 2023, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
  Transformers".
- GPTAQ: Li et al. 2025, "GPTAQ: Efficient Finetuning-Free Quantization for Asymmetric Calibration":
  the error of quantized layers upstream counts, and is corrected in part.
- Qronos: Zhang et al. 2025, "Qronos: Correcting the Past by Shaping the Future": the error upstream
  is corrected as far as the inputs allow.

The maths is in :mod:`quark_onnx.torch.algorithms.gptq.solver`. The classes here prepare Hessians
and targets, form batches, and keep a result where the loss is less than before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch

from calibrators.base import is_number
from calibrators.onnx_runtime.freed_memory import return_freed_memory
from quark_onnx.common.errors import DataError
from quark_onnx.common.registry import ALGORITHMS
from quark_onnx.config.checks import require
from quark_onnx.optimizers.base import require_flag, require_whole
from quark_onnx.torch.algorithms.base import UNREACHED, BlockJob, Chosen, Outcome
from quark_onnx.torch.algorithms.gptq.hessian import (
    HessianStats,
    hessians_by_stage,
    largest_stage,
)
from quark_onnx.torch.algorithms.gptq.solver import AT_ONCE, Rounded, Solver
from quark_onnx.torch.algorithms.memory import Shapes
from quark_onnx.torch.algorithms.scheduling.replay import stored_bytes
from quark_onnx.torch.algorithms.weight_rounding.levels import TensorLevels
from quark_onnx.torch.algorithms.weight_rounding.losses import (
    Loss,
    better,
    merged,
    squares_of,
)
from quark_onnx.torch.algorithms.weight_rounding.range_search import (
    fitted,
    has_ranges,
)
from quark_onnx.torch.formats.quantized_tensor import Quantized, joined
from quark_onnx.torch.models.quantized_layer import kind_of

#: Iterations of the power method.
_POWER_ITERATIONS = 30
#: Above this damping, the cost of a sweep is nearly all damping: the loss would vanish in rounding.
_MUCH_DAMPING = 10.0
#: Number of arrays of a weight's size during a sweep: targets, dequantized values, errors, updates,
#: scales and zero points.
_SWEEP_COPIES = 10
#: Layers whose weight is a matrix (outputs, inputs).
_KINDS = ("Linear", "Conv1D")


@ALGORITHMS.register("gptq")
@dataclass(frozen=True)
class GPTQ:
    """Round a weight column by column, with error feedback to later columns.

    Attributes:
        damping: added to the diagonal of the Hessian, relative to the mean of the diagonal;
            multiplied by 10 until the Hessian can be factored.
        act_order: round columns in the order of decreasing activation energy; groups keep their
            columns and scales.
        search_scales: first choose scales by the rounding error, instead of by the extreme values.
        coordinate_descent_passes: passes after the sweep in which each column takes the best level
            while all other columns stay.
        rounds_activations: quantize activations while codes are chosen. Rounding errors of 4 bits
            are noise on the inputs, and error feedback answers noise by shrinking weights.
    """

    name: ClassVar[str] = "gptq"
    stage: ClassVar[str] = "weights"
    needs_data: ClassVar[bool] = True

    damping: float = 0.05
    act_order: bool = True
    search_scales: bool = True
    coordinate_descent_passes: int = 1
    rounds_activations: bool = False

    def __post_init__(self) -> None:
        for name, upper in self._upper_limits().items():
            value = getattr(self, name)
            require(
                is_number(value) and 0 <= value <= upper,
                f"{name} of {self.name}",
                value,
                f"a number from 0 to {upper:g}",
            )
        require_flag(self, "act_order", "search_scales", "rounds_activations")
        require_whole(self, "coordinate_descent_passes", least=0)

    def _upper_limits(self) -> dict[str, float]:
        """Return the numeric settings with their greatest values; subclasses add theirs."""
        return {"damping": 1e4}

    @property
    def _correction(self) -> float:
        """The share of the error upstream that the weight corrects, 0 to 1."""
        return 0.0

    @property
    def aims_at_float(self) -> bool:
        """Whether the inputs of the float model are needed."""
        return self._correction > 0

    def memory(self, shapes: Shapes) -> int:
        """Return the estimated bytes of stored inputs, Hessians and a sweep."""
        # GPTAQ and Qronos also sum X^T D, with D the difference to the inputs of the float model.
        sums = 2 if self.aims_at_float else 1
        hessians = 4 * sums * largest_stage(shapes)
        most_inputs = max((inputs for _, inputs in shapes.layers.values()), default=0)
        swept = 0
        for (_, inputs), outputs in shapes.groups.items():
            # The present scales and those of the search are swept side by side.
            swept = max(swept, outputs * (1 + self.search_scales) * inputs)
        # the larger of a copy of H during the factorization and the sweep
        working = max(4 * most_inputs**2, _SWEEP_COPIES * 4 * min(swept, AT_ONCE))
        return shapes.block + stored_bytes(shapes) + hessians + working

    def damping_for(self, H: torch.Tensor) -> float:
        """Return the damping relative to the mean of the diagonal."""
        return self.damping

    def _first_column(
        self, W: torch.Tensor, cross_products: torch.Tensor, diagonal: torch.Tensor
    ) -> torch.Tensor | None:
        """Return values to round in the first column, (rows, inputs); None for the target."""
        return None

    def __call__(
        self,
        job: BlockJob,
        quantized_weights: Mapping[str, Quantized],
    ) -> Chosen:
        """Choose codes, stage after stage; no output of a layer gets worse.

        Args:
            job: the block.
            quantized_weights: the codes so far.

        Returns:
            The codes, and an outcome for each layer.

        Raises:
            DataError: a layer's inputs are not finite.
        """
        weights = {
            name: weight
            for name, weight, _ in job.weights()
            if kind_of(job.layers[name][0]) in _KINDS
        }
        result = dict(quantized_weights)
        outcomes = list[Outcome]()
        for name, (module, _) in job.layers.items():
            # Convolutions and embeddings have no Hessian of rows of inputs here.
            if name in quantized_weights and name not in weights:
                note = f"{kind_of(module)} layers keep their codes"
                outcomes.append(Outcome.unchanged(name, self.name, note))
        if not weights or not job.calls:
            return result, outcomes
        groups = hessians_by_stage(job, weights, result, exact=self.aims_at_float)
        for group, stats in groups:
            return_freed_memory()
            outcomes += self.quantize_group(group, weights, stats, result)
            # Freed before the products of the next stage are summed.
            del stats
        return_freed_memory()
        return result, outcomes

    def quantize_group(
        self,
        group: Sequence[str],
        weights: Mapping[str, torch.Tensor],
        stats: HessianStats,
        result: dict[str, Quantized],
    ) -> list[Outcome]:
        """Round the weights of layers with the same inputs; write them to ``result``."""
        if stats.xx is None:
            return [Outcome.unchanged(name, self.name, UNREACHED) for name in group]
        # Layers of a group read the same tensor: one factorization serves all of them.
        inputs = self._factor(group[0], stats)
        searches = dict[str, _LayerSearch]()
        for name in group:
            if TensorLevels.of(result[name]) is not None:
                W = weights[name].float()
                searches[name] = self.layer_search(name, W, result[name], inputs)
        # scales are searched batch by batch, as a batch needs memory for all of its candidates
        candidates = (
            self._candidates(search, inputs.diagonal) for search in searches.values()
        )
        for batch in _batches(candidates):
            self._quantize(batch, inputs.solver)
        for name, search in searches.items():
            result[name] = search.best
        outcomes = list[Outcome]()
        for name in group:
            if name in searches:
                outcomes.append(self._outcome(searches[name], stats))
            else:
                note = f"{result[name].spec.dtype.name} is rounded to the nearest"
                outcomes.append(Outcome.unchanged(name, self.name, note))
        return outcomes

    def _factor(self, name: str, stats: HessianStats) -> GroupInputs:
        """Factor the Hessian in place, and remove it from ``stats``."""
        H = stats.xx
        assert H is not None
        # The solver overwrites H: a Hessian of 16,384 inputs takes 1 GiB, and there is no second
        # one.
        stats.xx = None
        # Before the factorization, which overwrites it.
        diagonal = H.diagonal().clone()
        damping = self.damping_for(H)
        try:
            solver = Solver.of(H, damping, self.act_order, keep=False)
        except ArithmeticError as error:
            raise DataError(
                f"{self.name} cannot use what {name} reads: {error}"
            ) from error
        return GroupInputs(stats, diagonal, solver)

    def layer_search(
        self, name: str, W: torch.Tensor, start: Quantized, inputs: GroupInputs
    ) -> _LayerSearch:
        """Return the target of a layer with the codes so far.

        GPTAQ and Qronos aim at the outputs of the float model, W (x + d), where d is the float
        input minus x. The least squares solution is W + W D^T X (H + ridge)^-1.
        """
        solver = inputs.solver
        if not self._correction or inputs.stats.xd is None:
            return _LayerSearch(name, Loss(W, solver.losses), W, None, start, solver)
        # (inputs, outputs): X^T D W^T, the products of the inputs and the error upstream at the
        # outputs.
        cross_products = self._correction * (inputs.stats.xd @ W.t())
        target = W + solver.solve(cross_products).t()
        first_column = self._first_column(W, cross_products, inputs.diagonal)
        loss = Loss(W, solver.losses, cross_products)
        return _LayerSearch(name, loss, target, first_column, start, solver)

    def _candidates(self, search: _LayerSearch, diagonal: torch.Tensor) -> _Candidates:
        """Return the scales to sweep with: the present scales, and the result of a search."""
        start = search.best
        # Block formats have scales that follow from the elements, and per-tensor scales concern all
        # rows.
        if not self.search_scales or not has_ranges(start.spec):
            return _Candidates(search, (start,))
        return _Candidates(search, (start, fitted(search.loss.weight, start, diagonal)))

    def _quantize(self, batch: Sequence[_Candidates], solver: Solver) -> None:
        """Sweep the weights of a batch as a single matrix, and keep improved rows."""
        # One entry per candidate, with the levels of all weights.
        levels = zip(*(candidates.levels for candidates in batch), strict=True)
        targets = [candidates.search.target for candidates in batch]
        rounded = solver.quantize(
            joined(targets),
            [TensorLevels.stacked(layer_levels) for layer_levels in levels],
            self.coordinate_descent_passes,
            joined([candidates.search.first_column for candidates in batch]),
        )
        # The rows of the batch go back to their layers.
        rows = [len(target) for target in targets]
        layer_results = zip(*(tensor.split(rows) for tensor in rounded), strict=True)
        for candidates, result in zip(batch, layer_results, strict=True):
            candidates.consider(Rounded(*result))

    def _outcome(self, search: _LayerSearch, stats: HessianStats) -> Outcome:
        W = search.loss.weight
        power = float(search.loss.power()) or 1.0
        # the loss leaves out a constant, the error of the float weight itself
        constant = 0.0
        if search.loss.cross_products is not None:
            # W D^T D W^T, the error upstream at the outputs of the float weight.
            constant = self._correction**2 * float(squares_of(stats.dd)(W).sum())
        # Differences of large float32 sums: rounding may leave a tiny negative error.
        before = max(float(search.start_error.sum()) + constant, 0.0) / power
        after = max(float(search.error.sum()) + constant, 0.0) / power
        return Outcome(search.name, self.name, before, after, f"{stats.count} tokens")


class GroupInputs(NamedTuple):
    """The common inputs of a group of layers.

    Attributes:
        stats: the second moments; the Hessian is in ``solver``.
        diagonal: (inputs,), the diagonal of the Hessian.
        solver: the factored Hessian.
    """

    stats: HessianStats
    diagonal: torch.Tensor
    solver: Solver


class _LayerSearch:
    """The best codes of a layer so far.

    Attributes:
        name: the layer.
        loss: the output error of codes.
        target: (outputs, inputs) float32, the values to approximate.
        first_column: (outputs, inputs), the values of the first column; None for the target.
        best: the codes.
        error: (outputs,), the loss of ``best``.
        start_error: (outputs,), the loss before the search.
    """

    def __init__(  # noqa: PLR0913 - the parts of the search are independent
        self,
        name: str,
        loss: Loss,
        target: torch.Tensor,
        first_column: torch.Tensor | None,
        start: Quantized,
        solver: Solver,
    ) -> None:
        self.name = name
        self.loss = loss
        self.target = target
        self.first_column = first_column
        self.best = start
        self.start_error = self.error = loss(start)
        self._solver = solver

    def consider(self, codes: Quantized, rounded: Rounded) -> None:
        """Take the rows of a sweep whose loss is less.

        The loss follows from the cost of the sweep, without another product with H. With R for the
        ridge, p for the cross products, and (H + R) s = p, the target is w + s. The cost
        (q - w - s) (H + R) (q - w - s) is the sum of the loss (q - w) H (q - w) - 2 (q - w) p, of
        (q - w) R (q - w), and of s p.
        """
        W = self.loss.weight
        # Subtracting so much damping from the cost would cancel nearly all of its digits.
        if self._solver.damping > _MUCH_DAMPING:
            error = self.loss(codes)
        else:
            error = rounded.cost - self._solver.damping_costs(rounded.Q, W)
            if self.loss.cross_products is not None:
                error -= ((self.target - W) * self.loss.cross_products.t()).sum(1)
        self.best, self.error = better(self.best, self.error, codes, error)


@dataclass(frozen=True)
class _Candidates:
    """The candidates of scales for a layer.

    Attributes:
        search: the search of the layer's codes.
        starts: the weight, quantized with each candidate.
    """

    search: _LayerSearch
    starts: tuple[Quantized, ...]

    @cached_property
    def levels(self) -> list[TensorLevels]:
        """The levels of the starts."""
        levels = [TensorLevels.of(start) for start in self.starts]
        return [level for level in levels if level is not None]

    @property
    def kind(self) -> object:
        """A key that is equal for weights of a batch."""
        levels = self.levels[0]
        return levels.levels_of, levels.scale.shape[1], len(self.levels)

    def consider(self, rounded: Rounded) -> None:
        """Pass the result of a sweep to the search, each row with the scales that it chose."""
        codes = self.starts[0]
        for index, start in enumerate(self.starts[1:], 1):
            codes = merged(codes, start, rounded.choice == index)
        levels = TensorLevels.of(codes)
        assert levels is not None
        self.search.consider(levels.put(codes, rounded.Q), rounded)


def _batches(per_layer: Iterable[_Candidates]) -> Iterator[list[_Candidates]]:
    """Group consecutive weights with the same levels, up to ``AT_ONCE`` elements.

    A column of few rows takes as long as a column of many.
    """
    batch = list[_Candidates]()
    count = 0
    for candidates in per_layer:
        size = candidates.search.target.numel() * len(candidates.starts)
        # Rows of one matrix must have the same levels, groups and number of candidates.
        if batch and (candidates.kind != batch[0].kind or count + size > AT_ONCE):
            yield batch
            batch = []
            count = 0
        batch.append(candidates)
        count += size
    if batch:
        yield batch


@ALGORITHMS.register("gptaq")
@dataclass(frozen=True)
class GPTAQ(GPTQ):
    """GPTQ with the outputs of the float model, on its own inputs, as the target.

    Attributes:
        alpha: the share of the error upstream that weights correct, 0 to 1.
    """

    name: ClassVar[str] = "gptaq"

    alpha: float = 0.5

    def _upper_limits(self) -> dict[str, float]:
        return super()._upper_limits() | {"alpha": 1.0}

    @property
    def _correction(self) -> float:
        return self.alpha


@ALGORITHMS.register("qronos")
@dataclass(frozen=True)
class Qronos(GPTQ):
    """GPTQ that corrects the error upstream as far as the inputs allow.

    The first column takes the best level for the other columns as they are; each later column, for
    the best values of the columns that follow.

    Attributes:
        damping: in units of ``relative_to``. The default is greater than GPTQ's, because the whole
            error upstream is corrected, noise included; the paper has 1e-3 of the greatest
            eigenvalue.
        relative_to: "mean" of the Hessian's diagonal, or the greatest "eigenvalue". Their ratio
            depends on the model: 1e-2 of the eigenvalue is too much for some models, and 1e-3 too
            little for others.
    """

    name: ClassVar[str] = "qronos"

    damping: float = 0.15
    relative_to: str = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.relative_to in ("mean", "eigenvalue"),
            f"relative_to of {self.name}",
            self.relative_to,
            '"mean" or "eigenvalue"',
        )

    @property
    def _correction(self) -> float:
        return 1.0

    def damping_for(self, H: torch.Tensor) -> float:
        """Return the damping relative to the mean of the diagonal, from the chosen unit."""
        if self.relative_to == "mean":
            return self.damping
        # In float64: float32 would lose digits over 30 products.
        H = H.double()
        # a random start: a vector such as the row sums may be orthogonal to the eigenvector
        generator = torch.Generator().manual_seed(0)
        vector = torch.randn(len(H), dtype=H.dtype, generator=generator).to(H.device)
        for _ in range(_POWER_ITERATIONS):
            # The norm after the last product approaches the greatest eigenvalue.
            vector = H @ (vector / vector.norm().clamp(min=1e-300))
        return self.damping * float(
            vector.norm() / H.diagonal().mean().clamp(min=1e-300),
        )

    def _first_column(
        self, W: torch.Tensor, cross_products: torch.Tensor, diagonal: torch.Tensor
    ) -> torch.Tensor | None:
        # The minimum of the loss in one column while the others keep their float values.
        return W + (cross_products / diagonal.clamp(min=1e-30)[:, None]).t()
