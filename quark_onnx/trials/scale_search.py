"""Search of activation scales by the error in later layers, checked at the outputs.

Power-of-two scales can only be doubled or halved, so the scale with the least error on its own
tensor is often not the best for the model. Clipping the few large values of a layer and halving the
step of the rest are equal to a squared error, but not to later layers. Every activation scale is
therefore judged by the error in the results of the layers that read it (``local``). The error
is relative to the signal and computed per sample, so that no unusually large sample decides. A
scale moves step by step to the least error. One pass over the samples judges every scale that its
histogram does not rule out (``tensor_errors``); a few more passes follow for scales that keep
moving, independent of the number of layers. Finally, the model is run with and without the moves.
If the outputs are worse by more than chance, the half with the greatest expected gain is tried, and
so on. Outputs on a few samples vary more than local errors: moves that had to improve them by more
than chance were rejected in most runs of a detector (YOLOX-nano), which lost 1 to 2 points of mAP.

Power-of-two scales move by octaves, float scales by a quarter of an octave: the layers that
read a tensor decide which calibrator would have been right. Zero points do not change, so that
a range keeps its shape.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from calibrators import Statistic
from quark_onnx.common.errors import ConstraintError, ModelError
from quark_onnx.common.progress import Progress
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.traversal import in_order
from quark_onnx.plan import Plan, Quantize, Use
from quark_onnx.running.run import Reference, Sample
from quark_onnx.scales.apply_target_constraints import Limits
from quark_onnx.scales.compute_qparams import Params
from quark_onnx.trials.local import LocalErrors
from quark_onnx.trials.scale_trials import ScaleTrial
from quark_onnx.trials.tensor_errors import TensorErrors

logger = logging.getLogger(__name__)

Scales = dict[Use, NDArray[np.float32]]
Doubles = NDArray[np.float64]

#: For scales whose statistics are unknown.
NO_RANGES: Mapping[Use, Statistic] = MappingProxyType({})

#: The step of power-of-two scales, and of float scales.
_OCTAVE, _QUARTER = 2.0, 2**0.25
#: Maximum move of a scale in octaves.
_FARTHEST = 6
#: The least normal float32.
_SMALLEST = np.finfo(np.float32).tiny
#: Noise over signal below this value counts as zero.
_FLOOR = 1e-3
#: Minimum decrease of the mean log noise, absolute and in standard errors.
_GAIN, _CERTAIN = 2e-3, 2.0


def search(  # noqa: PLR0913
    graph: Graph,
    plan: Plan,
    params: Params,
    limits: Limits,
    samples: Sequence[Sample],
    show: bool | None,
    corrected: Graph | None = None,
    reference: Reference | None = None,
    ranges: Mapping[Use, Statistic] = NO_RANGES,
) -> int:
    """Move the scales of activations in ``params``.

    Symmetric power-of-two scales and float scales are searched.

    Args:
        graph: the float graph.
        plan: the decisions about its tensors.
        params: the scales.
        limits: constraints of a target; tied scales move along with the scale under trial.
        samples: a few samples. Local errors are measured on the first half, output errors on
            the second. The first half has an even number, as two run at the same time.
        show: whether to show a progress bar, as ``Progress`` takes it.
        corrected: the graph with the biases of the quantized model, if they differ.
        reference: the float model, if the graph computes its outputs.
        ranges: the statistics of calibration; scales that they rule out are not measured.

    Returns:
        The number of moved scales.
    """
    # The order decides between equal gains: the one of the file would make equal graphs differ.
    order = _order(graph)
    # Weights and bounded functions have a stride of 0: their scales are known without a search.
    uses = [use for use in params.table if _stride(graph, plan, use)]
    uses.sort(key=lambda use: order.get(use, len(order)))
    if not uses or not samples:
        return 0
    start = {use: np.asarray(qparams.scale) for use, qparams in params.table.items()}
    # Two halves: a move that fits the first by chance must hold on the second.
    half = _first_half(len(samples))
    progress: Progress | None = None
    try:
        errors = LocalErrors(graph, plan, params, uses, samples[:half])
        descent = _Descent(
            errors,
            {use: _stride(graph, plan, use) for use in errors.uses},
            start,
            limits,
            TensorErrors(plan, params, ranges),
        )
        progress = Progress(show, len(descent.groups), "searching scales", "scale")
        with progress:
            descent.run(progress)
        moves = _allowed(descent, start, limits)
        if not moves:  # no move is promising: the model need not be run
            return 0
        probe = ScaleTrial(
            graph,
            corrected or graph,
            plan,
            params,
            samples[half:] or samples,
            reference,
        )
    except Exception as error:  # onnxruntime raises several unrelated types
        if progress is not None and error is progress.ended_by:
            raise
        _warn_of_failure(error)
        return 0
    if not probe.usable:
        logger.warning(
            "the scales are not searched: no output is a tensor of finite values other than zero",
        )
        return 0
    try:
        with probe:
            scales = _checked(probe, moves, start, limits)
    except ModelError:
        raise
    except Exception as error:  # onnxruntime raises several unrelated types
        _warn_of_failure(error)
        return 0
    moved = [use for use, scale in scales.items() if (scale != start[use]).any()]
    for use in moved:
        params.table[use] = params.table[use].with_scale(scales[use])
    return len(moved)


def _first_half(count: int) -> int:
    """Return the number of samples for local errors, even unless there are fewer than 4."""
    half = max(1, count // 2)
    return half - half % 2 if half > 1 else half


def _warn_of_failure(error: Exception) -> None:
    """Log why scales are not searched; without a search they are valid, too."""
    logger.warning(
        "the scales are not searched, a model to measure them does not run: %s", error
    )


class _Descent:
    """A descent of scales and tied scales to the least local error.

    Attributes:
        groups: groups of uses with a common scale, in the order of the graph.
    """

    def __init__(
        self,
        errors: LocalErrors,
        strides: dict[Use, float],
        start: Scales,
        limits: Limits,
        tensor_errors: TensorErrors,
    ) -> None:
        """Start without measured errors.

        Args:
            errors: measures local errors of scales.
            strides: the factor between adjacent scales of each use; only uses in it are searched.
            start: the scales at step 0.
            limits: constraints that tie uses to a common scale.
            tensor_errors: rules scales out that need not be measured.
        """
        self._errors, self.strides, self._start = errors, strides, start
        self._tensor_errors = tensor_errors
        self._known: dict[Use, dict[int, Doubles]] = {use: {} for use in strides}
        # Tied uses give the same tuple, which counts once.
        groups = dict.fromkeys(
            tuple(tied for tied in limits.tied(use) if tied in strides)
            for use in strides
        )
        self.groups = list(groups)

    def run(self, progress: Progress) -> None:
        """Measure errors until the minimum of every group is bracketed.

        Args:
            progress: updated with the number of groups that are done.
        """
        # One pass over the samples for all groups, until no group asks for a further step: from the
        # start, if histograms rule out every alternative.
        open_groups = [group for group in self.groups if self._missing(group)]
        while open_groups:
            asked = dict.fromkeys(
                (use, step)
                for group in open_groups
                for use in group
                for step in self._missing(group)
            )
            scales = {(use, step): self.scale(use, step) for use, step in asked}
            for (use, step), shares in self._errors.measure(scales).items():
                # Logarithms, so that a sample with much noise does not decide alone; (samples,).
                self._known[use][step] = np.log(shares + _FLOOR)
            open_groups = [group for group in open_groups if self._missing(group)]
            progress.update(len(self.groups) - len(open_groups))

    def scale(self, use: Use, step: int) -> NDArray[np.float32]:
        """Return the scale of a use after ``step`` steps.

        Args:
            step: number of strides from the start, negative for smaller scales.

        Returns:
            The scale in the shape of the start; the start itself if the scale is no normal float32.
        """
        # Steps count from the start, so that a step is the same scale however it is reached.
        scale = np.asarray(
            self._start[use] * np.float32(self.strides[use] ** step), np.float32
        )
        # A denormal scale is inexact, and flushed to zero by some processors; the step then changes
        # nothing.
        is_normal = np.isfinite(scale).all() and (scale >= _SMALLEST).all()
        return scale if is_normal else self._start[use]

    def error(self, use: Use, step: int) -> Doubles | None:
        """Return the log noise-to-signal ratio (samples,) after ``step`` strides, if known."""
        return self._known.get(use, {}).get(step)

    def best(self, group: Sequence[Use]) -> int:
        """Return the step with the least error over the uses of a group.

        Args:
            group: uses with a common scale, measured by ``run``.

        Returns:
            The step; 0 where no step is significantly better, or was worth measuring.
        """
        totals = self._totals(group)
        if not totals:
            return 0
        # Among equal errors, the step nearest to the start.
        least = min(totals, key=lambda step: (totals[step].mean(), abs(step)))
        return least if is_better(list(totals[least]), list(totals[0])) else 0

    def _totals(self, group: Sequence[Use]) -> dict[int, Doubles]:
        """Return the errors of a group by step, summed over its uses; (samples,) each."""
        steps = sorted(self._known[group[0]])
        return {
            step: np.sum([self._known[use][step] for use in group], axis=0)
            for step in steps
        }

    def _missing(self, group: Sequence[Use]) -> list[int]:
        """Return the steps to measure next.

        Where the minimum is at an end of the known steps, the number of known steps doubles, so
        that a distant scale needs few passes over the samples.

        Args:
            group: uses with a common scale.

        Returns:
            The steps; empty if the minimum is bracketed, or at the farthest step or the last one
            that is promising.
        """
        known = self._known[group[0]]
        # The start and one step to both sides bracket the minimum of most scales.
        if not known:
            sides = [step for step in (-1, 1) if self._is_promising(group, step)]
            # Without an alternative, the error at the start is of no use.
            return sorted([0, *sides]) if sides else []
        totals = self._totals(group)
        least = min(totals, key=lambda step: (totals[step].mean(), abs(step)))
        # 6 steps of an octave, 24 of a quarter.
        farthest = round(_FARTHEST / np.log2(self.strides[group[0]]))
        further = range(0)
        if least == max(known):
            further = range(least + 1, min(2 * least + 1, farthest) + 1)
        elif least == min(known):
            further = range(least - 1, max(2 * least - 1, -farthest) - 1, -1)
        return list(takewhile(partial(self._is_promising, group), further))

    def _is_promising(self, group: Sequence[Use], step: int) -> bool:
        """Return whether a step may have less error than the one before it.

        Args:
            group: uses with a common scale.
            step: number of strides from the start, not 0.
        """
        nearer = step - 1 if step > 0 else step + 1
        for use in group:
            # Functions such as Hardmax are cheap to measure, and do not follow the error of their
            # input.
            if not self._errors.has_layer(use):
                return True
            scales = (self.scale(use, nearer), self.scale(use, step))
            if not self._tensor_errors.is_hopeless(use, *scales):
                return True
        return False


@dataclass(frozen=True)
class _Move:
    """A move of a scale and of tied scales.

    Attributes:
        use: the use whose scale moves.
        factor: the factor of the scale.
        gain: the decrease of the local errors.
    """

    use: Use
    factor: float
    gain: float


def _allowed(descent: _Descent, start: Scales, limits: Limits) -> list[_Move]:
    """Return the promising moves within the limits, in graph order.

    Args:
        descent: the measured errors.
        start: the scales before all moves; not changed.
    """
    moves = list[_Move]()
    scales = dict(start)
    for group in descent.groups:
        best = descent.best(group)
        # From the best step back towards the start, as far as the limits of the target forbid.
        for step in range(best, 0, -1 if best > 0 else 1):
            factor = float(descent.strides[group[0]] ** step)
            trial = _moved(scales, group[0], factor, limits)
            # Other scales that the constraints move along count with what they gain or lose.
            gain = sum(
                _gain(descent, use, start[use], scales[use], scale)
                for use, scale in trial.items()
            )
            if trial and gain > _GAIN:
                moves.append(_Move(group[0], factor, gain))
                # Later moves are judged with the earlier ones applied.
                scales = trial
                break
    return moves


def _applied(moves: Sequence[_Move], start: Scales, limits: Limits) -> Scales:
    """Return the scales after some moves, without moves that the limits forbid."""
    scales = start
    for move in moves:
        scales = _moved(scales, move.use, move.factor, limits) or scales
    return scales


def _gain(
    descent: _Descent,
    use: Use,
    start: NDArray[np.float32],
    before: NDArray[np.float32],
    after: NDArray[np.float32],
) -> float:
    """Return the decrease of the local error of a use.

    Args:
        descent: the measured errors.
        start: its scale at step 0.
        before: its scale before the move.
        after: its scale after the move.

    Returns:
        The decrease of the mean log error; 0 for an unchanged or unsearched scale, and minus
        infinity if an error was not measured.
    """
    # Scales without a stride have no measured error, and count as unchanged.
    if use not in descent.strides or (before == after).all():
        return 0.0
    errors = list[Doubles | None]()
    for scale in (before, after):
        # Back from scales to whole steps; rounding removes the error of float32.
        steps = np.log(float(scale.max()) / float(start.max())) / np.log(
            descent.strides[use],
        )
        errors.append(descent.error(use, round(steps)))
    error_before, error_after = errors
    if error_before is None or error_after is None:
        return -np.inf
    return float((error_before - error_after).mean())


def _checked(
    probe: ScaleTrial, moves: Sequence[_Move], start: Scales, limits: Limits
) -> Scales:
    """Return the scales after the largest set of moves that the outputs do not speak against.

    All moves are tried first, then half of them, and so on.

    Args:
        moves: the promising moves, in graph order.
        start: the scales before all moves.

    Returns:
        The scales of every use; empty if every set makes the outputs worse by more than chance.
    """
    before = probe.noise({})
    # The sort is stable: equal gains stay in graph order.
    chosen = sorted(moves, key=lambda move: -move.gain)
    while chosen:
        # In graph order, in which the gains were computed.
        scales = _applied([move for move in moves if move in chosen], start, limits)
        if not is_worse(probe.noise(scales), before):
            return scales
        chosen = chosen[: len(chosen) // 2]
    return {}


def _order(graph: Graph) -> dict[Use, int]:
    """Return a position for every use, independent of the node order in the file.

    Tensors are counted as they are reached from the outputs, inputs of a node before its
    outputs.
    """

    def leaders(node: Node) -> list[Node]:
        # The last one is visited first.
        producers = [graph.producer(tensor) for tensor in reversed(node.inputs)]
        return [producer for producer in producers if producer is not None]

    positions = dict[Use, int]()
    ends = [graph.producer(value.name) for value in graph.outputs]
    roots = [node for node in ends if node is not None]
    for node in in_order(roots, leaders):
        for tensor in node.inputs:
            for use in (Use(tensor), Use(tensor, node.name)):
                positions.setdefault(use, len(positions))
        for tensor in node.outputs:
            positions.setdefault(Use(tensor), len(positions))
    return positions


def _stride(graph: Graph, plan: Plan, use: Use) -> float:
    """Return the factor between adjacent scales of a use; 0 for a fixed scale.

    Args:
        use: the use. Constants, known bounds, per-channel scales and float16 scales are fixed.
    """
    entry = plan.entries.get(use)
    if (
        not isinstance(entry, Quantize)
        or entry.bounds is not None
        or entry.spec.scale != "float32"
    ):
        return 0.0
    # A scale per channel would need a search for each channel; weights have codes of their own.
    if entry.axis is not None or graph.is_constant(use.tensor):
        return 0.0
    if entry.spec.pow2:
        # The zero point of an asymmetric power-of-two scale would be wrong after a move.
        return _OCTAVE if entry.spec.symmetric else 0.0
    return _QUARTER if entry.spec.dtype.uniform else 0.0


def _moved(scales: Scales, use: Use, factor: float, limits: Limits) -> Scales:
    """Return the scales after multiplying a single scale, within the target's limits.

    Args:
        scales: the scales of every use; not changed.
        use: the use under trial; tied uses move along.
        limits: constraints of the target, which may move further scales.

    Returns:
        The scales of every use; empty if a scale would leave the normal numbers, or if the scale
        under trial would move back.
    """
    tied = limits.tied(use)
    moved = {
        member: np.asarray(scales[member] * np.float32(factor), np.float32)
        for member in tied
    }
    if not all(
        np.isfinite(scale).all() and (scale >= _SMALLEST).all()
        for scale in moved.values()
    ):
        return {}
    trial = scales | moved
    try:
        # Scales that have to follow, so that every constraint holds again.
        settled = limits.settled(
            {member: float(trial[member]) for member in limits.uses}
        )
    except ConstraintError:
        return {}
    # The solver satisfied the constraints by moving the scale back.
    if not settled.keys().isdisjoint(tied):
        return {}
    return trial | {
        member: np.full_like(trial[member], scale) for member, scale in settled.items()
    }


def is_better(noise: Sequence[float], best: Sequence[float]) -> bool:
    """Return whether the noise per sample has become less by more than chance.

    Args:
        noise: log noise of a trial.
        best: log noise of the best trial so far.
    """
    gain, error = _gain_and_error(noise, best)
    return gain > max(_GAIN, _CERTAIN * error)


def is_worse(noise: Sequence[float], before: Sequence[float]) -> bool:
    """Return whether the noise per sample has become more by more than its standard error.

    Args:
        noise: log noise of a trial.
        before: log noise without the changes of the trial.
    """
    gain, error = _gain_and_error(noise, before)
    # NaN is worse, and so is a finite gain that is below minus its error.
    return not (gain >= 0 or gain >= -error)


def _gain_and_error(
    noise: Sequence[float], before: Sequence[float]
) -> tuple[float, float]:
    """Return the mean decrease of the noise per sample, and its standard error.

    Args:
        noise: log noise of a trial; infinity for an overflow.
        before: log noise to compare with.
    """
    # Infinity less infinity is NaN: neither better nor acceptable.
    with np.errstate(invalid="ignore"):
        gains = np.subtract(before, noise)
        # Of the mean of paired differences; unknown for a single sample.
        error = gains.std(ddof=1) / len(gains) ** 0.5 if len(gains) > 1 else 0.0
        return float(gains.mean()), float(error)
